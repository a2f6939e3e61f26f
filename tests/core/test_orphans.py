# SPDX-License-Identifier: Apache-2.0
"""A launcher that is killed leaves no process behind: if that happens during start-up, all are gone in two seconds.

That they are gone is tested for every change; how soon, in `make nightly`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import pytest

pytestmark = pytest.mark.usefixtures("also_alone")
_MARK = "TEST_OF_ORPHANS"
_PROMISED = 2.0  # seconds, during start-up
_IN_ORDER = 5.0  # for processes that are training: they tell each other and end as after Ctrl-C
_SCRIPT = """
import os, sys, time
from functools import partial
from pathlib import Path
import torch, torch.nn.functional as F
import orchestra

FOLDER = Path(sys.argv[1])
CALLER = os.getpid()

def make_model():
    if os.getpid() != CALLER:
        (FOLDER / "in the factory").touch()
        time.sleep(100)
    return torch.nn.Linear(3, 1)

def make_data():
    return torch.ones(8, 3), torch.ones(8, 1)

if __name__ == "__main__":
    if "beside" in sys.argv:
        from orchestra.worlds.shared_memory import fork_server
        fork_server.warm()
        if os.fork() == 0:  # it holds copies of all the launcher's sockets
            time.sleep(100)
            os._exit(0)
    orchestra.train(model=make_model, data=make_data, loss=F.mse_loss, optimizer=partial(torch.optim.SGD, lr=0.1),
                    batch=2, out=FOLDER / "run", cluster=orchestra.Local(workers=2), progress=False)
"""


def marked(mark: str) -> dict[int, str]:
    """The processes that descend from a program with a mark in its environment, and their commands."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if f"{_MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it has just ended
                continue
    return found


def until(ready: Callable[[], object], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@contextmanager
def started(tmp_path: Path, *command: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A program; whatever is left of it in the end is killed."""
    mark = uuid.uuid4().hex
    (tmp_path / "script.py").write_text(_SCRIPT)
    environ = os.environ | {_MARK: mark}
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(command, env=environ, cwd=tmp_path, stdout=said, stderr=said)
    try:
        yield process, mark
    finally:
        process.kill()
        process.wait()
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)


class Kill(Protocol):
    def __call__(
        self, process: subprocess.Popen[bytes], left: Callable[[], object], within: float = _PROMISED
    ) -> None: ...


@pytest.fixture
def kill(promised: Callable[[float], float]) -> Kill:
    """Kill a launcher; fails if what it started is still there after the time that is promised."""

    def kill(process: subprocess.Popen[bytes], left: Callable[[], object], within: float = _PROMISED) -> None:
        assert left()
        killed = time.monotonic()
        process.kill()
        process.wait()
        assert until(lambda: not left(), killed + promised(within) - time.monotonic()), left()

    return kill


def forkservers(mark: str) -> list[int]:
    return [pid for pid, command in marked(mark).items() if "fork_server" in command]


def maps_torch(pid: int) -> bool:
    try:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


SCRIPT = (sys.executable, "script.py", ".")
RUN = (sys.executable, "-m", "orchestra", "run", "digits", "--workers", "2", "--out", "run")


@pytest.mark.parametrize("command", [SCRIPT, RUN], ids=["train", "orchestra run"])
def test_while_torch_is_imported(kill: Kill, tmp_path: Path, command: tuple[str, ...]) -> None:
    with started(tmp_path, *command) as (process, mark):
        assert until(lambda: any(map(maps_torch, forkservers(mark))), 60)
        (server,) = forkservers(mark)
        os.kill(server, signal.SIGSTOP)  # so that it cannot notice anything itself
        kill(process, lambda: marked(mark))


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.5])
def test_soon_after_the_server_appears(kill: Kill, tmp_path: Path, seconds: float) -> None:
    with started(tmp_path, *SCRIPT) as (process, mark):
        assert until(lambda: forkservers(mark), 60)
        time.sleep(seconds)
        kill(process, lambda: marked(mark))


@pytest.mark.parametrize("more", [(), ("beside",)], ids=["alone", "with a fork of the launcher"])
def test_while_the_processes_make_their_models(kill: Kill, tmp_path: Path, more: tuple[str, ...]) -> None:
    with started(tmp_path, *SCRIPT, *more) as (process, mark):
        assert until((tmp_path / "in the factory").exists, 60)
        kill(process, lambda: forkservers(mark))


# `orchestra launch`, with a stand-in for ssh that keeps the environment, and with it the mark.

_STAND_IN = """\
#!/bin/sh
asked=asked-$1
if [ -e "$asked" ]; then stage=run; else stage=check; fi
touch "$asked"
if [ "$1" = two ] && [ "$stage" = "$SILENT" ]; then touch silent; exec sleep 100; fi
shift
exec sh -c "$*"
"""
_NODE = """\
import os, time
from pathlib import Path
Path("node-" + os.environ["RANK"]).touch()
time.sleep(100)
"""


@contextmanager
def launched(tmp_path: Path, *command: str, silent: str = "") -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A launcher with two hosts; the second does not answer at the stage `silent`, as one that is switched off."""
    (tmp_path / "stand-in").write_text(_STAND_IN)
    (tmp_path / "stand-in").chmod(0o755)
    (tmp_path / "hosts").write_text("one\ntwo\n")
    (tmp_path / "node.py").write_text(_NODE)
    words = ("--hosts", "hosts", "--ssh", str(tmp_path / "stand-in"), "--master", "127.0.0.1", "--")
    launch = ("env", f"SILENT={silent}", sys.executable, "-m", "orchestra", "launch", *words, *command)
    with started(tmp_path, *launch) as found:
        yield found


@pytest.mark.parametrize("stage", ["check", "run"])
def test_launch_while_a_host_does_not_answer(kill: Kill, tmp_path: Path, stage: str) -> None:
    """It would be waited for 100 s; in the second stage the first host's process has started meanwhile."""
    with launched(tmp_path, "python", "node.py", silent=stage) as (process, mark):
        assert until((tmp_path / "silent").exists, 60), (tmp_path / "said").read_text()
        assert stage == "check" or until((tmp_path / "node-0").exists, 60)
        kill(process, lambda: marked(mark))


def test_launch_while_the_processes_start(kill: Kill, tmp_path: Path) -> None:
    with launched(tmp_path, "python", "node.py") as (process, mark):
        assert until(lambda: len([*tmp_path.glob("node-*")]) == 2, 60), (tmp_path / "said").read_text()
        kill(process, lambda: marked(mark))


def test_launch_while_the_processes_import_torch(kill: Kill, tmp_path: Path) -> None:
    with launched(tmp_path, "run", "digits", "--out", "run") as (process, mark):
        assert until(lambda: any(map(maps_torch, marked(mark))), 60), (tmp_path / "said").read_text()
        kill(process, lambda: marked(mark))


# A loop of one's own, in as many processes as `orchestra run` is told.

_LOOP = """\
import os, time
from pathlib import Path
import torch
import orchestra

RANK = os.environ["RANK"]
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
Path(f"begun-{RANK}").touch()
if RANK == os.environ.get("LATE"):
    time.sleep(100)
model, optimizer = orchestra.prepare(model, optimizer, strategy="allreduce")
for step in range(100_000):
    optimizer.zero_grad()
    model(torch.ones(4, 3) * (1 + orchestra.rank())).mean().backward()
    optimizer.step()
    time.sleep(0.01)
    Path(f"stepped-{RANK}").touch()
optimizer.finish()
"""


@contextmanager
def looping(tmp_path: Path, *more: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    (tmp_path / "loop.py").write_text(_LOOP)
    with started(tmp_path, sys.executable, "-m", "orchestra", "run", "loop.py", "--workers", "2", *more) as found:
        yield found


def agents(mark: str) -> list[int]:
    return [pid for pid, command in marked(mark).items() if "launchers.agent" in command]


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.3, 0.6])
def test_a_loop_whose_agents_have_just_started(kill: Kill, tmp_path: Path, seconds: float) -> None:
    with looping(tmp_path) as (process, mark):
        assert until(lambda: agents(mark), 60), (tmp_path / "said").read_text()
        time.sleep(seconds)
        kill(process, lambda: marked(mark))


def test_a_loop_whose_processes_import_torch(kill: Kill, tmp_path: Path) -> None:
    with looping(tmp_path) as (process, mark):
        assert until(lambda: any(maps_torch(pid) for pid in marked(mark) if pid != process.pid), 60)
        kill(process, lambda: marked(mark))


def test_a_loop_one_of_whose_processes_waits_for_the_other(
    kill: Kill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LATE", "1")
    with looping(tmp_path) as (process, mark):
        assert until(lambda: len([*tmp_path.glob("begun-*")]) == 2, 60), (tmp_path / "said").read_text()
        time.sleep(0.5)
        kill(process, lambda: marked(mark))


@pytest.mark.parametrize("strategy", ["allreduce", "ps"])
def test_a_loop_that_is_running(kill: Kill, tmp_path: Path, strategy: str) -> None:
    with looping(tmp_path, "-s", strategy) as (process, mark):
        assert until(lambda: len([*tmp_path.glob("stepped-*")]) == 2, 60), (tmp_path / "said").read_text()
        kill(process, lambda: marked(mark), _IN_ORDER)
