# SPDX-License-Identifier: Apache-2.0
"""Significantly modified: an entry is sent when it has changed by more than a threshold since it was last sent.

Li, Andersen, Park, Smola, et al. "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014, §3.6.

    r       the part of a worker's gradients that is not sent yet            y_i     x as worker i has it
    push:   r ← r + g;   send r_k and set r_k ← 0 where |r_k| > Δ
    answer: send x_k and set y_ik ← x_k where |x_k − y_ik| > Δ

Nothing is lost, only delayed: every |r_k| and every |x_k − y_ik| is at most Δ. Δ = 0 sends all that changed at all. The
same Δ holds for gradients and parameters, of which the latter move γ times as much in a step of plain SGD.

Cost: a vector of the model's size on every worker, one of its range on a server for every worker.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from orchestra.core.gradient_mask import ABSENT
from orchestra.core.node import Node
from orchestra.core.strategy import option
from orchestra.strategies.parameter_server.consistency.base import ServerState
from orchestra.strategies.parameter_server.filters.base import Filter, Sieved


@dataclass(frozen=True, kw_only=True)
class Significant(Filter):
    """An entry is sent when it has changed by more than a threshold."""

    threshold: float = option(0.0, "Δ: change of an entry that need not be sent", least=0)

    def init(self, node: Node, s: ServerState) -> None:
        """Begin without a remainder; every worker has the initial x."""
        if node.serves:
            s.seen = [node.x.clone() for _ in node.comm.workers.members]
        else:
            s.rest = [torch.zeros_like(part) for part in node.parts(node.x)]

    def push(self, node: Node, s: ServerState, server: int, g: Tensor) -> Sieved:
        """Pass the accumulated gradient where it exceeds the threshold."""
        r = s.rest[server].add_(g)
        significant = r.abs() > self.threshold
        v = torch.where(significant, r, ABSENT)
        r.masked_fill_(significant, 0)
        return v, significant

    @torch.no_grad()
    def answer(self, node: Node, s: ServerState, worker: int) -> Sieved:
        """Pass x where it differs from the worker's by more than the threshold."""
        x, y = node.x, s.seen[worker]
        significant = (x - y).abs() > self.threshold
        y.copy_(torch.where(significant, x, y))
        return y, significant
