# SPDX-License-Identifier: Apache-2.0
"""The processes of one machine: what each shows the others of its work, and the watch over those that hang.

a node    shows in its rings what it does, its step, and its longest work between two steps or waits
another   looks at that now and then, and at what the kernel says of the process, while it waits or between two steps
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from orchestra.worlds.shared_memory.hangs import HangWatch, Limits, Seen
from orchestra.worlds.shared_memory.layout import NOT_WAITING, WAITING
from orchestra.worlds.sockets.connection import Connection
from orchestra.worlds.sockets.shm_ring import activity_of


class Neighbours:
    """The nodes of this machine, as one of them sees and is seen by the others."""

    def __init__(self, rank: int, peers: Mapping[int, Connection], patience: float, name: Callable[[int], str]) -> None:
        self.doing = NOT_WAITING  # what this node shows
        self._rank, self._peers = rank, peers
        self._watch = HangWatch(Limits.of(patience), name)
        self._begun = False  # before, other nodes may be busy for long, and only a stopped one is known to hang
        self._step = 0
        self._worked, self._longest = math.inf, 0.0  # since when this node does not wait; seconds of its longest work

    def begin(self) -> None:
        """Count work from now on as steps: how long they take says when a node hangs."""
        self._begun, self._worked = True, time.perf_counter()

    def judge_only_while_waiting(self, waiters: Sequence[int]) -> None:
        """Let no process hang, whatever it does, unless one of these nodes waits."""
        self._watch.waiters = waiters

    def show(self, what: int) -> None:
        """Show what this node does."""
        if what == self.doing:
            return
        now = time.perf_counter()
        if self.doing == NOT_WAITING:
            self._longest = max(self._longest, now - self._worked)
        elif what == NOT_WAITING and self._begun:
            self._worked = now
        self.doing = what
        self._tell()

    def stepped(self, step: int) -> None:
        """Show which step this node is in."""
        now = time.perf_counter()
        self._longest, self._worked, self._step = max(self._longest, now - self._worked), now, step
        self._tell()

    def _tell(self) -> None:
        for peer in self._peers.values():
            if peer.outlet is not None:
                peer.outlet.show(self.doing, self._longest, self._step)

    def look(self, needed: Sequence[Connection], since: float) -> None:
        """Raise if one of these nodes hangs, or if any process is stopped. `since`: when this node's wait began."""
        if not self._watch.due:
            return
        near = {peer.rank: peer.pid for peer in self._peers.values() if peer.pid is not None and not peer.gone}
        seen = {
            rank: Seen((peer.taken, shown.step), shown.doing, shown.longest)
            for rank in near
            if self._begun and (peer := self._peers[rank]).inlet is not None and not peer.left
            for shown in [activity_of(peer.inlet)]
        }
        seen[self._rank] = Seen((since,), WAITING)  # another wait is as good as a step
        self._watch.look(near, seen, judged={peer.rank for peer in needed})


def is_at_work(peer: Connection) -> bool:
    """Whether a process of this machine does not wait for others: it is watched, and patience is not needed."""
    there = peer.pid is not None and peer.lost is None and not (peer.gone or peer.left)
    return there and peer.inlet is not None and activity_of(peer.inlet).doing == NOT_WAITING
