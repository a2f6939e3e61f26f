# SPDX-License-Identifier: Apache-2.0
"""Asynchronous: every gradient is applied when it arrives, independently of the other workers.

Dean et al. "Large Scale Distributed Deep Networks", NeurIPS 2012. "Eventual" in Li et al., OSDI 2014.
https://papers.nips.cc/paper/4687-large-scale-distributed-deep-networks

    server: for each push as it arrives
        x ← x − γ d(g);  answer that worker with x

With one worker it is plain SGD. A push is as stale as there were updates since its worker read x: with N workers of one
speed, N − 1.

Bytes per worker and step: S sent, S received.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestra.core.node import Node
from orchestra.core.strategy import Updates
from orchestra.strategies.parameter_server.consistency.base import Consistency, Correction, Push, ServerState, exchange


@dataclass(frozen=True, kw_only=True)
class ASP(Consistency):
    """Asynchronous: every gradient is applied when it arrives, independently of the other workers."""

    updates = Updates(synchronous=False, stale=True, gradients=1)

    def work(self, node: Node, s: ServerState) -> None:
        """Push the gradient, pull the parameters."""
        exchange(node, s)

    def serve(self, node: Node, s: ServerState, correction: Correction) -> None:
        """Apply every push."""
        for push in node.comm.inbox():
            if push.weight:
                node.update(correction.correct(node, s, Push(push.source, push.x, push.version, push.weight)))
                node.samples += int(push.weight)
            node.log("staleness", s.versions[0] - push.version)
            s.versions[0] += 1
            correction.answered(node, s, push.source)
            node.comm.send(push.source, node.x, version=s.versions[0])
