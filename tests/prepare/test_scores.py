# SPDX-License-Identifier: Apache-2.0
"""A loop that scores its model, and one whose learning rate is multiplied from outside."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.prepare.loops import equal, loop
from tests.processes import together, values
from tests.zoo import adam, make_model, momentum, sgd

import orchestra
from orchestra.engine import overrides
from orchestra.errors import ConfigError
from orchestra.model.adjusted_optimizer import Adjusted
from orchestra.model.flat_optimizer import Factory
from orchestra.runs.facts import facts_of, scores_of


def rank() -> int:
    return int(os.environ["RANK"])


def test_the_scores_of_all_workers_are_averaged(tmp_path: Path) -> None:
    def score(optimizer: Any) -> None:
        if optimizer.orchestra.steps % 6 == 0:
            optimizer.orchestra.score(accuracy=torch.tensor(0.25 + rank() / 2), loss=optimizer.orchestra.steps)

    assert all(
        outcome.value for outcome in together(2, partial(loop, "localsgd(tau=2)", each=score, out=tmp_path / "run"))
    )
    scores = scores_of(tmp_path / "run")
    steps = [scored.step for scored in scores]
    assert steps == [6 * (i + 1) for i in range(len(steps))]
    assert len(steps) >= 3
    assert [scored.number for scored in scores] == [*range(len(steps))]
    assert [scored.metrics for scored in scores] == [{"accuracy": 0.5, "loss": float(step)} for step in steps]
    assert [scored.samples for scored in scores] == [step * 2 * 6 for step in steps]
    assert 0 < scores[0].t < scores[-1].t <= facts_of(tmp_path / "run").seconds
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["metrics"] == {"accuracy": 0.5, "loss": float(steps[-1])}


@pytest.mark.parametrize("strategy", ["allreduce", "ps(consistency=asp())"])
def test_one_worker_may_score_alone_and_after_the_end(tmp_path: Path, strategy: str) -> None:
    """No worker waits for another; the model of the end is worker 0's to score, and takes no time of training."""

    def call() -> None:
        kept: list[Any] = []

        def score(optimizer: Any) -> None:
            kept[:] = [optimizer.orchestra]
            if rank() == 0 and optimizer.orchestra.steps == 5:
                optimizer.orchestra.score(accuracy=0.5)

        with contextlib.suppress(SystemExit):
            loop(strategy, each=score, out=tmp_path / "run", optimizer=sgd)
        for handle in kept:
            handle.score(accuracy=0.75 + rank())

    assert not any(outcome.error for outcome in together(3, call))
    first, last = scores_of(tmp_path / "run")
    assert (first.step, first.metrics, last.metrics) == (5, {"accuracy": 0.5}, {"accuracy": 0.75})
    facts = facts_of(tmp_path / "run")
    assert last.t == pytest.approx(facts.seconds, abs=0.5)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"] == {"accuracy": 0.75}


def prepared() -> Any:
    model = make_model()
    return orchestra.prepare(model, sgd(model.parameters()))[1]


def alone(call: Callable[[], Any]) -> Any:
    """In a process of its own, which may leave what it prepared as it is."""
    (outcome,) = together(1, call)
    assert not outcome.error
    return outcome.value


def test_what_is_no_score_is_refused() -> None:
    def call() -> None:
        handle = prepared().orchestra
        with pytest.raises(ConfigError, match="name at least one figure"):
            handle.score()
        with pytest.raises(ConfigError, match=r"score.accuracy = 'str'    must be one number"):
            handle.score(accuracy="good", loss=1.0)
        with pytest.raises(ConfigError, match="must be one number"):
            handle.score(accuracy=torch.zeros(2))
        handle.score(accuracy=1)  # without a folder it goes nowhere

    alone(call)


def at_half(call: Any) -> Any:
    with overrides.using({"optimizer": lambda old: Adjusted(old, 0.5)}):
        return call()


def slower(factory: Factory) -> Factory:
    def make(parameters: Any) -> torch.optim.Optimizer:
        made = factory(parameters)
        for group in made.param_groups:
            group["lr"] /= 2
        return made

    return make


@pytest.mark.parametrize(("strategy", "size"), [
    ("allreduce", 2), ("localsgd(tau=2)", 2), ("slowmo(tau=4)", 2), ("ps", 3), ("ps(servers=2)", 4),
])  # fmt: skip
@pytest.mark.parametrize("optimizer", [momentum, adam], ids=["momentum", "adam"])
def test_a_factor_is_another_rate(strategy: str, size: int, optimizer: Factory) -> None:
    """Bit for bit, also where servers step the optimizer, and under a schedule of the loop's own."""
    plain = partial(loop, strategy, optimizer=slower(optimizer), decay=0.8)
    scaled = partial(at_half, partial(loop, strategy, optimizer=optimizer, decay=0.8))
    workers = size - orchestra.engine.expression.parse(strategy).layout.servers
    expected = values(together(size, plain)[:workers])
    for (_, mine), (_, theirs) in zip(values(together(size, scaled)[:workers]), expected, strict=True):
        assert equal(mine, theirs)


def test_the_loop_sees_its_own_rates() -> None:
    seen: list[tuple[float, float]] = []

    def look(optimizer: Any) -> None:
        seen.append((optimizer.param_groups[0]["lr"], optimizer._driver.runtime.node.lr))

    own: list[float] = []
    loop("allreduce", each=lambda o: own.append(o.param_groups[0]["lr"]), decay=0.9)
    at_half(partial(loop, "allreduce", each=look, decay=0.9))
    assert [rate for rate, _ in seen] == own
    assert len({rate for rate, _ in seen}) > 1
    assert all(used == pytest.approx(rate / 2) for rate, used in seen)


def test_a_state_that_is_loaded_keeps_the_factor() -> None:
    def call() -> tuple[float, float]:
        optimizer = prepared()
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        return optimizer.param_groups[0]["lr"], optimizer._driver.runtime.node.lr

    own, used = alone(partial(at_half, call))
    assert used == own / 2


def test_the_factor_is_kept_with_the_run(tmp_path: Path) -> None:
    alone(partial(at_half, partial(loop, "allreduce", epochs=1, out=tmp_path / "run")))
    assert json.loads((tmp_path / "run" / "config.json").read_text())["lr_factor"] == 0.5
    alone(partial(loop, "allreduce", epochs=1, out=tmp_path / "other"))
    assert "lr_factor" not in json.loads((tmp_path / "other" / "config.json").read_text())
