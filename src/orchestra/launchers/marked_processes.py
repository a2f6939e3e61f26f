# SPDX-License-Identifier: Apache-2.0
"""Processes of this machine: find them by a mark in their environment, kill them, end them with their parent.

A mark is NAME=VALUE, and every process that a marked one starts inherits it, also in another session or process group.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # of prctl.h


def exit_status(code: int) -> int:
    """Return the exit status of a process, as a shell gives it: 128 + n for signal n.

    >>> exit_status(3), exit_status(-9)
    (3, 137)
    """
    return code if code >= 0 else 128 - code


def ending_with_parent(number: signal.Signals) -> Callable[[], None]:
    """Return a `preexec_fn`: the new process gets this signal when the thread that started it ends, even if killed."""
    libc, parent = ctypes.CDLL(None), os.getpid()

    def tie() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it died before the line above took effect
            os._exit(1)

    return tie


def arguments_of(pid: int) -> list[str]:
    """Return the command line of a process; empty if it has ended."""
    return _strings(f"/proc/{pid}/cmdline")


def environment_of(pid: int) -> list[str]:
    """Return a process's initial environment, as NAME=VALUE; empty if it has ended or belongs to another user."""
    return _strings(f"/proc/{pid}/environ")


def _strings(path: str) -> list[str]:
    try:
        return Path(path).read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def kill_marked(mark: str, within: float) -> list[int]:
    """Kill all processes but this one whose environment has the mark, or one that begins with it; see `kill_all`."""

    def marked() -> list[int]:
        others = [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]
        return [pid for pid in others if any(entry.startswith(mark) for entry in environment_of(pid))]

    return kill_all(marked, within)


def kill_all(find: Callable[[], Collection[int]], within: float) -> list[int]:
    """Kill the processes that `find` lists until it lists none; return those that are left after so many seconds."""
    end = time.monotonic() + within
    while left := find():
        if time.monotonic() > end:
            return sorted(left)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return []
