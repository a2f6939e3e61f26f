# SPDX-License-Identifier: Apache-2.0
"""Several processes with one loop: they begin, fail and end together."""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.prepare.loops import loop, make_loader
from tests.processes import Processes, together
from tests.zoo import classifier, ended, make_model, sgd

import orchestra
from orchestra.report.facts import facts_of


def rank() -> int:
    return int(os.environ["RANK"])


@pytest.mark.parametrize("dies", [0, 2])
def test_a_worker_that_dies_is_named(dies: int) -> None:
    def die(optimizer: Any) -> None:
        if optimizer.orchestra.steps == 5 and rank() == dies:
            os.kill(os.getpid(), signal.SIGKILL)

    outcomes = together(3, partial(loop, "localsgd(tau=2)", each=die))
    assert outcomes.pop(dies).kind == "killed"
    for outcome in outcomes:
        assert outcome.code == 6
        assert f"worker {dies} died: its connection" in outcome.error


@pytest.mark.parametrize(
    ("different", "told"),
    [
        ({"model": classifier}, "model is"),
        ({"strategy": "slowmo"}, "strategy is"),
        ({"optimizer": sgd}, "optimizer is"),
        ({"loader": partial(make_loader, 96)}, "data is"),
    ],
)
def test_the_first_difference_is_named(different: dict[str, Any], told: str) -> None:
    with Processes([loop, partial(loop, **different)]) as processes:
        for outcome in processes.outcomes():
            assert outcome.code == 4
            assert told in outcome.error


@pytest.mark.parametrize("strategy", ["allreduce", "localsgd(tau=3)"])
def test_who_makes_fewer_steps_is_named(strategy: str) -> None:
    def call() -> Any:
        model = make_model()
        model, optimizer = orchestra.prepare(
            model, sgd(model.parameters()), strategy=strategy, cluster=orchestra.Attached(patience=20)
        )
        for _ in range(6 + rank()):
            optimizer.zero_grad()
            model(torch.ones(2, 7)).sum().backward()
            optimizer.step()
        optimizer.finish()

    for outcome, code in zip(together(2, call), (9, 4), strict=True):
        assert outcome.code == code, outcome.error
        assert "worker 0 finished after 6 steps, but worker 1 has begun step 7" in outcome.error


def test_the_run_folder_is_that_of_train(tmp_path: Path) -> None:
    def call() -> Any:
        means = []

        def each(optimizer: Any) -> None:
            seat = optimizer.orchestra
            seat.log("mine", seat.rank)
            means.append(seat.mean(seat.rank, weight=1 + seat.rank))
            assert seat.is_home == (seat.rank == 0)

        loop("localsgd(tau=2)", out=tmp_path / "run", each=each, told=True)
        return means

    outcomes = together(2, call)
    assert outcomes[0].value == outcomes[1].value == [2 / 3] * 18
    facts = facts_of(tmp_path / "run")
    assert (facts.workers, facts.steps, facts.samples, facts.stopped_by) == (2, 18, 216, "loop")
    assert facts.loss is not None
    assert facts.loss > 0
    parameters = json.loads((tmp_path / "run" / "config.json").read_text())["parameters"]
    assert ended(tmp_path / "run", 0).sent == 9 * 4 * parameters  # a mean of two is x there and back, by halves
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "config.json", "events-0.jsonl", "events-1.jsonl", "ending.json", "summary.json", "model.safetensors",
    }  # fmt: skip
    with pytest.raises(orchestra.ConfigError, match="is not empty"):
        loop("localsgd(tau=2)", out=tmp_path / "run")


# Whole scripts: what they print, and how they exit.

SCRIPT = """
import os, torch, orchestra
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = orchestra.prepare(model, optimizer, strategy="localsgd(tau=2)")
for i in range(4):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    {at_a_step}
{at_the_end}
"""


def as_script(text: str) -> tuple[Any, str]:
    """Run it as an interpreter of its own would: the exit code, and what it said."""
    said, code = io.StringIO(), 0
    with contextlib.redirect_stderr(said):
        try:
            try:
                exec(compile(text, "script.py", "exec"), {})
            except BaseException:
                code = 1
                sys.excepthook(*sys.exc_info())
        except SystemExit as end:
            code = end.code  # type: ignore[assignment]
        atexit._run_exitfuncs()
    return code, said.getvalue()


def scripts(size: int, at_a_step: str = "pass", at_the_end: str = "optimizer.finish()") -> list[Any]:
    text = SCRIPT.format(at_a_step=at_a_step, at_the_end=at_the_end)
    outcomes = together(size, partial(as_script, text))
    return [outcome.value if outcome.kind != "killed" else (-9, "") for outcome in outcomes]


def test_a_forgotten_finish_is_noticed() -> None:
    ((code, said),) = scripts(1, at_the_end="pass")
    assert code == 0
    assert "worker 0 ended without optimizer.finish()" in said
    assert scripts(1) == [(0, "")]
    (_, said), (code, told) = scripts(2, at_the_end='os.environ["RANK"] == "0" or optimizer.finish()')
    assert "worker 0 ended without optimizer.finish()" in said
    assert (code, told) == (9, "Stopped: worker 0 ended without optimizer.finish()\n")


def test_an_error_in_the_loop_reaches_the_others() -> None:
    (code, said), (other, told) = scripts(2, at_a_step='assert os.environ["RANK"] == "0", "no such luck"')
    assert (code, other) == (9, 1)
    assert said == "Stopped: worker 1 failed: AssertionError: no such luck\n"
    assert "Traceback" in told


def test_a_death_is_the_exit_code_of_the_others() -> None:
    (code, said), (other, _) = scripts(2, at_a_step='os.environ["RANK"] == "0" or os.kill(os.getpid(), 9)')
    assert (code, other) == (6, -9)
    assert "WorkerLost: worker 1 died: its connection" in said


def test_a_whole_interpreter_exits_with_the_code_of_the_error() -> None:
    nan = "model.zero_grad(); (model(torch.ones(2, 3)) / 0).sum().backward(); optimizer.step()"
    text = SCRIPT.format(at_a_step=f"for _ in range(10): {nan}", at_the_end="optimizer.finish()")
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 5
    assert done.stderr.startswith("Diverged: worker 0: the gradient was NaN or infinite 10 times in a row")
