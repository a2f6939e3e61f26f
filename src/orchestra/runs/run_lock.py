# SPDX-License-Identifier: Apache-2.0
"""Whether a run is still going on, for other processes: while it does, its process holds a lock in the run folder.

    the run:             holds a shared lock on `running`; at its end it removes the file, or writes there why it failed
    another process:     no `running`             unknown: the run is over, or the file system has no locks
                         exclusive lock refused   the run goes on
                         exclusive lock granted   the run died; if the file is empty, without giving a reason

The kernel releases a lock however a process ends. A pid is not enough: pids are reused.

A start that failed leaves a folder as well. As long as nothing was trained there, the next start may use it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from orchestra.runs import files
from orchestra.runs.files import lock_file

NAME = "running"
_LONGEST = 10_000  # characters of an error that are written, and that are read
_OF_A_START = ("config.json", NAME, "scores.jsonl", "topology.json", ".launch-*", ".mark-*", "nccl-*")
_OF_EVENTS = ("events-*.jsonl", "trace-*.jsonl")
_MOMENT = 0.5  # seconds
_FEW = 1 << 20  # bytes of events before the first step: longer files are not searched


@dataclass(frozen=True)
class LockState:
    """What the lock of a run folder says about its run."""

    alive: bool | None  # None: unknown
    kind: str = ""  # of the error that ended it
    why: str = ""

    @property
    def fate(self) -> str:
        """How a run that is not going on ended before its end: stopped, failed or died; empty if it did not."""
        if self.alive is not False:
            return ""
        if not self.kind:
            return "died"
        return "stopped" if self.kind in ("Interrupted", "KeyboardInterrupt") else "failed"


class RunLock:
    """The lock of a run folder, held until the run is over or aborted, or its process ends."""

    def __init__(self, run: Path) -> None:
        self._path, self._file = run / NAME, contextlib.ExitStack()
        with contextlib.suppress(OSError):  # other processes then do not see that the run goes on; nothing else is lost
            file = self._file.enter_context(_written(self._path))
            fcntl.flock(file, fcntl.LOCK_SH)

    def let_go(self) -> None:
        """Release the lock of a run that is complete."""
        with contextlib.suppress(OSError):
            self._path.unlink()
        self._file.close()

    def leave(self, kind: str, why: str) -> None:
        """Release the lock of a run that failed; write the error's kind and the end of its message (the advice)."""
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
    """Open a path, even a pipe or a device, without blocking."""
    return os.open(path, flags | os.O_NONBLOCK)


def _written(path: Path) -> IO[str]:
    """Open a file for writing; do not follow a link, and do not block on a pipe."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_NOFOLLOW, 0o666)
    return os.fdopen(fd, "w", encoding="utf-8")


def ask(run: Path) -> LockState:
    """Return whether a run goes on; if it does not, the error that it left."""
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
    """Return whether a run folder was deleted or emptied; False if the file system does not answer."""
    try:
        os.stat(run / "config.json")
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def never_began(run: Path) -> bool:
    """Return whether a folder holds only files of a start that failed before the first step, and no run uses it."""
    with _owned(run) as ours:
        return ours


def make_room(run: Path) -> None:
    """Delete the files of such a failed start, if the folder holds nothing else."""
    with _owned(run) as ours:
        for path in sorted(run.iterdir(), key=lambda path: path.name == NAME) if ours else ():  # the lock goes last
            path.rmdir() if path.is_dir() else path.unlink()


@contextlib.contextmanager
def _owned(run: Path) -> Iterator[bool]:
    """Hold the lock exclusively, so that no other run begins there; yield whether the folder may be cleared."""
    with contextlib.ExitStack() as files:
        try:
            file = files.enter_context(open(run / NAME, opener=_at_once))
            lock_file(file, _MOMENT)  # a process that calls `ask` holds it for a moment
            there = [*run.iterdir()]
            told = [path.name for path in there] == [NAME] or isinstance(_config(run).get("strategy"), str)
            ours = told and all(map(_is_of_a_start, there))
        except OSError:
            ours = False
        yield ours


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
