# SPDX-License-Identifier: Apache-2.0
"""Detection of hanging processes among those of one machine, which show each other their activity.

a node      writes its activity, its step and its longest time between two steps or waits into its rings
another     reads these and the kernel's figures for the process, while it waits or between two steps
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
    """The nodes of this machine, as one of them sees the others and is seen by them."""

    def __init__(self, rank: int, peers: Mapping[int, Connection], patience: float, name: Callable[[int], str]) -> None:
        self.doing = NOT_WAITING  # what this node shows
        self._rank, self._peers = rank, peers
        self._watch = HangWatch(Limits.of(patience), name)
        self._begun = False  # before that, nodes may be busy for long, and only a stopped process is known to hang
        self._step = 0
        self._working_since, self._longest = math.inf, 0.0  # when this node last waited; seconds of its longest work

    def begin(self) -> None:
        """Count work from now on as steps: how long they take says when a node hangs."""
        self._begun, self._working_since = True, time.perf_counter()

    def judge_only_while_waiting(self, waiters: Sequence[int]) -> None:
        """Let no process count as hanging unless one of these nodes waits."""
        self._watch.waiters = waiters

    def show(self, doing: int) -> None:
        """Show what this node does."""
        if doing == self.doing:
            return
        now = time.perf_counter()
        if self.doing == NOT_WAITING:
            self._longest = max(self._longest, now - self._working_since)
        elif doing == NOT_WAITING and self._begun:
            self._working_since = now
        self.doing = doing
        self._write()

    def stepped(self, step: int) -> None:
        """Show which step this node is in."""
        now = time.perf_counter()
        self._longest = max(self._longest, now - self._working_since)
        self._working_since, self._step = now, step
        self._write()

    def _write(self) -> None:
        for peer in self._peers.values():
            if peer.ring_out is not None:
                peer.ring_out.show(self.doing, self._longest, self._step)

    def look(self, needed: Sequence[Connection], since: float) -> None:
        """Raise if one of these nodes hangs, or if any process is stopped. `since`: when this node's wait began."""
        if not self._watch.due:
            return
        near = {peer.rank: peer.pid for peer in self._peers.values() if peer.pid is not None and not peer.closing}
        seen = {
            rank: Seen((peer.received, shown.step), shown.doing, shown.longest)
            for rank in near
            if self._begun and (peer := self._peers[rank]).ring_in is not None and not peer.left
            for shown in [activity_of(peer.ring_in)]
        }
        seen[self._rank] = Seen((since,), WAITING)  # a new wait counts as a step
        self._watch.look(near, seen, judged={peer.rank for peer in needed})


def is_at_work(peer: Connection) -> bool:
    """Whether a process of this machine computes: it is watched for hangs, so a wait for it has no deadline."""
    there = peer.pid is not None and peer.lost is None and not (peer.closing or peer.left)
    return there and peer.ring_in is not None and activity_of(peer.ring_in).doing == NOT_WAITING
