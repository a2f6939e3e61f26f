# SPDX-License-Identifier: Apache-2.0
"""Snapshots are scored and removed while the run goes on, without a target as well, and do not disturb the training."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.core.test_scoring import SCORED, error
from tests.processes import environ_of, free_port, is_running, together
from tests.waiting import wait_until
from tests.zoo import Dicey, Trap, assert_same, flat, make_data, make_model, paced, tell, train, trapped
from torch import nn

from orchestra import AllReduce, Attached, Local, LocalSGD, ParameterServer, Simulated, Steps, Strategy
from orchestra.cli import compare
from orchestra.cli.options import Options
from orchestra.engine import background, scoring
from orchestra.engine.scoring import Scorer
from orchestra.engine.snapshot import SnapshotPart, numbered
from orchestra.engine.snapshot import write as write_part
from orchestra.errors import WorkerFailed
from orchestra.runs.facts import facts_of, scores_of

STRATEGIES: list[Strategy[Any]] = [AllReduce(), ParameterServer(servers=2), LocalSGD(tau=2)]
each = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)


def by(evaluate: Any) -> dict[str, Any]:
    return {"evaluate": evaluate, "evaluation_data": make_data}


def figures(run: Path) -> list[tuple[int, int, int, dict[str, float]]]:
    return [(s.number, s.step, s.samples, s.metrics) for s in scores_of(run)]


PATIENT = Local(workers=2, patience=300)  # where a worker waits for the scorer, a thread of low priority
GONE = {1, 2, 3, 4}  # snapshots of which nothing may be left when five are scored


def await_scores(run: Path, count: int) -> None:
    """In a worker, in the middle of the run: wait for scores."""
    wait_until(lambda: len(scores_of(run)) >= count)


def await_removals(run: Path) -> None:
    """Likewise, until the snapshots are removed as well, each after its score is written."""
    await_scores(run, 5)
    wait_until(lambda: not GONE & {*waiting(run)})
    (run.parent / "removed").touch()


@each
def test_scores_come_while_the_run_goes_on(strategy: Strategy[Any], tmp_path: Path) -> None:
    """A worker waits in its seventh step for the scores of the first five: no run scored afterwards would end well."""
    given: dict[str, Any] = {"cluster": PATIENT, "budget": Steps(10), "evaluate_every": Steps(1), **SCORED}
    wait = Trap.at(0, 6, partial(await_removals, tmp_path / "meanwhile"), size=2)
    train(strategy, tmp_path / "meanwhile", model=trapped(wait), **given)
    assert (tmp_path / "removed").exists()
    train(strategy, tmp_path / "afterwards", model=trapped(), score_afterwards=True, **given)
    assert figures(tmp_path / "meanwhile") == figures(tmp_path / "afterwards")
    assert not (tmp_path / "meanwhile" / "snapshots").exists()


def test_kept_snapshots_are_scored_and_kept(tmp_path: Path) -> None:
    given: dict[str, Any] = {"cluster": PATIENT, "budget": Steps(8), "evaluate_every": Steps(1), **SCORED}
    wait = Trap.at(0, 6, partial(await_scores, tmp_path, 5), size=2)
    train(AllReduce(), tmp_path, model=trapped(wait), keep_snapshots=True, **given)
    assert waiting(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [s.number for s in scores_of(tmp_path)] == [*range(10)]


def test_afterwards_means_afterwards(tmp_path: Path) -> None:
    where: list[str] = []

    def evaluate(model: nn.Module, data: Any) -> float:
        where.append(threading.current_thread().name)
        return 0.0

    given: dict[str, Any] = {
        "workers": 2,
        "budget": Steps(40),
        "evaluate_every": Steps(4),
        "evaluate": evaluate,
        "evaluation_data": make_data,
    }
    train(AllReduce(), tmp_path, model=paced(0.05), score_afterwards=True, **given)
    assert len(where) == 12
    assert "scorer" not in where


def test_the_thread_beside_processes_gives_way_to_them(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def evaluate(model: nn.Module, data: Any) -> float:
        if threading.current_thread().name == "scorer":
            seen.append((os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), torch.get_num_threads()))
            (tmp_path / "under way").touch()
        return 0.0

    before = torch.get_num_threads()
    wait = Trap.at(0, 6, partial(wait_until, (tmp_path / "under way").exists), size=2)
    train(AllReduce(), tmp_path / "run", cluster=PATIENT, model=trapped(wait), budget=Steps(8),
          evaluate_every=Steps(2), **by(evaluate))  # fmt: skip
    assert seen
    assert {*seen} == {(19, 1)}
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert found == [before] == [torch.get_num_threads()]


def about_the_process(model: nn.Module, data: Any) -> dict[str, float]:
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    return {"sum": float(flat(model).sum()), "pid": os.getpid(), "nice": nice, "threads": torch.get_num_threads()}


@pytest.mark.parametrize("strategy", ["allreduce", "localsgd(tau=2)"])
def test_where_the_caller_trains_another_process_scores(strategy: str, tmp_path: Path) -> None:
    run = tmp_path / "there"

    def call() -> Any:
        given: dict[str, Any] = {
            "budget": Steps(10),
            "evaluate_every": Steps(1),
            "evaluate": about_the_process,
            "evaluation_data": make_data,
        }
        wait = Trap.at(0, 6, partial(await_removals, run), size=2)
        wait.parent = -1  # in these processes, which make the call themselves
        train(strategy, run, cluster=Attached(patience=300), model=trapped(wait), **given)
        return os.getpid()

    outcomes = together(2, call)
    assert not any(outcome.kind for outcome in outcomes), outcomes
    assert (tmp_path / "removed").exists()
    assert not (run / "snapshots").exists()
    scores = scores_of(run)
    aside_, home = scores[1].metrics, scores[0].metrics
    assert home["pid"] == outcomes[0].value
    assert aside_["pid"] not in {outcome.value for outcome in outcomes}
    assert (aside_["nice"], aside_["threads"]) == (19, 1)
    assert not is_running(int(aside_["pid"]))
    train(strategy, tmp_path / "here", workers=2, model=trapped(), budget=Steps(10), evaluate_every=Steps(1),
          evaluate=about_the_process, evaluation_data=make_data, score_afterwards=True)  # fmt: skip
    assert [s.metrics["sum"] for s in scores] == [s.metrics["sum"] for s in scores_of(tmp_path / "here")]


class Noting(Dicey):
    """Notes every forward pass in training."""

    notes: list[str]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and hasattr(Noting, "notes"):
            Noting.notes.append("step")
        return super().forward(x)


@each
def test_in_virtual_time_every_snapshot_is_scored_at_once(strategy: Strategy[Any], tmp_path: Path) -> None:
    Noting.notes = notes = []

    def evaluate(model: nn.Module, data: Any) -> float:
        notes.append("score")
        torch.rand(3)  # as an evaluation on samples drawn at random would
        return float(flat(model).sum())

    given: dict[str, Any] = {"cluster": Simulated(workers=2), "budget": Steps(12), "model": Noting}
    result = train(strategy, tmp_path / "scored", evaluate_every=Steps(2), **by(evaluate), **given)
    first, last = notes.index("score", notes.index("step")), len(notes) - 1 - notes[::-1].index("step")
    assert notes[first:last].count("score") >= 4
    assert [s.number for s in scores_of(tmp_path / "scored")] == [0, 1, 2, 3, 4, 5, 6, 7]
    plain = train(strategy, tmp_path / "plain", **given)
    assert_same(result.model, plain.model)
    assert result.summary.seconds == plain.summary.seconds


# What goes wrong.


def test_an_error_in_evaluate_does_not_end_a_simulated_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Once: the scores after it are taken in the end."""
    failed: list[int] = []

    def evaluate(model: nn.Module, data: Any) -> float:
        if (tmp_path / "snapshots").exists() and not failed:
            failed.append(1)
            raise RuntimeError("no such column")
        return 0.0

    scored: dict[str, Any] = {"evaluate": evaluate, "evaluation_data": make_data, "evaluate_every": Steps(2)}
    result = train(AllReduce(), tmp_path, cluster=Simulated(workers=2), budget=Steps(8), **scored)
    assert capfd.readouterr().err.count("snapshots are scored no more before the end") == 1
    assert (tmp_path / "model.safetensors").exists()
    assert result.summary.steps == 8
    assert [score.step for score in scores_of(tmp_path)][:4] == [0, 2, 4, 6]


def test_a_run_that_fails_does_not_wait_for_a_score(tmp_path: Path) -> None:
    """The score under way is of no use any more."""
    under_way, release = tmp_path / "under way", threading.Event()

    def evaluate(model: nn.Module, data: Any) -> float:
        if threading.current_thread().name == "scorer":
            under_way.touch()
            release.wait(90)
        return 0.0

    def fail() -> None:
        wait_until(under_way.exists)
        tell("enough")

    scored: dict[str, Any] = {"evaluate": evaluate, "evaluation_data": make_data, "evaluate_every": Steps(2)}
    try:
        with pytest.raises(WorkerFailed, match="enough"):
            train(AllReduce(), tmp_path / "run", cluster=PATIENT, model=trapped(Trap.at(0, 6, fail, size=2)), **scored,
                  budget=Steps(8))  # fmt: skip
        assert any(thread.name == "scorer" for thread in threading.enumerate())  # still at it: nothing waited for it
    finally:
        release.set()


@pytest.mark.parametrize("apart", [False, True])
def test_a_mistake_in_evaluate_does_not_end_the_training(
    apart: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is told at once, and raised when the model is written."""

    def evaluate(model: nn.Module, data: Any) -> float:
        if (tmp_path / "run" / "snapshots").exists():
            raise RuntimeError("no such column")
        return 0.0

    def call() -> Any:
        cluster: dict[str, Any] = {"cluster": Attached(patience=120)} if apart else {"workers": 2}
        given: dict[str, Any] = {
            "budget": Steps(20),
            "evaluate_every": Steps(2),
            "evaluate": evaluate,
            "evaluation_data": make_data,
            **cluster,
        }
        with pytest.raises(RuntimeError, match="no such column"):
            train(AllReduce(), tmp_path / "run", model=paced(0.2), **given)

    if apart:
        with mock.patch.dict(os.environ, environ_of(0, 1, free_port())):
            call()
    else:
        call()
    assert "snapshots are scored no more before the end" in capfd.readouterr().err
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert facts_of(tmp_path / "run").steps == 20


def test_a_process_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(asked: str) -> str:
        if asked == "hang":
            time.sleep(600)
        return asked * 2

    process = background.BackgroundProcess(answer)
    assert process.ask("ab", lambda: True) == "abab"
    assert process.ask("hang", lambda: False) is None
    process.close()
    assert not is_running(process.pid)
    broken = background.BackgroundProcess(lambda asked: str(1 // 0))
    with pytest.raises(background.BackgroundFailed, match="ZeroDivisionError"):
        broken.ask("x", lambda: True)
    os.kill(broken.pid, 9)
    with pytest.raises(OSError, match=r"died|Broken pipe|reset"):
        broken.ask("x", lambda: True)
    broken.close()


def test_a_thread_that_computes_is_ended_before_the_process_ends(tmp_path: Path) -> None:
    """Else the interpreter, as it ends, aborts in torch: one Ctrl-C in ten ended with SIGABRT."""
    evaluating = threading.Event()

    def endless(model: nn.Module, data: Any) -> float:
        evaluating.set()
        until = time.monotonic() + 60
        while time.monotonic() < until:
            torch.ones(64, 64) @ torch.ones(64, 64)
        return 0.0

    score = scorer(tmp_path, 3, evaluate=endless)
    score.start()
    thread = score._thread
    assert thread is not None
    assert evaluating.wait(30)
    score.stop(wait=False)
    assert not thread.is_alive()
    assert waiting(tmp_path) == [1, 2, 3]  # for a run that resumes


# More snapshots than can be scored.


def scorer(run: Path, count: int, *, keep: bool = False, evaluate: Any = error) -> Scorer:
    """With so many snapshots that wait."""
    (run / "snapshots").mkdir(parents=True)
    for number in range(1, count + 1):
        part = SnapshotPart(0.1 * number, number, number, 0, flat(make_model()).float(), {}, "everywhere")
        write_part(run / "snapshots" / f"{number:05d}", 0, part)
    return Scorer(run, make_model(), evaluate, make_data(), AllReduce(), 2, [], keep)


def waiting(run: Path) -> list[int]:
    return [n for n, _ in numbered(run / "snapshots")]


def test_snapshots_that_wait_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = scorer(tmp_path, 20)
    slow._give_up_some()
    assert len(waiting(tmp_path)) == 20  # they are small
    monkeypatch.setattr(scoring, "ROOM", 5000)
    slow._now = 1
    slow._give_up_some()
    assert waiting(tmp_path) == [1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20]
    for _ in range(5):
        slow._give_up_some()
    assert waiting(tmp_path)[0] == 1  # it is being scored
    assert waiting(tmp_path)[-1] == 20
    assert len(waiting(tmp_path)) <= 6
    assert len(slow.warnings) == 1
    left = waiting(tmp_path)
    slow.rest()
    assert [s.number for s in scores_of(tmp_path)] == left


def test_no_snapshot_that_shall_be_kept_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "ROOM", 1)
    scorer(tmp_path, 9, keep=True)._give_up_some()
    assert len(waiting(tmp_path)) == 9


def test_a_slow_evaluation_does_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One evaluation lasts until some of seven snapshots are removed, and worker 0 waits for that."""
    monkeypatch.setattr(scoring, "ROOM", 1)
    monkeypatch.setattr(scoring, "_TIDY", 0.05)
    run, removed = tmp_path / "run", tmp_path / "removed"

    def evaluate(model: nn.Module, data: Any) -> float:
        if threading.current_thread().name == "scorer":
            wait_until(removed.exists)
        return 0.0

    def await_removal() -> None:
        wait_until(lambda: len(waiting(run)) <= scoring.FEWEST + 1)  # and the one that is being scored
        removed.touch()

    wait = Trap.at(0, 7, await_removal, size=2)
    result = train(
        AllReduce(), run, model=trapped(wait), cluster=PATIENT, budget=Steps(10), evaluate_every=Steps(1),
        **by(evaluate),
    )  # fmt: skip
    assert result.summary.steps == 10
    assert removed.exists()
    assert "every second one is removed" in (run / "ending.json").read_text()


def test_a_race_is_scored_after_each_run(tmp_path: Path) -> None:
    from orchestra.cli import sources

    asked = Options(workers=2, sim=True)
    race = compare.prepare(sources.find("digits"), ["allreduce"], asked, 1, None, tmp_path / "race")
    with (
        mock.patch.object(sources, "train_recipe", side_effect=KeyboardInterrupt) as called,
        pytest.raises(KeyboardInterrupt),
    ):
        race.run_one("allreduce", 0, "", quiet=True, first=True)
    assert called.call_args.kwargs["score_afterwards"] is True
