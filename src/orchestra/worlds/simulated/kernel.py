# SPDX-License-Identifier: Apache-2.0
"""Virtual time: a heap of events, and tasks that run until they wait.

    repeat
        take the earliest event; now ← its time; carry it out
        at equal times: first come, first served, or in an order drawn from a seed
    until there is none. A task that still waits then waits for ever: a deadlock, which says who waits for what

Nothing here looks at a clock, so the same inputs give the same events in the same order.
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

_MANY = 1000  # tasks whose circles are cleared away together: looking for them takes a tenth of a second and more
_PACKAGE = Path(__file__).resolve().parents[2]
# What carries an algorithm: its lines tell nobody anything.
_PLUMBING = (*(str(_PACKAGE / part) for part in ("core", "engine", "worlds")), threading.__file__)


@dataclass(slots=True, eq=False)
class Task:
    """A node's activity."""

    name: str
    fiber: fibers.Fiber = field(init=False)
    awaits: Promise[Any] | None = None  # while it is parked


_since = 0  # tasks begun since circles were last cleared away


def _clear_away(tasks: int) -> None:
    """Now and then, what earlier runs left: a worker and its fiber refer to each other, and what was frozen is old."""
    global _since
    if _since >= _MANY:
        gc.collect()
        _since = 0
    _since += tasks


class Kernel:
    """The clock and whoever lives by it."""

    def __init__(self, *, fiber: fibers.Kind = "auto", ties: int | None = None) -> None:
        self.now = 0.0
        self._kind = fiber
        self._heap: list[tuple[float, Any, Callable[..., object], tuple[Any, ...]]] = []  # time, order, act, arguments
        self._ready: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._count = 0
        self._dice = None if ties is None else random.Random(ties)
        self.shuffles = ties is not None  # events at equal times
        self._tasks: list[Task] = []
        self._current: Task | None = None
        self._stirred = 0.0  # when a task last ran

    # Events.

    def at(self, t: float, act: Callable[..., object], *args: Any) -> None:
        """Do something at a time that has not passed."""
        dice = self._dice
        if t == self.now and dice is None:
            # Whatever else is due now was asked for before, so it need not be put in order.
            self._ready.append((act, args))
            return
        if not t >= self.now:
            raise ValueError(f"something is to happen at {t} s, but it is {self.now} s already")
        self._count = count = self._count + 1
        heappush(self._heap, (t, count if dice is None else (dice.random(), count), act, args))

    def after(self, seconds: float, act: Callable[..., object], *args: Any) -> None:
        """Do something in a while."""
        self.at(self.now + seconds, act, *args)

    # Tasks.

    def spawn(self, name: str, body: Callable[[], None]) -> Task:
        """Begin an activity, now."""
        task = Task(name)
        task.fiber = fibers.make(self._kind, body)
        self._tasks.append(task)
        self.at(self.now, self._run, task)
        return task

    @property
    def current(self) -> Task:
        """Who is running."""
        assert self._current is not None, "only tasks may wait"
        return self._current

    def wake(self, task: Task) -> None:
        """Let a parked task go on, now."""
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
            if not self._tasks:  # nobody is left to whom anything could happen
                self._heap.clear()
                self._ready.clear()

    # The run.

    def run(self, heartbeat: Callable[[], None] = lambda: None) -> None:
        """Go on until nothing is left to happen, or nobody to whom; `heartbeat` is called now and then."""
        heap, ready = self._heap, self._ready
        # Hardly any garbage here is circular, and looking for it among so many objects takes a quarter of the time.
        before = gc.get_threshold()
        _clear_away(len(self._tasks))
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
                raise Deadlock(self._who_waits())
        finally:
            self.close()
            fibers.restore(modes)
            gc.set_threshold(*before)
            gc.unfreeze()

    def close(self) -> None:
        """Unwind whoever is left."""
        for task in self._tasks:
            task.fiber.kill()
        self._tasks.clear()
        self._heap.clear()
        self._ready.clear()

    def _who_waits(self) -> str:
        lines = [
            f"  {task.name} waits for {task.awaits.what() if task.awaits else 'nothing'}{_place(task.fiber.frame())}"
            for task in self._tasks[:20]
        ]
        more = len(self._tasks) - len(lines)
        return "\n".join(
            [f"at {self._stirred:.6g} s nobody can go on:", *lines, *([f"  and {more} more"] if more > 0 else [])]
        )


def _place(frame: FrameType | None) -> str:
    """The innermost line that belongs to an algorithm, not to what carries it."""
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_PLUMBING):
            return f" ({Path(path).name}:{frame.f_lineno}, {frame.f_code.co_name})"
        frame = frame.f_back
    return ""


class Promise(Generic[T]):
    """A handle whose answer comes at a virtual time."""

    __slots__ = ("_about", "_kernel", "_task", "_value", "_words", "done")

    def __init__(self, kernel: Kernel, words: Callable[..., str], *about: Any) -> None:
        """What is awaited is put into words only if nothing else can happen: there are millions of promises."""
        self._kernel = kernel
        self._words, self._about = words, about
        self._task: Task | None = None
        self._value: T
        self.done = False

    def keep(self, value: T) -> None:
        """The answer is there."""
        self._value = value
        self.done = True
        if self._task is not None:
            self._kernel.wake(self._task)

    def wait(self) -> T:
        """Set the running task aside until the answer is there."""
        if not self.done:
            self._task = task = self._kernel.current
            task.awaits = self
            task.fiber.park()
            task.awaits = None
        return self._value

    def what(self) -> str:
        """What is awaited."""
        return self._words(*self._about)
