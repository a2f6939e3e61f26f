# SPDX-License-Identifier: Apache-2.0
"""Stale synchronous: no worker is more than s steps ahead of the slowest.

Ho, Cipar, Cui, et al. "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NeurIPS 2013.
https://papers.nips.cc/paper/4894

    cᵢ      the clock of worker i: how many gradients it has pushed
    server: a push of worker i
        x ← x − γ d(gᵢ / N);  cᵢ ← cᵢ + 1
    server: worker i asks for x
        answer as soon as cᵢ − min_q c_q ≤ s

The x that a worker reads at clock c then holds all gradients of clocks up to c − s − 1, its own, and maybe newer ones.
Every push counts as an N-th of its clock's mean: with plain SGD and equal mini-batches s = 0 is BSP up to rounding, and
s = ∞ is ASP with a learning rate of γ/N. The bound is on clocks, which are steps of a worker. The age of a gradient,
which reports count in updates, is another figure: it can reach about (N − 1)(2 s + 1).

Bytes per worker and step: S sent, S received.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from orchestra.core.ops import Message
from orchestra.core.strategy import Updates, option
from orchestra.strategies.parameter_server.consistency.base import OnRequest, Push, Service


@dataclass(frozen=True, kw_only=True)
class SSP(OnRequest):
    """Stale synchronous: no worker is more than s steps ahead of the slowest."""

    staleness: int = option(3, "s: steps that a worker may be ahead of the slowest", least=0)

    @cached_property
    def updates(self) -> Updates:
        """Stale gradients if workers may be ahead; each is clipped before it is divided by N."""
        return Updates(synchronous=False, stale=self.staleness > 0)

    def take(self, at: Service, push: Message) -> None:
        """Apply an N-th of the gradient at once."""
        whole = Push(push.source, push.x, push.version, push.weight, push.stamp.clock)
        at.apply([whole], by=len(at.node.comm.workers))

    def may_read(self, at: Service, worker: int, version: int) -> bool:
        """Return whether the worker's clock is close enough to the slowest."""
        gap = at.clock(worker) - min(map(at.clock, at.active | {worker}))
        if gap <= self.staleness:
            at.node.log("gap", gap)
        return gap <= self.staleness
