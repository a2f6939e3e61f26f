# SPDX-License-Identifier: Apache-2.0
"""Fibers: calls that can be suspended and resumed, so that many nodes take turns in one process.

    kernel                          fiber
    fiber.resume()          →       runs
                            ←       fiber.park(), or its end

Greenlets switch in microseconds. Threads that take turns by semaphores need no package and are five to twelve times
slower; they also serve to test the greenlets, since the two share no code.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal, Protocol

import torch

Kind = Literal["auto", "greenlet", "thread"]


class Killed(BaseException):
    """Raised inside a fiber to unwind it."""


class Fiber(Protocol):
    """One call that can be suspended."""

    done: bool
    error: BaseException | None

    def resume(self) -> None:
        """Run the fiber until it parks or ends. Called by the kernel."""

    def park(self) -> None:
        """Suspend this fiber until it is resumed. Called by the fiber itself."""

    def kill(self) -> None:
        """Unwind the fiber. Called by the kernel."""

    def frame(self) -> FrameType | None:
        """Return the frame at which the fiber is parked."""
        ...


def make(kind: Kind, body: Callable[[], None]) -> Fiber:
    """Return a fiber that calls `body` when it is first resumed."""
    if kind == "auto":
        kind = "greenlet" if importlib.util.find_spec("greenlet") is not None else "thread"
    return GreenletFiber(body) if kind == "greenlet" else ThreadFiber(body)


Modes = tuple[bool, bool, bool]


def modes() -> Modes:
    """Return the modes that torch keeps per thread and every fiber needs for itself: grad mode, autocast by device."""
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")


def restore(before: Modes) -> None:
    """Set these modes."""
    recording, *casting = before
    torch.set_grad_enabled(recording)
    for device, enabled in zip(("cpu", "cuda"), casting, strict=True):
        torch.set_autocast_enabled(device, enabled)


# The modes after the last greenlet, cached because asking torch takes longer than switching.
_in_force: list[Modes | None] = [None]


def visit(fiber: Fiber) -> None:
    """Run a fiber until it parks or ends, and restore the caller's modes; raise the error that ended it."""
    before, _in_force[0] = modes(), None
    try:
        fiber.resume()
    finally:
        restore(before)
    if fiber.error is not None:
        raise fiber.error


class GreenletFiber:
    """A fiber with its own stack in the same thread."""

    def __init__(self, body: Callable[[], None]) -> None:
        from greenlet import getcurrent, greenlet

        self.done = False
        self.error: BaseException | None = None
        self._body = body
        self._hub: Any = None  # the greenlet that resumes it
        self._modes = modes()  # at its last switch
        self._own: Any = greenlet(self._run)
        self._current = getcurrent

    def _run(self) -> None:
        try:
            self._body()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        self.done = True
        _in_force[0] = modes()

    def resume(self) -> None:
        """Run the fiber until it parks or ends, with its own modes, which torch keeps per thread."""
        if self._hub is None:
            self._own.parent = self._hub = self._current()
            _in_force[0] = None
        if self._modes != _in_force[0]:
            restore(self._modes)
        self._own.switch()

    def park(self) -> None:
        """Suspend the fiber."""
        self._modes = _in_force[0] = modes()
        self._hub.switch()

    def kill(self) -> None:
        """Unwind the fiber, if it has begun."""
        if self._own:
            self._own.throw(Killed)
        self.done = True

    def frame(self) -> FrameType | None:
        """Return the frame at which the fiber is parked."""
        frame: FrameType | None = self._own.gr_frame
        return frame


class ThreadFiber:
    """A thread that runs only between `resume` and `park`."""

    def __init__(self, body: Callable[[], None]) -> None:
        self.done = False
        self.error: BaseException | None = None
        self._body = body
        self._mine = threading.Semaphore(0)
        self._kernels = threading.Semaphore(0)
        self._killed = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self._wait()
            self._body()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        self.done = True
        self._kernels.release()

    def _wait(self) -> None:
        self._mine.acquire()
        if self._killed:
            raise Killed

    def resume(self) -> None:
        """Run the fiber until it parks or ends."""
        if self._thread.ident is None:
            self._thread.start()
        self._mine.release()
        self._kernels.acquire()

    def park(self) -> None:
        """Suspend the fiber."""
        self._kernels.release()
        self._wait()

    def kill(self) -> None:
        """Unwind the fiber, if it has begun."""
        self._killed = True
        if not self.done and self._thread.ident is not None:
            self.resume()
            self._thread.join()
        self.done = True

    def frame(self) -> FrameType | None:
        """Return the frame at which the fiber is parked."""
        return sys._current_frames().get(self._thread.ident or 0)
