# SPDX-License-Identifier: Apache-2.0
"""The encoding of pushes: pieces, each stamped with the range that it covers and its worker's clock there.

    worker                                              server of range R
    clock ← clock + 1                                   a piece (S, t) of worker i, S ⊆ R
    cut R into k pieces S                                   vc_i(S) ≥ t already: a duplicate; drop it
    send g[S] with (S, clock), for every S                  vc_i(S) ← t
                                                            vc_i(R) = t: the push is complete; deliver it

Consistencies see whole pushes, each once. A push that is sent again after a failure changes nothing. With a filter only
the chosen entries of a push, or of an answer, are sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from orchestra.core.gradient_mask import ABSENT
from orchestra.core.node import Node
from orchestra.core.ops import Message, RangeStamp, Send
from orchestra.core.vectors import split
from orchestra.strategies.parameter_server.consistency.base import ServerState
from orchestra.strategies.parameter_server.filters import sparse
from orchestra.strategies.parameter_server.filters.base import Filter
from orchestra.strategies.parameter_server.range_clock import RangeClock


@dataclass
class PushCodec:
    """The codec of one node."""

    node: Node
    s: ServerState
    pieces: int
    filter: Filter
    cache_keys: bool
    begun: dict[int, Tensor] = field(default_factory=dict)  # incomplete pushes, by worker

    def pack(self, message: Send) -> list[Send]:
        """Return a worker's push in pieces, or a server's answer, both filtered."""
        if message.tag:
            return [message]
        if self.node.serves:
            sieved = self.filter.answer(self.node, self.s, message.to)
            return [message if sieved is None else replace(message, x=self._bytes(message.to, 0, *sieved))]
        server = self.node.comm.servers.index(message.to)
        sieved = self.filter.push(self.node, self.s, server, message.x)
        self.s.pushed[server] += 1
        clock, first = self.s.pushed[server], self.node.placement[server].start
        length = message.x.numel()
        if self.pieces == 1 and sieved is None:
            message.stamp = RangeStamp(clock, first, first + length)
            return [message]
        cuts = [part for part in split(length, self.pieces) if part.start < part.stop] or [slice(0, 0)]
        sent = []
        for cut in cuts:
            start, stop = first + cut.start, first + cut.stop
            x = message.x[cut] if sieved is None else self._bytes(message.to, start, *(part[cut] for part in sieved))
            sent.append(replace(message, x=x, stamp=RangeStamp(clock, start, stop)))
        return sent

    def _bytes(self, to: int, start: int, v: Tensor, keep: Tensor) -> Tensor:
        """Return the entries that passed, with their keys unless the receiver has them."""
        known = self.s.keys_sent.get((to, start)) if self.cache_keys else None
        packed, keys = sparse.pack(v, keep, known)
        if self.cache_keys and keys is not None:
            self.s.keys_sent[to, start] = keys
        self.node.log("passed", v.numel() if keys is None else keys.numel())
        return packed

    def _vector(self, message: Message, start: int, base: Tensor) -> Tensor:
        """Decode a message into `base`, which gives the entries that were not sent."""
        keys = sparse.unpack(message.x, base, self.s.keys_received.get((message.source, start)))
        if self.cache_keys and keys is not None:
            self.s.keys_received[message.source, start] = keys
        return base

    def unpack(self, message: Message) -> Message | None:
        """Return an answer, or a push that is now complete; None if pieces are missing, or for a duplicate."""
        if message.tag:
            return message
        node, (t, start, stop) = self.node, message.stamp
        packed = message.x.dtype == torch.uint8
        if not node.serves:
            if not packed:
                return message
            x = node.parts(node.x)[node.comm.servers.index(message.source)]
            return replace(message, x=self._vector(message, 0, x.clone()))
        clock = RangeClock(self.s.clocks[message.source])
        if clock.least(start, stop) >= t:
            node.log("duplicate", 1)
            return None
        clock.set(start, stop, t)
        if packed:
            message.x = self._vector(message, start, node.x.new_full((stop - start,), ABSENT))
        if stop - start == node.x.numel():
            return message
        mine = node.placement[node.comm.servers.index(node.rank)]
        if message.source not in self.begun:
            self.begun[message.source] = torch.empty_like(node.x)
        push = self.begun[message.source]
        push[start - mine.start : stop - mine.start] = message.x
        return replace(message, x=push) if clock.least(mine.start, mine.stop) >= t else None
