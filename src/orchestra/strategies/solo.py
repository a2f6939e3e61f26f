# SPDX-License-Identifier: Apache-2.0
"""Solo: a single worker. The baseline, and the inner loop of strategies that communicate only periodically.

    repeat   x ← x − γ d        d from the inner optimizer at the next mini-batch

Bytes per worker and step: 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from orchestra.core.node import Node
from orchestra.core.strategy import Strategy
from orchestra.core.traffic import ExpectedTraffic, RunSize
from orchestra.errors import Problem


@dataclass(frozen=True, kw_only=True)
class Solo(Strategy[None]):
    """One process, no communication: plain PyTorch training."""

    def problems(self, workers: int) -> Iterator[Problem]:
        """Refuse several workers, which would train separate models."""
        if workers != 1:
            yield Problem("cluster.workers", workers, "Solo is one process: use workers=1, or a strategy that averages")

    def init(self, node: Node) -> None:
        """Return no state."""

    def step(self, node: Node, s: None) -> None:
        """Do one step of the inner optimizer."""
        node.local_step()


def traffic(strategy: Solo, run: RunSize) -> ExpectedTraffic:
    """Return zero bytes."""
    return ExpectedTraffic(workers=[0] * run.workers)
