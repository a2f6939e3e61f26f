# SPDX-License-Identifier: Apache-2.0
"""Bulk synchronous: a step is over when every worker's gradient is in.

Valiant. "A bridging model for parallel computation", CACM 1990. "Sequential" in Li et al., OSDI 2014.
https://www.usenix.org/conference/osdi14/technical-sessions/presentation/li_mu

    server: repeat
        await one g[R] of every worker
        ḡ ← Σ bᵢ gᵢ / Σ bᵢ in rank order;  x ← x − γ d(ḡ)
        answer every worker with x

The same path as all-reduce, bit for bit.

Bytes per worker and step: S sent, S received.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from orchestra.core.comm import Comm
from orchestra.core.node import Node
from orchestra.core.ops import Handle, Message
from orchestra.core.strategy import Updates
from orchestra.strategies.parameter_server.consistency.base import Consistency, Correction, ServerState, exchange


def rounds(comm: Comm) -> Iterator[list[Message]]:
    """Yield one message from each worker that has not left, in rank order, until all have left."""
    while pushes := [m for worker in comm.workers.members if (m := comm.recv(worker, departures=True)) is not None]:
        yield pushes


@dataclass(frozen=True, kw_only=True)
class BSP(Consistency):
    """Bulk synchronous: a step is over when every worker's gradient is in."""

    updates = Updates(clip="mean")

    def work(self, node: Node, s: ServerState) -> None:
        """Push the gradient, pull the parameters."""
        exchange(node, s)

    def serve(self, node: Node, s: ServerState, correction: Correction) -> None:
        """Average every round of pushes, none of which is stale."""
        answers: list[Handle[None]] = []
        for pushes in rounds(node.comm):
            for answer in answers:
                answer.wait()  # returns at once: a worker that pushes again has read the last answer
            if samples := node.average(pushes):
                node.update(node.g)
                node.samples += int(samples)
            s.versions[0] += 1
            answers = [node.comm.start_send(push.source, node.x, version=s.versions[0]) for push in pushes]
