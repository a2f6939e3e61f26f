# SPDX-License-Identifier: Apache-2.0
"""What must differ between workers, and what must not: their samples, and their learning rates."""

from __future__ import annotations

import contextlib
import io
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.prepare.loops import loop
from tests.processes import together, values
from tests.zoo import ended, make_data, make_model, sgd
from torch.optim.lr_scheduler import ReduceLROnPlateau

import orchestra
from orchestra.data.random_state import seed_everything
from orchestra.user_loop.comparisons import WorkerComparisons

SAME = "computed the same first gradient"


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


# Samples.


def reads(strategy: str, shift: int = 0, *, scale: float = 1.0, **given: Any) -> str:
    """What a loop says that reads its own samples: worker 1 those further on by `shift`."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        seed_everything(0)
        model = make_model()
        model, optimizer = orchestra.prepare(
            model, sgd(model.parameters()), strategy=strategy, cluster=orchestra.Attached(patience=20), **given
        )
        x, y = make_data(32)
        for start in range(0, 12, 4):
            batch = slice(start + shift * rank(), start + shift * rank() + 4)
            optimizer.zero_grad()
            (scale * F.mse_loss(model(x[batch]), y[batch])).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        optimizer.finish()
    return said.getvalue()


@pytest.mark.parametrize("strategy", ["allreduce", "localsgd(tau=4)", "ps", "easgd(tau=2)"])
def test_workers_that_read_the_same_samples_are_warned_of_once(strategy: str, tmp_path: Path) -> None:
    first, *others = values(together(3, partial(reads, strategy, out=tmp_path / "run")))
    assert first.count(SAME) == 1
    assert "orchestra.rank() and orchestra.world_size()" in first
    assert not any(SAME in said for said in others)
    (warning,) = json.loads((tmp_path / "run" / "ending.json").read_text())["warnings"]
    assert SAME in warning


@pytest.mark.parametrize("strategy", ["allreduce", "localsgd(tau=4)", "easgd(tau=2)"])
def test_no_word_where_samples_differ(strategy: str) -> None:
    assert not any(SAME in said for said in values(together(3, partial(reads, strategy, 12))))


def test_no_word_alone_nor_of_gradients_that_are_zero() -> None:
    assert SAME not in reads("allreduce")
    assert not any(SAME in said for said in values(together(2, partial(reads, "allreduce", scale=0.0))))


def test_a_loader_that_was_given_and_is_not_used_shows_as_well() -> None:
    def call() -> str:
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            model = make_model()
            loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*make_data(24)), batch_size=4)
            model, optimizer, _ = orchestra.prepare(model, sgd(model.parameters()), loader)
            for x, y in loader:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            optimizer.finish()
        return said.getvalue()

    first, second = values(together(2, call))
    assert "Iterate over the loader that orchestra.prepare returns" in first
    assert not second


def test_what_is_compared_is_no_traffic_of_the_strategy(tmp_path: Path) -> None:
    for outcome in together(2, partial(loop, "allreduce", out=tmp_path / "run", epochs=3)):
        assert not outcome.kind, outcome.error
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert ended(tmp_path / "run", 0).sent == 27 * 4 * config["parameters"]


# Learning rates.


def follows(strategy: str, metric: str, *, steps: int = 24, groups: int = 1) -> list[list[float]]:
    """A loop whose scheduler follows a validation loss: a worker's own, or the mean."""
    with contextlib.suppress(SystemExit):
        seed_everything(0)
        model: Any = make_model()
        halves = [{"params": list(part.parameters())} for part in (model[0], model[2:])]
        optimizer: Any = sgd(model.parameters() if groups == 1 else halves, lr=0.3)
        model, optimizer = orchestra.prepare(
            model, optimizer, strategy=strategy, cluster=orchestra.Attached(patience=20), steps=steps
        )
        scheduler = ReduceLROnPlateau(optimizer, patience=0)
        seen = []
        x, y = make_data(32)
        for step in range(steps):
            seen.append([group["lr"] for group in optimizer.param_groups])
            batch = slice(4 * rank(), 4 * rank() + 4)
            optimizer.zero_grad()
            F.mse_loss(model(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if step % 3 == 2:
                own = 1.0 + step * rank()  # grows at worker 1, stays at worker 0
                scheduler.step(
                    optimizer.orchestra.mean(own) if metric == "mean" else own if rank() else 1.0 / (step + 1)
                )
        optimizer.finish()
        return seen
    return []


@pytest.mark.parametrize("strategy", ["allreduce", "localsgd(tau=4)", "ps", "slowmo(tau=3)"])
def test_learning_rates_that_differ_are_an_error(strategy: str) -> None:
    for outcome in together(3 if strategy == "ps" else 2, partial(follows, strategy, "own"))[:2]:
        assert outcome.kind in ("ClusterError", "Stopped"), (outcome.kind, outcome.error)
        assert "0.3 on worker 0" in outcome.error
        assert "the learning rate is" in outcome.error
        assert "0.03" in outcome.error or "0.003" in outcome.error
        assert "worker 1 in step 10" in outcome.error or "worker 0 in step 10" in outcome.error
        assert "optimizer.orchestra.mean(loss)" in outcome.error


def test_the_group_is_named() -> None:
    for outcome in together(2, partial(follows, "allreduce", "own", groups=2)):
        assert "the learning rate of parameter group 0 is" in outcome.error


def test_a_short_loop_is_compared_at_its_end() -> None:
    for outcome in together(2, partial(follows, "allreduce", "own", steps=7)):
        assert "in step 7" in outcome.error


def test_a_rate_that_no_step_uses_is_not_compared() -> None:
    """The scheduler's last word comes after the last step."""
    values(together(2, partial(follows, "allreduce", "own", steps=3)))


def test_where_workers_go_their_own_pace_rates_may_differ() -> None:
    mine, theirs, _ = values(together(3, partial(follows, "ps(consistency=asp())", "own")))
    assert mine[-1] != theirs[-1]


def test_the_mean_over_the_workers_keeps_them_equal() -> None:
    mine, theirs = values(together(2, partial(follows, "localsgd(tau=4)", "mean")))
    assert mine == theirs
    assert mine[-1] < mine[0]


def test_rates_that_differ_by_rounding_are_the_same() -> None:
    heard = WorkerComparisons(2)
    assert heard.rates(0, 10, [0.1, float("nan")]) is None
    assert heard.rates(1, 10, [0.1 + 1e-12, float("nan")]) is None
    assert heard.rates(1, 20, [0.1]) is None
    assert heard.rates(0, 20, [0.2]) is not None
