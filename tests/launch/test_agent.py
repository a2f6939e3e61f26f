# SPDX-License-Identifier: Apache-2.0
"""The agent on a far host alone: what it does when its launcher is gone, and which processes it starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.processes import is_running
from tests.waiting import wait_until

from orchestra.launchers import agent
from orchestra.launchers.agent import check_machine

ORDERS: dict[str, Any] = {"do": "run", "cwd": "/", "environment": {"A": "b"}, "silence": 30.0, "grace": 30.0}


class FarEnd:
    def __init__(self, orders: dict[str, Any], preexec_fn: Callable[[], None] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "orchestra.launchers.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PYTHONPATH": str(Path(__file__).parents[2] / "src")},
            preexec_fn=preexec_fn,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.say(json.dumps(ORDERS | orders))

    def say(self, word: str) -> None:
        self.stdin.write(word.encode() + b"\n")
        self.stdin.flush()

    def end(self) -> tuple[int, bytes, bytes]:
        """Wait for it, and hear what it said."""
        assert self.process.stderr is not None
        code = self.process.wait(20)
        self.stdin.close()
        out = b"" if self.stdout.closed else self.stdout.read()
        err = self.process.stderr.read()
        self.stdout.close()
        self.process.stderr.close()
        return code, out, err


def script(text: str, **more: Any) -> dict[str, Any]:
    return {"argv": [sys.executable, "-c", text], "mark": f"test-{time.monotonic_ns()}.", **more}


def test_the_agent_ends_with_the_exit_status_of_its_process() -> None:
    far = FarEnd(script("import os, sys; print(os.environ['A']); sys.exit(7)"))
    assert far.end() == (7, b"b\n", b"")
    assert FarEnd(script("import os; os.kill(os.getpid(), 9)")).end()[0] == 137


def test_a_command_that_cannot_be_run() -> None:
    code, _, err = FarEnd({"argv": ["/nowhere/python"], "mark": "x."}).end()
    assert code == 127
    assert b"/nowhere/python cannot be run in /" in err
    assert b"Traceback" not in err


@pytest.fixture
def _handlers() -> Iterator[None]:
    """Signals are handled as before when the test is over."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_handlers")
def test_silence_counts_as_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cable that is cut closes nothing; so a launcher that is not heard any more is gone."""
    heard, said = os.pipe()
    now = 0.0

    def clock() -> float:
        """Ten seconds pass from one look to the next. For 200 s a word is said before each."""
        nonlocal now
        now += 10
        if now <= 200:
            os.write(said, b"\n")
        return now

    monkeypatch.setattr(agent, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(agent, "_SLICE", 0.01)
    orders: Any = {"mark": "none.", "silence": 30.0, "grace": 1e9}
    process = subprocess.Popen([b"sleep", b"60"], start_new_session=True)
    agent._Watch(process, orders, agent._InputLines(heard)).until_end()
    os.close(heard)
    os.close(said)
    assert process.returncode == -signal.SIGTERM
    assert now > 230  # as long as it was heard, it went on


def test_who_does_not_stop_is_killed_after_the_grace() -> None:
    text = "import signal, time; signal.signal(15, signal.SIG_IGN); print('on', flush=True); time.sleep(60)"
    far = FarEnd(script(text, grace=0.5))
    assert far.stdout.readline() == b"on\n"
    far.stdin.close()
    assert far.end()[0] == 137


def test_an_agent_started_with_blocked_signals_can_be_interrupted() -> None:
    """Ray blocks SIGINT in all that it starts, and a shell's background jobs ignore it."""

    def deaf() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    far = FarEnd(script("import time; print('on', flush=True); time.sleep(60)"), preexec_fn=deaf)
    assert far.stdout.readline() == b"on\n"
    far.say("SIGINT")
    assert far.end()[0] == 130


def test_a_process_goes_on_saving_when_its_output_is_not_read(tmp_path: Path) -> None:
    text = (
        "import os, signal, sys, time\n"
        "def save(*_):\n"
        "    for _ in range(300): os.write(1, b'x' * 1000)\n"
        f"    open({str(tmp_path / 'saved')!r}, 'w').write('all')\n"
        "    sys.exit(143)\n"
        "signal.signal(15, save); print('on', flush=True); time.sleep(60)"
    )
    far = FarEnd(script(text))
    assert far.stdout.readline() == b"on\n"
    far.stdout.close()
    far.stdin.close()
    assert far.end()[0] == 143
    assert (tmp_path / "saved").read_text() == "all"


def test_what_a_process_leaves_is_ended_with_it() -> None:
    child = "import subprocess, sys; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)"
    far = FarEnd(script(child))
    code, out, _ = far.end()
    assert code == 0
    wait_until(lambda: not is_running(int(out)))


def test_a_far_end_that_is_killed_takes_the_process_with_it() -> None:
    far = FarEnd(script("import os, time; print(os.getpid(), flush=True); time.sleep(60)"))
    pid = int(far.stdout.readline())
    far.process.kill()
    wait_until(lambda: not is_running(pid), 5.0)
    assert far.end()[0] == -9


def test_the_agent_without_orders_says_what_it_is() -> None:
    far = subprocess.run(
        [sys.executable, "-m", "orchestra.launchers.agent"],
        input="",
        env={"PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert far.returncode == 1
    assert "only `orchestra launch` starts this program" in far.stderr


@pytest.mark.parametrize("master", ["127.0.0.1", "no.such.host.invalid"])
def test_an_unknown_name_of_the_master_is_reported(master: str) -> None:
    answer = check_machine({"cwd": "/", "master": master, "port": 1, "any_port": False, "first": False})
    assert bool(answer["problems"]) == (master != "127.0.0.1")
    assert all("--master" in problem for problem in answer["problems"])
