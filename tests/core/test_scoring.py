# SPDX-License-Identifier: Apache-2.0
"""Evaluation off the clock: what is scored, when, and how often."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from tests.waiting import wait_until
from tests.zoo import (
    COUNT,
    Trap,
    assert_same,
    die_after,
    ended,
    flat,
    make_data,
    make_model,
    paced,
    plain,
    press_ctrl_c,
    train,
    trapped,
)
from torch import Tensor, nn

from orchestra import ASP, AllReduce, Epochs, Local, LocalSGD, ParameterServer, Seconds, SlowMo, Steps, Strategy, Target
from orchestra.engine import checkpoint, resume, snapshot
from orchestra.errors import Interrupted, WorkerLost
from orchestra.runs.budget import Budget
from orchestra.runs.facts import facts_of, scores_of

slowly = partial(torch.optim.SGD, lr=1e-4)
STRATEGIES: list[Strategy[Any]] = [AllReduce(), ParameterServer(servers=2), LocalSGD(tau=2), SlowMo(tau=2)]
each = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)


def error(model: nn.Module, data: tuple[Tensor, Tensor]) -> dict[str, float]:
    x, y = data
    with torch.no_grad():
        return {"error": float(F.mse_loss(model(x), y)), "fingerprint": float(flat(model).sum())}


SCORED: dict[str, Any] = {"evaluate": error, "evaluation_data": make_data}
PATIENT = Local(workers=2, patience=300)  # where a worker waits for scores, which a thread of low priority computes


def either(target: bool, steps: int) -> Budget:
    """So many steps; with a target that is never reached, so that snapshots are scored while the run goes on."""
    return Target("error", 0.0) | Steps(steps) if target else Steps(steps)


@each
@pytest.mark.parametrize(
    "model", [make_model, lambda: nn.Sequential(nn.Linear(7, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))]
)
def test_every_epoch_is_scored_whatever_the_strategy(strategy: Strategy[Any], model: Any, tmp_path: Path) -> None:
    """101 samples are not a whole number of steps: the rhythm must not drift away from the epochs."""
    result = train(strategy, tmp_path, workers=3, model=model, budget=Epochs(5), **SCORED)
    scores = scores_of(tmp_path)
    assert [s.number for s in scores] == [0, 1, 2, 3, 4, 5, 6]  # the start, five epochs, the end
    assert [s.samples for s in scores] == [0, *(COUNT * e for e in (1, 2, 3, 4, 5)), 5 * COUNT]
    assert [s.t for s in scores] == sorted(s.t for s in scores)
    assert result.metrics == result.summary.metrics == scores[-1].metrics


class Masked(nn.Module):
    """Has a buffer, but none that belongs to its state."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()
        self.register_buffer("mask", torch.ones(7), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x * self.mask)
        return y


@each
@pytest.mark.parametrize("target", [False, True], ids=["afterwards", "meanwhile"])
def test_buffers_that_are_not_saved_are_not_waited_for(strategy: Strategy[Any], target: bool, tmp_path: Path) -> None:
    train(strategy, tmp_path, workers=2, model=Masked, budget=either(target, 4), evaluate_every=Steps(1), **SCORED)
    assert [s.step for s in scores_of(tmp_path)] == [0, 1, 2, 3, 4, 4]
    assert [s.number for s in scores_of(tmp_path)] == [0, 1, 2, 3, 4, 5]


def test_what_is_scored_is_the_model_at_that_step(tmp_path: Path) -> None:
    train(AllReduce(), tmp_path, workers=2, budget=Steps(6), evaluate_every=Steps(2), **SCORED)
    for score, steps in zip(scores_of(tmp_path)[:-1], (0, 2, 4, 6), strict=True):
        expected = error(plain(size=2, steps=steps), make_data())
        assert score.step == steps
        assert score.metrics["error"] == pytest.approx(expected["error"], rel=1e-4)


@each
def test_the_result_is_the_model_that_was_scored_last(strategy: Strategy[Any], tmp_path: Path) -> None:
    result = train(strategy, tmp_path, workers=2, budget=Steps(5), **SCORED)
    assert error(result.model, make_data())["fingerprint"] == pytest.approx(result.metrics["fingerprint"])


def test_without_evaluate_nothing_is_set_aside(tmp_path: Path) -> None:
    result = train(AllReduce(), tmp_path, workers=2)
    assert result.metrics == {}
    assert scores_of(tmp_path) == []
    assert {p.name for p in tmp_path.iterdir()} >= {"config.json", "model.safetensors", "summary.json"}
    assert not (tmp_path / "snapshots").exists()
    assert not (tmp_path / "final").exists()


def test_snapshots_are_kept_if_asked_for(tmp_path: Path) -> None:
    train(LocalSGD(tau=2), tmp_path, workers=2, evaluate_every=Steps(2), keep_snapshots=True, **SCORED)
    assert sorted(p.name for p in (tmp_path / "snapshots").iterdir()) == ["00001", "00002"]


def test_a_number_is_named_after_its_function(tmp_path: Path) -> None:
    def depth(model: nn.Module, data: Any) -> int:
        return 3

    assert train(AllReduce(), tmp_path, workers=2, evaluate=depth, evaluation_data=make_data).metrics == {"depth": 3.0}


# Ends.


@each
def test_a_target_ends_the_run(strategy: Strategy[Any], tmp_path: Path) -> None:
    target = Target("error", 1.0)
    budget = target | Steps(100_000)
    result = train(strategy, tmp_path, workers=2, budget=budget, evaluate_every=Steps(5), **SCORED)
    assert result.summary.stopped_by == "target"
    assert any(score.metrics["error"] <= 1.0 for score in scores_of(tmp_path))


@pytest.mark.parametrize("strategy", [*STRATEGIES, ParameterServer(consistency=ASP())], ids=repr)
def test_seconds_end_the_run(strategy: Strategy[Any], tmp_path: Path) -> None:
    """Those that wait for each other, at the same step."""
    result = train(strategy, tmp_path, workers=2, budget=Seconds(0.25) | Steps(10**6), optimizer=slowly)
    assert result.summary.stopped_by == "seconds"
    assert 0.2 < result.summary.seconds < 30  # a million steps would take minutes
    assert result.summary.steps > 0
    if strategy.layout.updates.synchronous:
        assert ended(tmp_path, 0).step == ended(tmp_path, 1).step


# Going on.


@each
@pytest.mark.parametrize("keep", [False, True])
def test_scores_of_a_resumed_run_are_those_of_one_never_stopped(
    strategy: Strategy[Any], keep: bool, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    given: dict[str, Any] = {
        "workers": 2, "budget": Steps(7), "evaluate_every": Steps(2), "checkpoint_every": Steps(3),
        "keep_snapshots": keep, **SCORED,
    }  # fmt: skip
    death = Trap.at(0, 4, partial(die_after, out / "checkpoints" / "step-00000003"), size=2)
    with pytest.raises(WorkerLost):
        train(strategy, out, model=trapped(death), **given)
    resumed = train(strategy, out, model=trapped(), resume=True, **given)
    never = train(strategy, tmp_path / "never", model=trapped(), **given)
    assert_same(resumed.model, never.model)
    a, b = scores_of(out), scores_of(tmp_path / "never")
    assert [(s.number, s.step, s.samples, s.metrics) for s in a] == [
        (s.number, s.step, s.samples, s.metrics) for s in b
    ]
    assert resumed.summary.metrics == never.summary.metrics == resumed.metrics


def test_a_run_resumed_near_its_end_reports_its_last_score(tmp_path: Path) -> None:
    """With a target, snapshots are scored while the run goes on, so none may be left for the resumed part."""
    out = tmp_path / "run"
    given: dict[str, Any] = {
        "cluster": PATIENT, "budget": Target("error", 0.0) | Steps(6), "evaluate_every": Steps(2), **SCORED,
    }  # fmt: skip
    press = Trap.at(0, 4, partial(_press_when_scored, out), size=2)
    with pytest.raises(Interrupted):
        train(AllReduce(), out, model=trapped(press), **given)
    resumed = train(AllReduce(), out, model=trapped(), resume=True, **given)
    scores = scores_of(out)
    assert [s.step for s in scores] == [0, 2, 4, 6, 6]
    assert len({s.number for s in scores}) == len(scores)
    assert resumed.summary.metrics == resumed.metrics


@pytest.mark.parametrize(
    ("strategy", "target"),
    [*((s, False) for s in STRATEGIES), (ParameterServer(consistency=ASP()), False), (AllReduce(), True)],
    ids=str,
)
def test_what_came_after_the_checkpoint_is_not_scored(strategy: Strategy[Any], target: bool, tmp_path: Path) -> None:
    """The first attempt gets to step 5 or so; the second goes on from step 3 and ends at step 4."""
    given: dict[str, Any] = {"workers": 2, "evaluate_every": Steps(1), "checkpoint_every": Steps(3), **SCORED}
    death = Trap.at(0, 6, partial(die_after, tmp_path / "checkpoints" / "step-00000003"), size=2)
    # Without a barrier the faster worker must not run ahead.
    slow = [Trap.at(rank, step, partial(time.sleep, 0.03), size=2) for rank in (0, 1) for step in range(7)]
    with pytest.raises(WorkerLost):
        train(strategy, tmp_path, model=trapped(*slow, death), budget=either(target, 8), **given)
    saved = checkpoint.newest(tmp_path / "checkpoints")[0]
    assert saved.step in (3, 6)
    train(strategy, tmp_path, model=trapped(), resume=True, budget=either(target, saved.step + 1), **given)
    scores = scores_of(tmp_path)
    assert [s.number for s in scores] == [*range(saved.step + 3)]
    assert max(s.samples for s in scores) == scores[-1].samples
    assert [s.t for s in scores] == sorted(s.t for s in scores)
    if strategy.layout.updates.synchronous:
        assert [s.step for s in scores] == [*range(saved.step + 2), saved.step + 1]


def test_a_score_of_before_the_checkpoint_is_kept_though_the_last_worker_was_late(tmp_path: Path) -> None:
    """Worker 1 sets its part of snapshot 3 aside long after worker 0 has saved step 3: it is not one of later."""
    given: dict[str, Any] = {"cluster": PATIENT, "evaluate_every": Steps(1), "checkpoint_every": Steps(3), **SCORED}
    slow = Trap.at(1, 2, partial(time.sleep, 0.3), size=2)
    death = Trap.at(1, 3, partial(_die_when_scored, tmp_path, 4), size=2)
    with pytest.raises(WorkerLost):
        train(LocalSGD(tau=10), tmp_path, model=trapped(slow, death), budget=either(True, 5), **given)
    assert checkpoint.newest(tmp_path / "checkpoints")[0].step == 3
    train(LocalSGD(tau=10), tmp_path, model=trapped(), budget=either(True, 5), resume=True, **given)
    scores = scores_of(tmp_path)
    assert [s.number for s in scores] == [0, 1, 2, 3, 4, 5, 6]
    assert [s.t for s in scores] == sorted(s.t for s in scores), "the clock goes on from the last worker's"


def _die_when_scored(run: Path, count: int) -> None:
    wait_until(lambda: len(scores_of(run)) >= count)
    die_after(run / "checkpoints" / "step-00000003")


def test_no_snapshot_is_lost_when_the_first_worker_is_slow(tmp_path: Path) -> None:
    """A server's snapshots follow the samples of all; worker 0 alone does not tell how many there were."""
    given: dict[str, Any] = {
        "workers": 2, "evaluate_every": Steps(2), "checkpoint_every": Steps(4), "optimizer": slowly, **SCORED,
    }  # fmt: skip
    strategy = ParameterServer(consistency=ASP())
    train(strategy, tmp_path, model=paced(0.1, 0.0), budget=Steps(12), **given)
    scores = scores_of(tmp_path)
    saved = checkpoint.newest(tmp_path / "checkpoints")[0]
    assert saved.node(0)["counts"][3] < saved.node(2)["counts"][3]  # snapshots
    kept = (tmp_path / "scores.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "scores.jsonl").write_text("".join(kept[:1]))  # as if it had died before any of them was scored
    (tmp_path / "ending.json").unlink()
    again = tmp_path / "snapshots"
    for number in range(1, saved.node(2)["counts"][3] + 1):
        snapshot.write(
            again / f"{number:05d}", 2, snapshot.SnapshotPart(0.01 * number, 1, 1, 0, flat(make_model()).float(), {})
        )
    train(strategy, tmp_path, model=paced(), budget=Steps(12), resume=True, **given)
    assert [s.number for s in scores_of(tmp_path)] == [s.number for s in scores]


def _press_when_scored(out: Path) -> None:
    wait_until(lambda: len(scores_of(out)) >= 3)
    press_ctrl_c(_parent())


def _parent() -> int:
    """The program: parent of the fork server, which is this worker's parent."""
    import psutil

    found: int = psutil.Process().parent().parent().pid
    return found


def test_facts_are_a_function_of_the_folder(tmp_path: Path) -> None:
    result = train(ParameterServer(), tmp_path, workers=2, **SCORED)
    assert facts_of(tmp_path) == result.summary
    shares = result.summary.shares
    assert [s.role for s in shares] == ["worker", "worker", "server"]
    for s in shares:
        assert min(s.compute, s.communicate, s.wait) >= 0
        assert s.compute + s.communicate + s.wait <= 1.01


def test_a_module_with_a_state_of_its_own(tmp_path: Path) -> None:
    """Extra state that is no tensor belongs to the module's state_dict as well."""

    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_model()

        def get_extra_state(self) -> dict[str, int]:
            return {"version": 3}

        def set_extra_state(self, state: Any) -> None:
            assert state == {"version": 3}

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            return y

    result = train(AllReduce(), tmp_path, workers=2, model=Stateful)
    assert isinstance(result.model, Stateful)


@pytest.mark.parametrize(("servers", "seconds"), [(0, 2.0), (1, 3.0)])
def test_the_clock_goes_on_from_the_node_that_saved_last(servers: int, seconds: float) -> None:
    parts = [{"cost": [1.0 + node], "counts": [0, 0, 0, 0]} for node in range(3)]
    saved = mock.Mock(manifest={"workers": 2, "servers": servers}, node=lambda node, *, tensors: parts[node])
    assert resume.clock(saved) == seconds
