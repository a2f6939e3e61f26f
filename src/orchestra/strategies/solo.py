# SPDX-License-Identifier: Apache-2.0
"""Solo: a worker on its own. The baseline, and the inner loop of strategies that meet only now and then.

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
        """Refuse to let several workers train apart without ever meeting."""
        if workers != 1:
            yield Problem("cluster.workers", workers, "Solo is one process: use workers=1, or a strategy that averages")

    def init(self, node: Node) -> None:
        """Nothing to remember."""

    def step(self, node: Node, s: None) -> None:
        """One step of the inner optimizer."""
        node.local_step()


def traffic(strategy: Solo, run: RunSize) -> ExpectedTraffic:
    """Return nothing."""
    return ExpectedTraffic(workers=[0] * run.workers)
