# SPDX-License-Identifier: Apache-2.0
"""The kernel of a simulation: virtual time, a heap of events, and tasks that run until they wait.

    repeat
        take the earliest event; now ← its time; carry it out
        at equal times: in order of scheduling, or in an order drawn from a seed
    until there is none. A task that still waits then is deadlocked; the error lists what every task waits for

No real clock is used, so the same inputs give the same events in the same order.
"""

from __future__ import annotations

import gc
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count as counting
from pathlib import Path
from types import FrameType
from typing import Any, Generic, TypeVar

from orchestra.core import fibers
from orchestra.errors import Deadlock

T = TypeVar("T")

_MANY = 1000  # tasks between two collections of reference cycles, each of which takes 0.1 s and more
_PACKAGE = Path(__file__).resolve().parents[2]
# Code whose lines are not shown in a deadlock: only those of the algorithm help.
_INTERNAL = (*(str(_PACKAGE / part) for part in ("core", "engine", "worlds")), threading.__file__)


@dataclass(slots=True, eq=False)
class Task:
    """The activity of a node."""

    name: str
    fiber: fibers.Fiber = field(init=False)
    awaits: Promise[Any] | None = None  # while the task is parked


_since = 0  # tasks begun since the last collection


def _collect_cycles(tasks: int) -> None:
    """Collect the cycles of earlier runs from time to time: a worker and its fiber refer to each other."""
    global _since
    if _since >= _MANY:
        gc.collect()
        _since = 0
    _since += tasks


class Kernel:
    """The virtual clock, its events and its tasks."""

    def __init__(self, *, fiber: fibers.Kind = "auto", ties: int | None = None) -> None:
        self.now = 0.0
        self._kind = fiber
        self._heap: list[tuple[float, Any, Callable[..., object], tuple[Any, ...]]] = []  # time, order, act, arguments
        self._ready: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._count = 0
        self._rng = None if ties is None else random.Random(ties)
        self.shuffles = ties is not None  # events at equal times
        self._tasks: list[Task] = []
        self._current: Task | None = None
        self._stirred = 0.0  # when a task last ran

    # Events.

    def at(self, t: float, act: Callable[..., object], *args: Any) -> None:
        """Schedule a call at a time that has not passed."""
        rng = self._rng
        if t == self.now and rng is None:
            # Everything else that is due now was scheduled before, so appending keeps the order.
            self._ready.append((act, args))
            return
        if not t >= self.now:
            raise ValueError(f"an event is scheduled at {t} s, but the time is already {self.now} s")
        self._count = count = self._count + 1
        heappush(self._heap, (t, count if rng is None else (rng.random(), count), act, args))

    def after(self, seconds: float, act: Callable[..., object], *args: Any) -> None:
        """Schedule a call after some seconds."""
        self.at(self.now + seconds, act, *args)

    # Tasks.

    def spawn(self, name: str, body: Callable[[], None]) -> Task:
        """Start a task now."""
        task = Task(name)
        task.fiber = fibers.make(self._kind, body)
        self._tasks.append(task)
        self.at(self.now, self._run, task)
        return task

    @property
    def current(self) -> Task:
        """The task that is running."""
        assert self._current is not None, "only tasks may wait"
        return self._current

    def wake(self, task: Task) -> None:
        """Schedule a parked task to continue now."""
        self.at(self.now, self._run, task)

    def _run(self, task: Task) -> None:
        fiber = task.fiber
        if fiber.done:
            return
        self._current = task
        self._stirred = self.now
        fiber.resume()
        self._current = None
        if fiber.done:
            self._tasks.remove(task)
            if fiber.error is not None:
                raise fiber.error
            if not self._tasks:  # no task is left that an event could concern
                self._heap.clear()
                self._ready.clear()

    # The run.

    def run(self, heartbeat: Callable[[], None] = lambda: None) -> None:
        """Carry out events until no event or no task is left; call `heartbeat` every 256 events."""
        heap, ready = self._heap, self._ready
        # Hardly any garbage is cyclic, and searching for cycles among so many objects takes a quarter of the time.
        before = gc.get_threshold()
        _collect_cycles(len(self._tasks))
        gc.freeze()
        gc.set_threshold(200_000, 50, 1000)
        modes = fibers.modes()
        try:
            for events in counting(1):
                if heap and (not ready or heap[0][0] <= self.now):
                    self.now, _, act, args = heappop(heap)
                elif ready:
                    act, args = ready.popleft()
                else:
                    break
                act(*args)
                if not events & 255:
                    heartbeat()
            if self._tasks:
                raise Deadlock(self._waiting_tasks())
        finally:
            self.close()
            fibers.restore(modes)
            gc.set_threshold(*before)
            gc.unfreeze()

    def close(self) -> None:
        """Unwind the remaining tasks."""
        for task in self._tasks:
            task.fiber.kill()
        self._tasks.clear()
        self._heap.clear()
        self._ready.clear()

    def _waiting_tasks(self) -> str:
        lines = [
            f"  {task.name} waits for {task.awaits.what() if task.awaits else 'nothing'}{_place(task.fiber.frame())}"
            for task in self._tasks[:20]
        ]
        more = len(self._tasks) - len(lines)
        return "\n".join(
            [f"at {self._stirred:.6g} s no node can continue:", *lines, *([f"  and {more} more"] if more > 0 else [])]
        )


def _place(frame: FrameType | None) -> str:
    """Return the innermost line that belongs to an algorithm."""
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_INTERNAL):
            return f" ({Path(path).name}:{frame.f_lineno}, {frame.f_code.co_name})"
        frame = frame.f_back
    return ""


class Promise(Generic[T]):
    """A handle whose answer arrives at a virtual time."""

    __slots__ = ("_about", "_kernel", "_task", "_value", "_words", "done")

    def __init__(self, kernel: Kernel, words: Callable[..., str], *about: Any) -> None:
        """Create a promise; `words` describes it in a deadlock, and is called only then, for speed."""
        self._kernel = kernel
        self._words, self._about = words, about
        self._task: Task | None = None
        self._value: T
        self.done = False

    def keep(self, value: T) -> None:
        """Set the answer, and wake the task that waits."""
        self._value = value
        self.done = True
        if self._task is not None:
            self._kernel.wake(self._task)

    def wait(self) -> T:
        """Park the running task until the answer is there."""
        if not self.done:
            self._task = task = self._kernel.current
            task.awaits = self
            task.fiber.park()
            task.awaits = None
        return self._value

    def what(self) -> str:
        """Return a description of what is awaited."""
        return self._words(*self._about)
