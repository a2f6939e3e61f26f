# SPDX-License-Identifier: Apache-2.0
"""A process beside the one that trains: it calls a function on request, with the lowest priority and one thread.

    the caller                          the process, forked before there are any connections
    ask(argument)               →       function(argument)
    the answer, or an error     ←       a line of JSON

It has a copy of the caller's memory, so nothing is pickled. It ends with the caller, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import stat
import sys
import warnings
from collections.abc import Callable

import torch

_GLANCE = 0.2  # seconds between two checks whether the answer is still wanted
_PR_SET_PDEATHSIG = 1  # of prctl.h


class BackgroundFailed(Exception):
    """The function raised in the other process; the text is its error."""


class BackgroundProcess:
    """The caller's side of the background process."""

    def __init__(self, function: Callable[[str], str]) -> None:
        self._mine, theirs = socket.socketpair()
        _flush()  # else both processes would write what is buffered
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads: the child needs none of them
            self.pid = os.fork()
        if not self.pid:
            _live(theirs, self._mine, function)
        theirs.close()
        self._rest = b""

    def ask(self, argument: str, wanted: Callable[[], bool]) -> str | None:
        """Return the function's answer; None if it is no longer wanted.

        Raise `BackgroundFailed` if the function raised, and OSError if the process has died. A function that never
        returns costs the caller nothing but this answer.
        """
        self._mine.sendall(json.dumps(argument).encode() + b"\n")
        while b"\n" not in self._rest:
            if select.select([self._mine], [], [], _GLANCE)[0]:
                if not (data := self._mine.recv(1 << 16)):
                    raise ConnectionError("the process that scores snapshots has died")
                self._rest += data
            elif not wanted():
                return None
        line, _, self._rest = self._rest.partition(b"\n")
        said = json.loads(line)
        if "error" in said:
            raise BackgroundFailed(said["error"])
        return str(said["answer"])

    def kill(self) -> None:
        """Kill the process; a pending `ask` raises."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the process, and reap it."""
        self.kill()
        with contextlib.suppress(OSError):
            os.waitpid(self.pid, 0)
        self._mine.close()


def _live(line: socket.socket, other: socket.socket, function: Callable[[str], str]) -> None:
    """Answer until the caller ends. Never return: the rest of the program is the caller's."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGINT, signal.SIGTERM):  # a terminal sends Ctrl-C to all; the caller decides
            signal.signal(number, signal.SIG_IGN)
        other.close()
        _close_sockets(but=line.fileno())
        os.setpriority(os.PRIO_PROCESS, 0, 19)
        torch.set_num_threads(1)
        with line.makefile("rw", encoding="utf-8") as file:
            for asked in file:
                file.write(json.dumps(_answer(function, json.loads(asked))) + "\n")
                file.flush()
                _flush()
        code = 0
    finally:
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _answer(function: Callable[[str], str], argument: str) -> dict[str, str]:
    try:
        return {"answer": function(argument)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _close_sockets(but: int) -> None:
    """Close the caller's connections here: the other end must notice when the caller closes them."""
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            if int(name) != but and stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                os.close(int(name))
