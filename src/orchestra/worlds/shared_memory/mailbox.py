# SPDX-License-Identifier: Apache-2.0
"""Messages between processes of one machine: a header, and the offset of a body that both map.

sender                                              receiver
body: its own vector, if lent, else one of two      sleeps on its bell
      alternating slots, or a small one             reads the body in place
header; posted ← posted + 1; ring the bell          released ← released + 1 when it next receives from the
at most `UNDER_WAY` messages under way              sender or sends to it
"""

from __future__ import annotations

import struct
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from orchestra.core.ops import Departed, Done, Handle, Leave, Message, RangeStamp, Recv, Send, Sleep, Traffic
from orchestra.engine.checkpoint_protocol import IdleListener
from orchestra.worlds.shared_memory.layout import SLEEPING, UNDER_WAY, Arena
from orchestra.worlds.shared_memory.waiting import Waiter

_HEADER = struct.Struct("=HHIQQqddQQQ")  # kind, dtype, tag, place, numel, version, weight, progress, stamp
_BODY, _LEAVE = 1, 2
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
_LEND_FROM = 1 << 16  # bytes; copying less than this costs less than making the sender wait for its vector


class Mailbox:
    """The messages of one node, to and from all others."""

    def __init__(self, arena: Arena, rank: int, waiter: Waiter, traffic: Traffic, near: Collection[int] = ()) -> None:
        self._idle_listener: IdleListener | None = None
        self._arena = arena
        self._words = arena.words
        self._plan = plan = arena.plan
        self._rank = rank
        self._waiter = waiter
        self._traffic = traffic
        self._near = near  # nodes of the same machine, as far as traffic is concerned
        nodes = range(plan.nodes)
        self._sent = [0 for _ in nodes]  # messages posted to each node
        self._taken = [0 for _ in nodes]  # messages received from each node
        self._left = [False for _ in nodes]
        self._rings = 0
        self._turn = 0
        # The indices of a pair's words and headers, cached because every message needs them several times.
        self._bell = [plan.word("bell", node) for node in nodes]
        self._posted_to = [plan.word("posted", rank, node) for node in nodes]
        self._posted_by = [plan.word("posted", node, rank) for node in nodes]
        self._released_to = [plan.word("released", rank, node) for node in nodes]
        self._released_by = [plan.word("released", node, rank) for node in nodes]
        self._headers_to = [[plan.header(rank, node, k) for k in range(UNDER_WAY)] for node in nodes]
        self._headers_by = [[plan.header(node, rank, k) for k in range(UNDER_WAY)] for node in nodes]
        self._slots_free = [[0, 0] for _ in nodes]  # number of released messages at which each of the two slots is free

    def listen_idle(self, listener: IdleListener) -> None:
        """From now on, tell a listener when this node is about to sleep because there is no message."""
        self._idle_listener = listener

    # Sending.

    def send(self, op: Send) -> Handle[None]:
        """Post a message; return at once unless too many messages to the same node are unread."""
        arena, to, x = self._arena, op.to, op.x
        self._release(to)
        number = self._sent[to]
        self._await_header(to)
        nbytes = x.numel() * x.element_size()
        place = arena.offset(x) if op.lend and nbytes >= _LEND_FROM else None
        lent = place is not None
        if place is None:
            arena.require_room(x)
            place = self._place(to, number, nbytes)
            arena.tensor(place, x.numel(), x.dtype).copy_(x.reshape(-1))
        about = (op.tag, place, x.numel(), op.version, op.weight, op.progress)
        self._post(to, _BODY, _DTYPES.index(x.dtype), *about, *op.stamp)
        if to not in self._near:
            self._traffic.count(to, nbytes)
        return _LentBody(self, to, number + 1) if lent else Done(None)

    def leave(self, op: Leave) -> Handle[None]:
        """Tell every member of a group that this node sends nothing more."""
        for to in op.group.members:
            self._release(to)
            self._await_header(to)
            self._post(to, _LEAVE, 0, 0, 0, 0, 0, 0.0, 0.0, 0, 0, 0)
        return Done(None)

    def _await_header(self, to: int) -> None:
        self.await_release(to, self._sent[to] + 1 - UNDER_WAY)

    def _place(self, to: int, number: int, nbytes: int) -> int:
        """Return the offset for a body; for a long one, wait until the one before the last is released."""
        plan = self._plan
        if nbytes <= plan.small:
            return plan.small_slot(self._rank, to, number)
        free = self._slots_free[to]
        parity = free.index(min(free))
        self.await_release(to, free[parity])
        free[parity] = number + 1
        return plan.slot(self._rank, to, parity)

    def _post(self, to: int, *header: float) -> None:
        number = self._sent[to]
        _HEADER.pack_into(self._arena.memory, self._headers_to[to][number % UNDER_WAY], *header)
        self._sent[to] = number + 1
        self._words.set(self._posted_to[to], number + 1)
        self.ring(to)

    def ring(self, node: int) -> None:
        """Wake a node, so that it checks its messages and the control values.

        Every ring has a different value, so a node that read the bell before cannot miss it.
        """
        self._rings += 1
        self._words.announce(self._bell[node], (self._rings * self._plan.nodes + self._rank) % 2**32)

    def await_release(self, to: int, number: int) -> None:
        """Block until `to` has released the first `number` messages of this node."""
        word = self._released_to[to]
        if self._words[word] >= number:
            return
        names = self._waiter.names
        self._waiter.wait(word, lambda: self._words[word] >= number, lambda: f"{names([to])} to take a message")

    # Receiving.

    def recv(self, op: Recv) -> Handle[Message | Departed | None]:
        """Take the next message from one node, or from any of several."""
        sources = op.group.members if op.source is None else (op.source,)
        for source in sources:
            self._release(source)

        def ready() -> bool:
            if self._arrived(sources) is not None or all(self._left[s] for s in sources):
                return True
            if self._idle_listener is not None:
                self._idle_listener.on_idle(at_rest=op.at_rest)
            return False

        def awaited() -> str:
            return "a message from " + self._waiter.names([s for s in sources if not self._left[s]])

        while True:
            self._waiter.wait(self._bell[self._rank], ready, awaited)
            arrived = self._arrived(sources)
            if arrived is None:
                return Done(None)
            message = self._take(arrived)
            if message is not None:
                return Done(message)
            if op.departures:
                return Done(Departed(arrived))

    def sleep(self, op: Sleep) -> bool:
        """Sleep for a while; return False if a message from a node in `cancel_on` ended it."""
        with self._waiter.doing(SLEEPING):
            return self._sleep(op)

    def _sleep(self, op: Sleep) -> bool:
        if op.cancel_on is None:
            time.sleep(op.seconds)
            return True
        until, bell = time.perf_counter() + op.seconds, self._bell[self._rank]
        while True:
            seen = self._words[bell]
            if self._arrived(op.cancel_on.members) is not None:
                return False
            left = until - time.perf_counter()
            if left <= 0:
                return True
            self._words.wait(bell, seen, left)

    def has_mail(self) -> bool:
        """Return whether there is an unread message."""
        return self._arrived(range(self._plan.nodes)) is not None

    def _arrived(self, sources: Sequence[int]) -> int | None:
        """Return a source with an unread message; the one served last is tried last, for fairness."""
        for i in range(len(sources)):
            source = sources[(self._turn + i) % len(sources)]
            if self._words[self._posted_by[source]] != self._taken[source]:
                return source
        return None

    def _take(self, source: int) -> Message | None:
        number = self._taken[source]
        self._taken[source] = number + 1
        self._turn = source + 1
        kind, dtype, tag, place, numel, version, weight, progress, *stamp = _HEADER.unpack_from(
            self._arena.memory, self._headers_by[source][number % UNDER_WAY]
        )
        if kind == _LEAVE:
            self._left[source] = True
            self._release(source)
            return None
        x = self._arena.tensor(place, numel, _DTYPES[dtype])
        if source not in self._near:
            self._traffic.received += x.numel() * x.element_size()
        return Message(source, x, version, weight, tag, RangeStamp(*stamp), progress)

    def _release(self, source: int) -> None:
        """Tell a sender that its messages so far are no longer read."""
        word = self._released_by[source]
        if self._words[word] != self._taken[source]:
            self._words.announce(word, self._taken[source])


@dataclass(slots=True)
class _LentBody:
    """The handle of a message that is read in the sender's own memory."""

    mailbox: Mailbox
    to: int
    number: int

    def wait(self) -> None:
        """Block until the receiver has released the vector."""
        self.mailbox.await_release(self.to, self.number)
