# SPDX-License-Identifier: Apache-2.0
"""Whether a run goes on, for whoever looks at its folder from outside: while it does, its process holds a lock there.

    the run:      hold `running`, shared;  in the end remove it, or leave in it why there was no end
    who asks:     no `running`             nothing is known: the run is over, or its file system knows no locks
                  exclusive lock refused   it goes on
                  exclusive lock given     it died: without a word if the file is empty

The kernel lets go of a lock however a process ends. An id of a process would not tell: there are others of its number.

A start that failed leaves a folder as well. As long as nothing was trained there, the next start may have it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from orchestra.runs import files

NAME = "running"
_LONGEST = 10_000  # characters of what is left behind, or of what is believed
_OF_A_START = ("config.json", NAME, "scores.jsonl", "topology.json", ".launch-*", ".mark-*", "nccl-*")
_OF_EVENTS = ("events-*.jsonl", "trace-*.jsonl")
_MOMENT = 0.5  # seconds
_FEW = 1 << 20  # bytes of events before the first step: more are not looked through


@dataclass(frozen=True)
class LockState:
    """What a folder says of its run."""

    alive: bool | None  # None: nothing is known
    kind: str = ""  # of the error that ended it
    why: str = ""

    @property
    def fate(self) -> str:
        """What became of a run that goes on no more and never came to its end: stopped, failed or died."""
        if self.alive is not False:
            return ""
        if not self.kind:
            return "died"
        return "stopped" if self.kind in ("Interrupted", "KeyboardInterrupt") else "failed"


class RunLock:
    """The lock of a run folder, from now on until the run is over, broken off, or its process gone."""

    def __init__(self, run: Path) -> None:
        self._path, self._file = run / NAME, contextlib.ExitStack()
        with contextlib.suppress(OSError):  # nobody will know from outside, and that is all
            file = self._file.enter_context(_written(self._path))
            fcntl.flock(file, fcntl.LOCK_SH)

    def let_go(self) -> None:
        """The run came to its end."""
        with contextlib.suppress(OSError):
            self._path.unlink()
        self._file.close()

    def leave(self, kind: str, why: str) -> None:
        """It did not: leave the kind of error, and the end of what there is to say of it, where what to do comes."""
        with contextlib.suppress(OSError), _written(self._path) as file:
            file.write(json.dumps({"kind": kind, "why": why[-_LONGEST:]}))
        self._file.close()


@contextlib.contextmanager
def holding(run: Path) -> Iterator[None]:
    """Hold the lock of a run folder for as long as the run goes on."""
    hold = RunLock(run)
    try:
        yield
    except BaseException as error:
        hold.leave(type(error).__name__, str(error))
        raise
    hold.let_go()


def _at_once(path: str, flags: int) -> int:
    """Opens what is no file, too, without waiting for whoever should be at its other end."""
    return os.open(path, flags | os.O_NONBLOCK)


def _written(path: Path) -> IO[str]:
    """Open a file for writing; not what a link leads to, and without waiting where it is a pipe."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_NOFOLLOW, 0o666)
    return os.fdopen(fd, "w", encoding="utf-8")


def ask(run: Path) -> LockState:
    """Whether a run goes on; if it does not, what it left."""
    try:
        with open(run / NAME, encoding="utf-8", errors="replace", opener=_at_once) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left = file.read(2 * _LONGEST)
    except BlockingIOError:
        return LockState(alive=True)
    except OSError:
        return LockState(alive=None)
    try:
        found = json.loads(left)
        return LockState(alive=False, kind=str(found["kind"]), why=str(found["why"])[-_LONGEST:])
    except (ValueError, KeyError, TypeError, RecursionError):
        return LockState(alive=False)


def is_gone(run: Path) -> bool:
    """Whether a run folder was deleted, or emptied. A file system that does not answer is another matter."""
    try:
        os.stat(run / "config.json")
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def never_began(run: Path) -> bool:
    """Whether a folder holds nothing but what a start leaves that failed before the first step, and is nobody's now."""
    with _owned(run) as ours:
        return ours


def make_room(run: Path) -> None:
    """Take away what such a start has left, if it is that."""
    with _owned(run) as ours:
        for path in sorted(run.iterdir(), key=lambda path: path.name == NAME) if ours else ():  # the lock goes last
            path.rmdir() if path.is_dir() else path.unlink()


@contextlib.contextmanager
def _owned(run: Path) -> Iterator[bool]:
    """Hold the lock alone, so that nobody else begins there; gives whether there is nothing to be lost."""
    with contextlib.ExitStack() as files:
        try:
            file = files.enter_context(open(run / NAME, opener=_at_once))
            _lock(file, _MOMENT)
            there = [*run.iterdir()]
            told = [path.name for path in there] == [NAME] or isinstance(_config(run).get("strategy"), str)
            ours = told and all(map(_is_of_a_start, there))
        except OSError:
            ours = False
        yield ours


def _lock(file: IO[Any], within: float) -> None:
    """Hold a lock alone. Who only asks holds it for a moment, too; a run holds it for as long as it goes on."""
    until = time.monotonic() + within
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise
        time.sleep(within / 50)


def _config(run: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = files.read_json(run / "config.json")
        return found if isinstance(found, dict) else {}
    return {}


def _is_of_a_start(path: Path) -> bool:
    if path.is_symlink():
        return False
    if path.is_dir():
        return path.name in ("checkpoints", "snapshots") and not any(path.iterdir())
    if any(path.match(name) for name in _OF_EVENTS):
        return files.is_regular(path) and path.stat().st_size < _FEW and b'"event":"stepped"' not in path.read_bytes()
    return any(path.match(name) for name in _OF_A_START)
