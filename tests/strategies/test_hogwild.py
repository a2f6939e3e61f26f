# SPDX-License-Identifier: Apache-2.0
"""One x for all: every update reaches it, gradients are as old as time makes them, checkpoints hold x once."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.strategies.points import START, Point, end_of, quadratic, slope, walk
from tests.zoo import Paced, adam, assert_close, assert_same, momentum, plain, train

from orchestra import ConfigError, Epochs, Hogwild, Local, Simulated, Steps
from orchestra.engine import checkpoint
from orchestra.engine.compute_times import RecordedTimes
from orchestra.model.flat_optimizer import Factory


@pytest.mark.parametrize("optimizer", [momentum, adam], ids=["momentum", "adam"])
def test_one_worker_is_plain_training_bit_for_bit_in_either_world(optimizer: Factory, tmp_path: Path) -> None:
    expected = plain(optimizer=optimizer, steps=20)
    for i, world in enumerate((Local(workers=1), Simulated(workers=1))):
        assert_same(
            train(Hogwild(), tmp_path / f"{i}", cluster=world, optimizer=optimizer, budget=Steps(20)).model, expected
        )


@pytest.mark.parametrize("numerics", ["real", "batched"])
def test_every_gradient_misses_an_update_of_each_other_worker(numerics: Any, tmp_path: Path) -> None:
    """Of equal workers each takes its next gradient right after its own update."""
    p, eta, steps = 3, 0.1, 8
    world = Simulated(workers=p, compute_time="constant:1", numerics=numerics)
    end = end_of(walk(Hogwild(), tmp_path, quadratic, lr=eta, steps=steps, cluster=world))
    x = [START] * p  # all begin at the same one
    for _ in range(p * steps):
        x.append(x[-1] - eta * x[-p])
    assert end == pytest.approx(x[-1], rel=1e-12)


@pytest.mark.parametrize("numerics", ["real", "batched"])
def test_a_gradient_is_as_old_as_the_others_make_it(numerics: Any, tmp_path: Path) -> None:
    """One worker takes three steps while the other takes one, whose gradient then misses all three."""
    eta = 0.3
    world = Simulated(
        workers=2, compute_time=RecordedTimes(((1.0, 1.0, 1.0, 9.0), (3.5, 9.5, 9.0, 9.0))), numerics=numerics
    )
    end = end_of(walk(Hogwild(), tmp_path, quadratic, lr=eta, steps=2, cluster=world))
    fast = START * (1 - eta) ** 2  # at 2 s
    after = fast - eta * START  # at 3.5 s
    assert end == pytest.approx(after - eta * after, rel=1e-12)


@pytest.mark.parametrize("slow", [0, 2])
def test_the_last_updates_of_every_worker_are_in_the_model(slow: int, tmp_path: Path) -> None:
    """Also those of a worker that ends long after the others."""
    p, steps = 3, 5
    world = Simulated(
        workers=p, compute_time=RecordedTimes(tuple((9.0 if i == slow else 1.0,) * steps for i in range(p)))
    )
    result = walk(Hogwild(), tmp_path, slope, lr=0.5, steps=steps, cluster=world)
    assert end_of(result) == START - 0.5 * p * steps
    assert result.summary.sent_total == 0


def test_a_checkpoint_holds_x_once_with_the_very_updates_that_were_counted(tmp_path: Path) -> None:
    """Worker 0 asks for it while worker 1 is in the middle of a step, which will be in it."""
    model = partial(Paced, {0: 0.05, 1: 0.12}, Point)
    given: dict[str, Any] = {"cluster": Local(workers=2), "model": model, "checkpoint_every": Steps(3)}
    walk(Hogwild(), tmp_path / "run", slope, lr=0.5, steps=4, **given)
    for label in (3, 4):  # one that worker 0 asks for, and one that worker 1 asks for when worker 0 is done
        saved = checkpoint.verify(tmp_path / "run" / "checkpoints" / checkpoint.name_of(label))
        first, second = (saved.node(rank) for rank in (0, 1))
        assert second["x"] is None
        done = [part["counts"][0] for part in (first, second)]
        assert done == ([3, 2] if label == 3 else [4, 3])
        assert float(first["x"]) == START - 0.5 * sum(done)
    result = walk(Hogwild(), tmp_path / "run", slope, lr=0.5, steps=6, resume=True, **given)
    assert end_of(result) == START - 0.5 * 2 * 6


def test_graphics_processors_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device in ("cuda", "auto"):
        with pytest.raises(ConfigError, match="workers of Hogwild share one x in the memory of the machine"):
            train(Hogwild(), tmp_path / "run", cluster=Local(workers=2, device=device))


def test_real_workers_learn(tmp_path: Path) -> None:
    """As well as one that takes the steps of all of them, one after the other, within what chance makes of it."""
    gentle = partial(torch.optim.SGD, lr=0.01)
    result = train(Hogwild(), tmp_path, workers=3, optimizer=gentle, budget=Epochs(20))
    alone = plain(optimizer=gentle, steps=20 * 17)
    assert_close(result.model, alone, tolerance=0.15)
