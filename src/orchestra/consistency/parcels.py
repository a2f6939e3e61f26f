# SPDX-License-Identifier: Apache-2.0
"""What pushes are on their way: pieces, each stamped with the range it covers and its worker's clock there.

    worker                                              server of range R
    clock ← clock + 1                                   a piece (S, t) of worker i, S ⊆ R
    cut R into k pieces S                                   vc_i(S) ≥ t already: it was sent twice; drop it
    send g[S] with (S, clock), for every S                  vc_i(S) ← t
                                                            vc_i(R) = t: the push is whole, hand it over

Consistencies see whole pushes, each once. Sent again after a failure, a push changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from orchestra.clocks import RangeClock
from orchestra.consistency.base import ServerState
from orchestra.node import Node
from orchestra.ops import Message, Send, Stamp
from orchestra.vectors import split


@dataclass
class Parcels:
    """Packs and unpacks what one node sends and receives."""

    node: Node
    s: ServerState
    pieces: int
    begun: dict[int, Tensor] = field(default_factory=dict)  # pushes, by worker, of which there may be pieces to come

    def pack(self, message: Send) -> list[Send]:
        """A worker's push, in pieces; anything else as it is."""
        if message.tag or self.node.serves:
            return [message]
        server = self.node.comm.servers.index(message.to)
        self.s.pushed[server] += 1
        clock, first = self.s.pushed[server], self.node.placement[server].start
        length = message.x.numel()
        if self.pieces == 1:
            message.stamp = Stamp(clock, first, first + length)
            return [message]
        cuts = [part for part in split(length, self.pieces) if part.start < part.stop] or [slice(0, 0)]
        return [
            replace(message, x=message.x[cut], stamp=Stamp(clock, first + cut.start, first + cut.stop)) for cut in cuts
        ]

    def unpack(self, message: Message) -> Message | None:
        """A push that is whole now; None if pieces are missing, or if it was there before."""
        if message.tag or not self.node.serves:
            return message
        node, (t, start, stop) = self.node, message.stamp
        clock = RangeClock(self.s.clocks[message.source])
        if clock.least(start, stop) >= t:
            node.log("duplicate", 1)
            return None
        clock.set(start, stop, t)
        if stop - start == node.x.numel():
            return message
        mine = node.placement[node.comm.servers.index(node.rank)]
        if message.source not in self.begun:
            self.begun[message.source] = torch.empty_like(node.x)
        push = self.begun[message.source]
        push[start - mine.start : stop - mine.start] = message.x
        return replace(message, x=push) if clock.least(mine.start, mine.stop) >= t else None
