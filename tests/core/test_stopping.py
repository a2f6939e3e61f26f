# SPDX-License-Identifier: Apache-2.0
"""The end of a run when workers differ much in speed: by the clock, by Ctrl-C, and checkpoints on the way."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.core.test_scoring import error
from tests.processes import environ_of
from tests.waiting import wait_until
from tests.zoo import (
    BATCH,
    SEED,
    Dicey,
    Paced,
    Trap,
    assert_same,
    ended,
    events,
    make_data,
    my_rank,
    paced,
    press_ctrl_c,
    train,
    trapped,
)
from torch import Tensor

from orchestra import (
    ASP,
    AllReduce,
    Attached,
    Budget,
    Epochs,
    Local,
    LocalSGD,
    ParameterServer,
    RunStatus,
    Seconds,
    Steps,
    Strategy,
    Target,
)
from orchestra.data.feed import IndexedFeed
from orchestra.engine import checkpoint, snapshot
from orchestra.errors import CheckpointError, ConfigError, Interrupted, WorkerLost
from orchestra.runs.events import Saved, Stepped
from orchestra.runs.facts import scores_of

gently = partial(torch.optim.SGD, lr=1e-4)
asynchronous = ParameterServer(consistency=ASP())


def press_when(ready: Callable[[RunStatus], object], steps: list[int] | None = None) -> Callable[[RunStatus], None]:
    """Ctrl-C once, at the first look at which a condition holds; notes the steps that were done by then."""
    found = [] if steps is None else steps

    def watch(state: RunStatus) -> None:
        if not found and state.begun and ready(state):
            found.extend(int(row.step) for row in state.nodes)
            os.kill(os.getpid(), signal.SIGINT)

    return watch


def steps_done(count: int) -> Callable[[RunStatus], bool]:
    """Whether every worker has done so many steps."""
    return lambda state: min(row.step for row in state.nodes[: state.workers]) >= count


# The clock, then Ctrl-C.


@pytest.mark.parametrize("strategy", [LocalSGD(tau=100), AllReduce(), ParameterServer(), asynchronous], ids=repr)
def test_ctrl_c_after_the_clock_has_run_out_changes_nothing(strategy: Strategy[Any], tmp_path: Path) -> None:
    """Some have already ended because of the clock: the others must not end for another reason."""
    run, pressed = tmp_path / "run", tmp_path / "pressed"
    looks: list[float] = []

    def watch(state: RunStatus) -> None:
        if state.t >= 0.5:
            looks.append(state.t)
        if len(looks) == 2:  # at the first the workers were asked to stop
            os.kill(os.getpid(), signal.SIGINT)
            pressed.touch()

    wait = Trap.at(1, 2, partial(wait_until, pressed.exists), size=2)  # worker 0 ends or waits in the meantime
    result = train(
        strategy, run, model=trapped(wait, model=paced(0.02, 0.02)), optimizer=gently, budget=Seconds(0.5),
        progress=watch, cluster=Local(workers=2, patience=30),
    )  # fmt: skip
    assert pressed.exists()
    assert result.summary.stopped_by == "seconds"
    if strategy.layout.updates.synchronous:
        assert ended(run, 0).step == ended(run, 1).step


def test_ctrl_c_after_a_target_was_reached_changes_nothing(tmp_path: Path) -> None:
    run, pressed = tmp_path / "run", tmp_path / "pressed"
    looks: list[float] = []

    def watch(state: RunStatus) -> None:
        if len(scores_of(run)) > 1 and not (run / "snapshots" / "00001").exists():  # it is removed when it is scored
            looks.append(state.t)
        if len(looks) == 2:  # at the first the workers were asked to stop
            os.kill(os.getpid(), signal.SIGINT)
            pressed.touch()

    def accuracy(model: torch.nn.Module, data: Any) -> float:
        return float(threading.current_thread() is not threading.main_thread())

    wait = Trap.at(1, 5, partial(wait_until, pressed.exists), size=2)
    result = train(
        LocalSGD(tau=100), run, model=trapped(wait, model=paced(0.02, 0.02)), optimizer=gently, progress=watch,
        budget=Target("accuracy", 0.9) | Seconds(60), evaluate=accuracy, evaluation_data=make_data,
        evaluate_every=Steps(4), cluster=Local(workers=2, patience=100),
    )  # fmt: skip
    assert pressed.exists()
    assert result.summary.stopped_by == "target"


# Strategies in which no worker waits for another.


@pytest.mark.parametrize("servers", [1, 2])
def test_the_clock_does_not_wait_for_the_slow_to_catch_up(servers: int, tmp_path: Path) -> None:
    result = train(
        ParameterServer(consistency=ASP(), servers=servers), tmp_path, workers=2, model=paced(0.02, 1.0),
        optimizer=gently, budget=Seconds(1.0),
    )  # fmt: skip
    assert result.summary.stopped_by == "seconds"
    assert result.summary.seconds < 6  # some twenty steps more of the slow worker would take twenty
    assert ended(tmp_path, 0).step > 2 * ended(tmp_path, 1).step


@pytest.mark.parametrize("rhythm", [None, Steps(5)], ids=["only then", "periodic"])
@pytest.mark.parametrize("when", [10, 30], ids=["under way", "one is done"])
def test_ctrl_c_with_uneven_workers_loses_nothing(when: int, rhythm: Steps | None, tmp_path: Path) -> None:
    """The second time the fast worker has done all its 30 steps."""
    given: dict[str, Any] = {"workers": 2, "optimizer": gently, "budget": Steps(30), "checkpoint_every": rhythm}
    steps: list[int] = []

    def ready(state: RunStatus) -> bool:
        return state.nodes[0].step >= when and state.nodes[1].step >= 1

    with pytest.raises(Interrupted, match="A checkpoint of step"):
        train(asynchronous, tmp_path, model=paced(0.02, 0.1), progress=press_when(ready, steps), **given)
    assert when <= steps[0] <= 30
    saved, complaints = checkpoint.newest(tmp_path / "checkpoints")
    assert not complaints
    assert len(saved.manifest["files"]) == 3
    done = [saved.node(rank)["counts"][0] for rank in range(2)]
    assert done[0] > done[1] >= steps[1] > 0
    assert done[0] >= steps[0]
    resumed = train(asynchronous, tmp_path, model=paced(), resume=True, **given)
    assert [*steps_of(tmp_path, 0)] == [*steps_of(tmp_path, 1)] == [*range(1, 31)]
    assert resumed.summary.samples == samples_in(30)


def test_ctrl_c_in_the_very_last_step_is_too_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker is done and could still save, the other has no step left to leave out."""
    found, steps = list[int](), list[int]()
    put_together = snapshot.parts

    def look(folder: Path, *elsewhere: Path) -> list[snapshot.SnapshotPart]:
        parts = put_together(folder, *elsewhere)
        found.append(len(parts))
        return parts

    monkeypatch.setattr(snapshot, "parts", look)
    result = train(
        asynchronous, tmp_path, workers=2, model=paced(0.0, 1.0, model=Dicey), optimizer=gently, budget=Steps(1),
        progress=press_when(lambda state: state.nodes[0].step == 1, steps),
    )  # fmt: skip
    assert steps[:2] == [1, 0]
    assert result.summary.stopped_by == "budget"
    assert found == [3]  # both workers' BatchNorm statistics, the server's parameters
    assert not list((tmp_path / "checkpoints").glob("*"))


def test_ctrl_c_while_the_trained_model_is_scored_keeps_it(tmp_path: Path) -> None:
    calls: list[int] = []

    def score(model: torch.nn.Module, data: Any) -> float:
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return 0.0

    with pytest.raises(Interrupted, match="the model is whole"):
        train(AllReduce(), tmp_path, workers=2, budget=Steps(4), evaluate=score, evaluation_data=make_data)
    assert (tmp_path / "model.safetensors").exists()
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 4
    assert not (tmp_path / "final").exists()


def test_a_checkpoint_past_the_budget_is_not_taken_for_success(tmp_path: Path) -> None:
    given: dict[str, Any] = {"workers": 2, "checkpoint_every": Steps(3), "model": paced(0.05, 0.05)}
    with pytest.raises(Interrupted):
        train(AllReduce(), tmp_path, budget=Steps(1000), progress=press_when(steps_done(5)), **given)
    with pytest.raises(ConfigError, match="already at"):
        train(AllReduce(), tmp_path, budget=Steps(3), resume=True, **given)


def test_a_budget_that_is_spent_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {"workers": 2, "checkpoint_every": Steps(3)}
    train(AllReduce(), tmp_path, budget=Steps(5), **given)
    with pytest.raises(
        ConfigError, match=r"nothing left to do: it ends at step 3.*--steps 6 or more, or budget=Steps\(6\)"
    ):
        train(AllReduce(), tmp_path, budget=Steps(3), resume=True, **given)
    with pytest.raises(
        ConfigError, match=r"it ends after 1e-09 s, and .* s of training are already done; --seconds 1 or more"
    ):
        train(AllReduce(), tmp_path, budget=Seconds(1e-9), resume=True, **given)
    (tmp_path / "ending.json").unlink()  # broken off after the last step: what it learned is not lost
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000005")
    assert train(AllReduce(), tmp_path, budget=Steps(3), resume=True, **given).summary.steps == 3
    assert "nothing left to do: it ends at step 3" in capsys.readouterr().err
    more = train(AllReduce(), tmp_path, budget=Epochs(2), resume=True, **given)
    assert more.summary.steps > 5
    with pytest.raises(ConfigError, match=r"nothing left to do: .*; --epochs 3 or more, or budget=Epochs\(3\)"):
        train(AllReduce(), tmp_path, budget=Epochs(1), resume=True, **given)


@pytest.mark.parametrize("strategy", [LocalSGD(tau=4), ParameterServer(), asynchronous], ids=repr)
def test_a_run_that_is_complete_stays_as_it_is(
    strategy: Strategy[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {
        "workers": 2, "checkpoint_every": Steps(2), "evaluate": error, "evaluation_data": make_data,
    }  # fmt: skip
    first = train(strategy, tmp_path, budget=Steps(5), **given)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    again = train(strategy, tmp_path, budget=Steps(5), resume=True, **given)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
    assert (again.metrics, again.summary) == (first.metrics, first.summary)
    assert_same(again.model, first.model)
    assert not again.model.training
    said = capsys.readouterr().err
    assert f"{tmp_path} is complete: 5 steps in " in said
    assert "Nothing is trained; --steps 6 or more, or budget=Steps(6), would go on." in said
    with pytest.raises(ConfigError, match="it ends at step 4, and the run is already at 5"):
        train(strategy, tmp_path, budget=Steps(4), resume=True, **given)


@pytest.mark.parametrize("end", [Steps(5), Seconds(0.4)], ids=["steps", "the clock"])
@pytest.mark.parametrize("strategy", [LocalSGD(tau=4), ParameterServer()], ids=repr)
def test_a_larger_budget_goes_on_from_the_end(
    strategy: Strategy[Any], end: Budget, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {"workers": 2, "checkpoint_every": Steps(1000), "model": paced(0.02, 0.02)}
    first = train(strategy, tmp_path / "run", budget=end, **given).summary
    saved, _ = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert saved.step == first.steps
    capsys.readouterr()
    resumed = train(strategy, tmp_path / "run", budget=Steps(first.steps + 3), resume=True, **given)
    assert capsys.readouterr().err == f"continues from the checkpoint of step {first.steps:,}\n"
    assert (tmp_path / "run" / "events-0.jsonl").read_text().count('"stepped"') == first.steps + 3
    whole = train(strategy, tmp_path / "whole", budget=Steps(first.steps + 3), **given)
    assert_same(resumed.model, whole.model)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["budget"] == [f"steps={first.steps + 3}"]


@pytest.mark.parametrize("strategy", [AllReduce(), LocalSGD(tau=4), ParameterServer(servers=2)], ids=repr)
def test_ctrl_c_in_the_last_step_of_a_run_that_saves(strategy: Strategy[Any], tmp_path: Path) -> None:
    """Too late to stop it: a checkpoint now would mark the run as interrupted."""
    pressed = Trap.at(0, 3, partial(press_ctrl_c, os.getpid()), size=2)
    slow = Trap.at(1, 3, partial(time.sleep, 0.3), size=2)
    given: dict[str, Any] = {"workers": 2, "checkpoint_every": Steps(3)}
    result = train(strategy, tmp_path, model=trapped(pressed, slow), budget=Steps(4), **given)
    assert (result.summary.steps, result.summary.stopped_by) == (4, "budget")
    more = train(strategy, tmp_path, model=trapped(), budget=Steps(6), resume=True, **given)
    assert_same(more.model, train(strategy, tmp_path / "whole", model=trapped(), budget=Steps(6), **given).model)


def test_without_checkpoints_a_complete_run_cannot_go_on(tmp_path: Path) -> None:
    train(AllReduce(), tmp_path, workers=2, budget=Steps(2))
    with pytest.raises(CheckpointError, match="is complete, and no checkpoint was kept to go on from"):
        train(AllReduce(), tmp_path, workers=2, budget=Steps(4), resume=True)


def test_another_number_of_workers_is_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"budget": Steps(5), "checkpoint_every": Steps(3)}
    train(AllReduce(), tmp_path, workers=2, **given)
    with pytest.raises(CheckpointError, match=r"workers = 2, now it is 3\. Resume with as many: --workers 2, or"):
        train(AllReduce(), tmp_path, workers=3, resume=True, **given)
    for name, value in environ_of(0, 3, 29500).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CheckpointError, match="Start 2 processes, of which 3 were started now: by torchrun"):
        train(AllReduce(), tmp_path, cluster=Attached(), resume=True, **given)


def test_interrupted_is_a_keyboard_interrupt(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(AllReduce(), tmp_path, workers=2, model=paced(0.05, 0.05), budget=Steps(1000),
              progress=press_when(steps_done(2)))  # fmt: skip


_SCRIPT = """
import torch, orchestra
from orchestra import Local, Steps

def data():
    return torch.ones(8, 3), torch.ones(8, 1)

if __name__ == "__main__":
    orchestra.train(model=lambda: torch.nn.Linear(3, 1), data=data, loss=torch.nn.functional.mse_loss, batch=2,
                    optimizer=lambda p: torch.optim.SGD(p, lr=0.01), cluster=Local(workers=1), out="run",
                    budget=Steps(10**9))
"""


def test_a_script_ends_by_an_error_in_few_lines_and_with_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT)
    command: dict[str, Any] = {"args": [sys.executable, "script.py"], "cwd": tmp_path, "text": True}
    process = subprocess.Popen(stderr=subprocess.PIPE, **command)
    wait_until(lambda: any(event.stat().st_size for event in tmp_path.glob("run/events-0.jsonl")))
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 143
    assert re.fullmatch(r"stopped by SIGTERM\. A checkpoint of step .*, resume=True\)\n", told)
    again = subprocess.run(capture_output=True, timeout=60, **command)
    assert again.returncode == ConfigError.exit_code
    place, *_, kind, message = again.stderr.splitlines()
    assert "script.py" in place
    assert kind == "ConfigError: 1 problem"
    assert message.endswith("choose a new folder, or go on from its checkpoint with resume=True in this call")


def steps_of(run: Path, rank: int) -> dict[int, float]:
    """When a worker ended each of its steps."""
    found: dict[int, float] = {}
    for e in events(run, rank):
        if isinstance(e, Stepped):
            found.setdefault(e.step, e.t)
    return found


def samples_in(steps: int, *, workers: int = 2) -> int:
    """How many samples all workers together use in so many steps of each."""
    feeds = [IndexedFeed(make_data(), batch=BATCH, seed=SEED, rank=r, size=workers) for r in range(workers)]
    return sum(feed.next()[1] for feed in feeds for _ in range(steps))


def test_a_checkpoint_costs_the_fast_one_step_of_the_slowest(tmp_path: Path) -> None:
    """And does not have them wait until the slow one has made as many steps."""
    train(
        asynchronous, tmp_path, workers=2, model=paced(0.01, 0.1), optimizer=gently, budget=Steps(25),
        checkpoint_every=Steps(5),
    )  # fmt: skip
    fast, slow = (steps_of(tmp_path, rank) for rank in (0, 1))
    assert [*fast] == [*slow] == [*range(1, 26)]
    assert sum(t <= fast[25] for t in slow.values()) <= 15  # steps of the slow one by the end of the fast one
    assert any(isinstance(e, Saved) for e in events(tmp_path, 0))
    saved, complaints = checkpoint.newest(tmp_path / "checkpoints")
    assert not complaints
    assert len(saved.manifest["files"]) == 3


class Doomed(Paced):
    """The slow worker dies in a late step, when the fast one has done all of its own."""

    def forward(self, x: Tensor) -> Tensor:
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 16 and my_rank() == 1:
            os._exit(7)
        y: Tensor = super().forward(x)
        return y


def test_checkpoints_go_on_when_the_fast_one_is_done(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "workers": 2, "optimizer": gently, "budget": Steps(20), "checkpoint_every": Steps(5),
    }  # fmt: skip
    with pytest.raises(WorkerLost):
        train(asynchronous, tmp_path, model=partial(Doomed, {0: 0.0, 1: 0.1}), **given)
    saved, complaints = checkpoint.newest(tmp_path / "checkpoints")
    assert not complaints
    assert saved.node(0)["counts"][0] == 20
    assert saved.node(1)["counts"][0] >= 10
    resumed = train(asynchronous, tmp_path, model=partial(Doomed, {}), resume=True, **given)
    assert [*steps_of(tmp_path, 0)] == [*steps_of(tmp_path, 1)] == [*range(1, 21)]
    assert resumed.summary.samples == samples_in(20)


# A mistake in the user's own function.


def test_a_target_run_ends_with_what_evaluate_raises(tmp_path: Path) -> None:
    def broken(model: torch.nn.Module, data: Any) -> dict[str, float]:
        if threading.current_thread() is not threading.main_thread():
            raise ArithmeticError("of my own making")
        return error(model, data)

    began = time.monotonic()
    with pytest.raises(ArithmeticError, match="of my own making"):
        train(
            AllReduce(), tmp_path, workers=2, optimizer=gently, budget=Target("error", 0.0) | Seconds(60),
            evaluate=broken, evaluation_data=make_data, evaluate_every=Steps(5),
        )  # fmt: skip
    assert time.monotonic() - began < 30
