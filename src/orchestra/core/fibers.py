# SPDX-License-Identifier: Apache-2.0
"""Functions that can be set aside in the middle of a call, so that many nodes take turns in one process.

    kernel                          fiber
    fiber.resume()          →       runs
                            ←       fiber.park(), or its end

Greenlets do it in microseconds. Threads that pass a baton do the same with nothing installed, five to twelve times
slower; they also check the greenlets, since the two share no code.
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
    """Unwinds a fiber that is not to go on."""


class Fiber(Protocol):
    """One call that can be set aside."""

    done: bool
    error: BaseException | None

    def resume(self) -> None:
        """Let it run until it parks or ends. Called by the kernel."""

    def park(self) -> None:
        """Set this fiber aside until it is resumed. Called by the fiber itself."""

    def kill(self) -> None:
        """Unwind it from where it is parked. Called by the kernel."""

    def frame(self) -> FrameType | None:
        """Where it is parked."""
        ...


def make(kind: Kind, body: Callable[[], None]) -> Fiber:
    """A fiber that is about to call `body`."""
    if kind == "auto":
        kind = "greenlet" if importlib.util.find_spec("greenlet") is not None else "thread"
    return GreenletFiber(body) if kind == "greenlet" else ThreadFiber(body)


Modes = tuple[bool, bool, bool]


def modes() -> Modes:
    """What torch keeps by thread, and fibers on greenlets must have each for itself: grad mode, autocast by device."""
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")


def restore(before: Modes) -> None:
    """Go back to them."""
    recording, *casting = before
    torch.set_grad_enabled(recording)
    for device, enabled in zip(("cpu", "cuda"), casting, strict=True):
        torch.set_autocast_enabled(device, enabled)


# Those that the last greenlet left behind: asking torch takes longer than switching.
_in_force: list[Modes | None] = [None]


def visit(fiber: Fiber) -> None:
    """Let it run until it parks or ends, for a caller who has modes of his own; raise what ended it."""
    before, _in_force[0] = modes(), None
    try:
        fiber.resume()
    finally:
        restore(before)
    if fiber.error is not None:
        raise fiber.error


class GreenletFiber:
    """A stack of its own in the same thread."""

    def __init__(self, body: Callable[[], None]) -> None:
        from greenlet import getcurrent, greenlet

        self.done = False
        self.error: BaseException | None = None
        self._body = body
        self._hub: Any = None  # whoever resumed it
        self._modes = modes()  # when it last ran
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
        """Let it run until it parks or ends, with its own modes: torch keeps them by thread, and all share one."""
        if self._hub is None:
            self._own.parent = self._hub = self._current()
            _in_force[0] = None
        if self._modes != _in_force[0]:
            restore(self._modes)
        self._own.switch()

    def park(self) -> None:
        """Set it aside."""
        self._modes = _in_force[0] = modes()
        self._hub.switch()

    def kill(self) -> None:
        """Unwind it; one that never ran has nothing to unwind."""
        if self._own:
            self._own.throw(Killed)
        self.done = True

    def frame(self) -> FrameType | None:
        """Where it is parked."""
        frame: FrameType | None = self._own.gr_frame
        return frame


class ThreadFiber:
    """A thread that runs only while it holds the baton."""

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
        """Let it run until it parks or ends."""
        if self._thread.ident is None:
            self._thread.start()
        self._mine.release()
        self._kernels.acquire()

    def park(self) -> None:
        """Set it aside."""
        self._kernels.release()
        self._wait()

    def kill(self) -> None:
        """Unwind it; one that never ran has nothing to unwind."""
        self._killed = True
        if not self.done and self._thread.ident is not None:
            self.resume()
            self._thread.join()
        self.done = True

    def frame(self) -> FrameType | None:
        """Where it is parked."""
        return sys._current_frames().get(self._thread.ident or 0)
