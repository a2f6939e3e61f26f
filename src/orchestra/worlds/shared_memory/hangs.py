# SPDX-License-Identifier: Apache-2.0
"""Detection of processes on this machine that hang, whether or not another process waits for them.

    stopped     in state T (SIGSTOP, Ctrl-Z): after `stopped` seconds
    silent      no step, no processor time, and not waiting for others: after max(`silent`, `steps` × its longest step)
    asked       asked to stop and still busy with the same step: after max(`patience`, `steps` × its longest step)
    deadlocked  all nodes wait for each other and none makes a step: after the longest of their limits

Only time in which the watcher itself ran counts: not time in which it was stopped too, or the machine was suspended.
A watcher checks often, or computes from one check to the next.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from orchestra.errors import WorkerLost
from orchestra.worlds.shared_memory.layout import NOT_WAITING, WAITING

_TICK = 1 / os.sysconf("SC_CLK_TCK")  # seconds
_IDLE = 0.01  # share of processor time below which a process counts as idle


@dataclass(frozen=True)
class Limits:
    """The limits, in seconds except for `steps`."""

    patience: float
    silent: float
    stopped: float = 2.0
    steps: float = 10.0  # times the longest step so far
    look: float = 0.5  # between two checks

    @classmethod
    def of(cls, patience: float) -> Limits:
        """Return the limits for a patience; that for silence is a tenth of it, but at least min(30 s, patience).

        >>> [Limits.of(patience).silent for patience in (5.0, 300.0, 3000.0)]
        [5.0, 30.0, 300.0]
        """
        silent = min(patience, max(30.0, patience / 10))
        return cls(patience, silent, look=min(0.5, silent / 5))


@dataclass(frozen=True)
class Seen:
    """The state of a node as seen from outside."""

    steps: tuple[float, ...]  # changes when it makes a step
    waits: int  # NOT_WAITING, WAITING or SLEEPING
    longest: float = 0.0  # seconds of a step, where that is known


@dataclass
class _WatchedProcess:
    """The record of one process."""

    state: str = ""
    cpu: float = 0.0  # seconds, when it was last seen active
    offspring: float = 0.0  # likewise of its descendants, known once half the limit has passed
    steps: tuple[float, ...] = ()
    stopped: float = 0.0  # seconds in state T
    silent: float = 0.0  # seconds without a step, processor time or a wait
    same: float = 0.0  # seconds in the same step, without waits
    longest: float = 0.0  # seconds of a step


@dataclass
class HangWatch:
    """The watch over all processes of a run."""

    limits: Limits
    name: Callable[[int], str]
    clock: Callable[[], float] = time.monotonic
    computed: Callable[[], float] = time.process_time  # seconds, by the watcher
    waiters: Collection[int] | None = None  # unless one of these nodes waits from one look to the next, none hangs
    _last: float | None = None
    _computed: float = 0.0  # until the last look
    _waited: dict[int, tuple[float, ...]] = field(default_factory=dict)  # steps of waiters that waited at the last look
    _nodes: dict[int, _WatchedProcess] = field(default_factory=dict)
    _stuck: float = 0.0  # seconds in which all nodes waited
    _steps: tuple[tuple[float, ...], ...] = ()  # of all nodes, when they were last seen

    @property
    def due(self) -> bool:
        """Whether the next check is due."""
        return self._last is None or self.clock() - self._last >= self.limits.look

    def look(
        self,
        pids: Mapping[int, int],
        seen: Mapping[int, Seen],
        *,
        judged: Collection[int] | None = None,
        asked: bool = False,
    ) -> bool:
        """Raise if a process hangs; return whether all wait for each other. `seen` is empty before the run begins.

        Given `judged`, any other process hangs only if it is stopped.
        """
        if not self.due:
            return False
        passed = self._passed()
        if self.waiters is not None and not self._some_wait(self.waiters, seen):
            return False
        for node, pid in pids.items():
            watched = self._nodes.setdefault(node, _WatchedProcess())
            self._look_at(node, pid, watched, passed)
            if node in seen and (judged is None or node in judged):
                self._judge(node, pid, watched, seen[node], passed, asked=asked)
        return self._deadlocked(pids, seen, passed)

    def _passed(self) -> float:
        """Return the seconds since the last look in which this process ran."""
        now, computed = self.clock(), self.computed()
        ran = max(2 * self.limits.look, computed - self._computed)
        passed = 0.0 if self._last is None else min(now - self._last, ran)
        self._last, self._computed = now, computed
        return passed

    def _some_wait(self, waiters: Collection[int], seen: Mapping[int, Seen]) -> bool:
        """Return whether one of them has waited without a step since the last check."""
        now = {node: seen[node].steps for node in waiters if node in seen and seen[node].waits == WAITING}
        before, self._waited = self._waited, now
        return any(before.get(node) == steps for node, steps in now.items())

    def _look_at(self, node: int, pid: int, watched: _WatchedProcess, passed: float) -> None:
        before, (watched.state, cpu) = watched.state, _stat(pid)
        watched.stopped = watched.stopped + passed if watched.state == before == "T" else 0.0
        if watched.stopped >= self.limits.stopped:
            cause = f"process {pid} has been stopped (state T) for {watched.stopped:.0f} s"
            advice = "A process that is stopped by SIGSTOP or Ctrl-Z goes on after SIGCONT: send it sooner, and resume."
            raise WorkerLost(self.name(node), cause, fate="hangs", advice=advice)
        if cpu - watched.cpu > 2 * _TICK + _IDLE * watched.silent:
            watched.cpu, watched.silent = cpu, 0.0

    def _judge(self, node: int, pid: int, watched: _WatchedProcess, seen: Seen, passed: float, *, asked: bool) -> None:
        watched.longest = max(watched.longest, seen.longest)
        if seen.steps != watched.steps:
            watched.longest = max(watched.longest, watched.same)
            watched.steps, watched.silent, watched.same = seen.steps, 0.0, 0.0
            return
        if seen.waits != NOT_WAITING:
            watched.silent = 0.0
            return
        watched.silent += passed
        watched.same += passed
        limit = self._limit(watched)
        if watched.silent <= limit / 2:
            watched.offspring = 0.0
        elif not watched.offspring:
            watched.offspring = _offspring(pid) + _TICK
        cause = f"process {pid} (state {watched.state}) has made no step"
        if watched.silent >= limit:
            if _offspring(pid) > watched.offspring + _TICK:  # it waits for its own child processes, which are busy
                watched.silent = 0.0
                return
            cause += f" and used no processor time for {watched.silent:.0f} s"
            advice = (
                "`py-spy dump --pid` shows where such a process waits. If a step may take so long without computing, "
                "give the cluster a larger patience=...: a tenth of it is the limit."
            )
            raise WorkerLost(self.name(node), cause, fate="hangs", advice=advice)
        if asked and watched.same >= max(self.limits.patience, self.limits.steps * watched.longest):
            cause += f" for {watched.same:.0f} s, though asked to stop"
            raise WorkerLost(self.name(node), cause, fate="hangs")

    def _limit(self, watched: _WatchedProcess) -> float:
        return max(self.limits.silent, self.limits.steps * watched.longest)

    def _deadlocked(self, pids: Mapping[int, int], seen: Mapping[int, Seen], passed: float) -> bool:
        """Return whether all nodes have waited for longer than their limits without any step."""
        waiting = [seen[node].waits == WAITING for node in pids if node in seen]
        steps = tuple(seen[node].steps for node in seen)
        if not waiting or not all(waiting) or steps != self._steps:
            self._stuck, self._steps = 0.0, steps
        else:
            self._stuck += passed
        return self._stuck >= max((self._limit(self._nodes[node]) for node in pids), default=self.limits.silent)


def _stat(pid: int) -> tuple[str, float]:
    """Return the state of a process, and the processor seconds of all its threads; empty if it has ended."""
    try:
        # The name in parentheses may contain anything.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return "", 0.0
    return fields[0].decode(), (int(fields[11]) + int(fields[12])) * _TICK


def _offspring(pid: int) -> float:
    """Return the processor seconds of all descendants, such as a DataLoader's workers."""
    total = 0.0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                total += _stat(child)[1] + _offspring(child)
    except OSError:  # one has just ended
        pass
    return total
