# SPDX-License-Identifier: Apache-2.0
"""How whole scripts end: what they print, and their exit codes."""

from __future__ import annotations

import atexit
import contextlib
import io
import linecache
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.processes import together

from orchestra.runs import run_lock

SCRIPT = """
import os, sys, torch, orchestra
rank, dataset = int(os.environ.get("RANK", 0)), torch.utils.data.TensorDataset(torch.ones(36, 3))
model = torch.nn.Linear(3, 1)
given = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(dataset, batch_size=2)
{before}
model, optimizer, loader = orchestra.prepare(model, given, loader, strategy="{strategy}")
for i, (x,) in enumerate(loader):
    if i == 4:
        break
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
    {at_a_step}
{at_the_end}
"""


def script(
    strategy: str = "localsgd(tau=2)",
    *,
    before: str = "",
    at_a_step: str = "pass",
    at_the_end: str = "optimizer.finish()",
) -> str:
    return SCRIPT.format(strategy=strategy, before=before, at_a_step=at_a_step, at_the_end=at_the_end)


def as_script(text: str) -> tuple[Any, str]:
    """Run it as an interpreter of its own would: the exit code, and what it said."""
    said, code = io.StringIO(), 0
    linecache.cache["script.py"] = len(text), None, text.splitlines(keepends=True), "script.py"
    with contextlib.redirect_stderr(said):
        try:
            try:
                exec(compile(text, "script.py", "exec"), {})
            except SystemExit:
                raise
            except BaseException as error:
                code, trace = 1, error.__traceback__
                sys.excepthook(type(error), error, trace and trace.tb_next)
        except SystemExit as end:
            code = end.code or 0  # type: ignore[assignment]
        atexit._run_exitfuncs()
    return code, said.getvalue()


def scripts(size: int, *given: Any, **more: Any) -> list[Any]:
    outcomes = together(size, partial(as_script, script(*given, **more)))
    return [outcome.value if outcome.kind != "killed" else (-9, "") for outcome in outcomes]


# A forgotten finish.


def forgotten(name: str) -> str:
    return (
        f"orchestra: {name} ended without optimizer.finish(): it is called now, but earlier evaluations and saved "
        "files lack the strategy's last step. Call it after the loop.\n"
    )


@pytest.mark.parametrize("strategy", ["allreduce", "slowmo(tau=3)", "ps", "ps(consistency=asp())", "easgd(tau=3)"])
def test_a_forgotten_finish_is_the_same_for_every_strategy(strategy: str) -> None:
    servers = "(" in strategy.replace("slowmo(", "") or strategy == "ps"
    found = scripts(2 + servers, strategy, at_the_end="pass")
    assert found[:2] == [(0, forgotten("worker 0")), (0, forgotten("worker 1"))]
    assert found[2:] == [(0, "")] * servers


def test_a_forgotten_finish_does_not_fail_the_others() -> None:
    assert scripts(1, at_the_end="pass") == [(0, forgotten("worker 0"))]
    assert scripts(1) == [(0, "")]
    assert scripts(2, at_the_end="rank == 0 or optimizer.finish()") == [(0, forgotten("worker 0")), (0, "")]


# Leaving the loop.


@pytest.mark.parametrize(
    ("way", "how"),
    [
        ("if rank == 0 and i == 2: break", "left its loader in epoch 1 after 3 of 9 batches, finished after 3 steps"),
        (
            "if rank == 0 and i == 2: sys.exit()",
            "left its loader in epoch 1 after 3 of 9 batches, ended without optimizer.finish() after 3 steps",
        ),
    ],
)
def test_who_breaks_out_of_its_loop_is_told_what_to_do(way: str, how: str) -> None:
    (code, said), (other, told) = scripts(2, at_a_step=way)
    whole = (
        f"worker 0 {how}, but worker 1 has begun step 4: all must make equally many. Leave the loop at the same step "
        "everywhere: decide by a value that all share, such as the number of steps, or "
        "optimizer.orchestra.mean(loss).\n"
    )
    assert said.endswith(f"Stopped: {whole}")
    assert told.endswith(f"ClusterError: {whole}")
    assert (code, other) == (10 if "break" in way else 0, 4)


# Errors.


def test_the_optimizer_that_was_given_is_not_to_be_stepped() -> None:
    for code, said in scripts(2, at_a_step="given.step()"):
        assert code == 1
        assert "Step the one that it returned: model, optimizer, loader = orchestra.prepare(...)" in said


def test_the_optimizer_that_was_given_is_free_afterwards() -> None:
    assert scripts(1, at_the_end="optimizer.finish(); given.step()") == [(0, "")]


ERRORS = {
    "in prepare": (
        {"before": "loader = range(4)"},
        "orchestra.prepare(model, given, loader,",
        "ConfigError: 1 problem",
    ),
    "in the loop": ({"at_a_step": "given.step()"}, "given.step()", "OrchestraError: the optimizer that was given"),
    "of a mean": (
        {"at_the_end": "optimizer.finish(); optimizer.orchestra.mean(1.0)"},
        "optimizer.finish(); optimizer.orchestra.mean(1.0)",
        "OrchestraError: optimizer.finish() has already ended the connections",
    ),
    "at the end": (
        {"at_the_end": "optimizer.finish(); optimizer.step()"},
        "optimizer.finish(); optimizer.step()",
        "OrchestraError: optimizer.finish() was already called",
    ),
}


@pytest.mark.parametrize("where", ERRORS)
def test_an_error_is_told_with_the_line_of_the_script_alone(where: str) -> None:
    given, line, message = ERRORS[where]
    ((_, said),) = scripts(1, **given)
    first, second, third, *more = [text for text in said.splitlines() if text.strip(" ^")]
    assert first.startswith('  File "script.py", line ')
    assert line in second
    assert third.startswith(message)
    assert not any("File" in text for text in more)


def test_an_exception_hook_of_the_script_is_kept() -> None:
    mine = "sys.excepthook = lambda kind, error, trace: print('mine:', kind.__name__, file=sys.stderr)"
    assert scripts(1, before=mine, at_a_step="given.step()") == [(1, "mine: OrchestraError\n")]
    assert scripts(1, before=mine, at_a_step="1 / 0") == [(1, "mine: ZeroDivisionError\n")]


def test_an_error_in_the_loop_reaches_the_others() -> None:
    (code, said), (other, told) = scripts(2, at_a_step="assert rank == 0, 'no such luck'")
    assert (code, other) == (10, 1)
    assert said == "Stopped: worker 1 failed: AssertionError: no such luck\n"
    assert "Traceback" in told


def test_a_death_is_the_exit_code_of_the_others() -> None:
    (code, said), (other, _) = scripts(2, at_a_step="rank == 0 or os.kill(os.getpid(), 9)")
    assert (code, other) == (6, -9)
    assert said.startswith("WorkerLost: worker 1 died: its connection")


# Being stopped.


def line(name: str, steps: str, out: Path) -> str:
    return (
        f"stopped by {name} after {steps}. A loop continues from what it saved itself, model.state_dict() and "
        f"optimizer.state_dict(): nothing else was saved. Its events are in {out}.\n"
    )


@pytest.mark.parametrize("who", ["True", "rank == 0", "rank == 1"])
def test_a_loop_that_is_stopped_says_so_in_one_line(who: str, tmp_path: Path) -> None:
    (code, said), (other, told) = scripts(
        2, kept(tmp_path / "run"), at_a_step=f"if i == 2 and ({who}): raise KeyboardInterrupt"
    )
    assert (code, other) == (130, 130)
    assert said in [line("SIGINT", f"{steps} steps", tmp_path / "run") for steps in (2, 3, 4)]  # when it is heard
    assert told == ""
    word = run_lock.ask(tmp_path / "run")
    assert (word.fate, word.why) == ("stopped", said.rstrip())


def test_sigterm_stops_a_loop_likewise(tmp_path: Path) -> None:
    found = scripts(1, kept(tmp_path / "run"), at_a_step="if i == 1: os.kill(os.getpid(), 15)")
    assert found == [(143, line("SIGTERM", "2 steps", tmp_path / "run"))]
    assert run_lock.ask(tmp_path / "run").fate == "stopped"


def test_stopped_before_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    early = "import orchestra.user_loop.joining as p; p._meet = lambda *given: os.kill(os.getpid(), 2)"
    assert scripts(1, before=early) == [(130, "stopped by SIGINT before the loop began.\n")]


def test_a_fork_of_a_loop_ends_by_sigterm_as_others_do() -> None:
    fork = "pid = os.fork() or (os.kill(os.getpid(), 15), os._exit(0)); print(os.waitpid(pid, 0)[1], file=sys.stderr)"
    assert scripts(1, at_a_step=f"if i == 1: {fork}") == [(0, "15\n")]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_loop_that_fails_leaves_why(rank: int, tmp_path: Path) -> None:
    scripts(2, kept(tmp_path / "run"), at_a_step=f"assert i < 2 or rank != {rank}, 'no such luck'")
    word = run_lock.ask(tmp_path / "run")
    assert word.fate == "failed"
    assert "AssertionError: no such luck" in word.why
    assert '"stepped"' in (tmp_path / "run" / "events-0.jsonl").read_text()


def test_a_loop_holds_its_folder_while_it_goes_on(tmp_path: Path) -> None:
    look = f"from orchestra.runs import run_lock; from pathlib import Path; out = Path('{tmp_path / 'run'}')"
    (found,) = scripts(
        1, kept(tmp_path / "run"), before=look, at_a_step="assert run_lock.ask(out).alive",
        at_the_end="optimizer.finish(); assert run_lock.ask(out).alive is None",
    )  # fmt: skip
    assert found == (0, "")


def kept(out: Path) -> str:
    """A strategy, and where its run is kept."""
    return f'localsgd(tau=2)", out="{out}'


def as_process(text: str, folder: Path, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    path = folder / "train.py"
    path.write_text(text)
    command: Sequence[str] = [sys.executable, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False, cwd=folder, env=environ)


@pytest.mark.nightly
def test_a_whole_interpreter_exits_with_the_code_of_the_error(tmp_path: Path) -> None:
    nan = "model.zero_grad(); (model(torch.ones(2, 3)) / 0).sum().backward(); optimizer.step()"
    done = as_process(script(at_a_step=f"for _ in range(10): {nan}"), tmp_path)
    assert done.returncode == 5
    *lines, last = done.stderr.splitlines()
    assert lines == [
        f'  File "{tmp_path}/train.py", line 15, in <module>',
        f"    for _ in range(10): {nan}",
        *lines[2:],
    ]
    assert last.startswith("Diverged: worker 0: the gradient was NaN or infinite 10 times in a row")


def test_a_whole_interpreter_makes_up_for_what_was_forgotten(tmp_path: Path) -> None:
    done = as_process(script(at_the_end="pass"), tmp_path)
    assert (done.returncode, done.stderr) == (0, forgotten("worker 0"))
