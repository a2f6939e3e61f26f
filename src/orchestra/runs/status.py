# SPDX-License-Identifier: Apache-2.0
"""A run as it looks from outside while it goes on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class NodeStatus(NamedTuple):
    """What one node last told about itself; all but the loss are totals."""

    step: float
    samples: float
    loss: float
    compute: float  # seconds
    communicate: float  # seconds, waiting excluded
    wait: float  # seconds
    sent: float  # bytes
    received: float  # bytes
    t: float  # seconds
    far: float  # steps as budgets count them; infinite if others do the rest


@dataclass(frozen=True)
class RunStatus:
    """One moment of a run: what `train(progress=...)` is called with."""

    run: Path
    strategy: str
    workers: int
    servers: int
    last_step: int | None  # of each worker, where the budget says
    begun: bool  # whether all nodes are ready and training has begun
    t: float  # seconds of training
    nodes: tuple[NodeStatus, ...]  # workers, then servers
    real: float | None = None  # real seconds so far, where those of training are virtual

    @property
    def step(self) -> int:
        """Step of the slowest worker."""
        return int(min(row.far for row in self.nodes[: self.workers]))

    @property
    def samples(self) -> int:
        """Samples that all workers together have used."""
        return int(sum(row.samples for row in self.nodes[: self.workers]))

    @property
    def loss(self) -> float | None:
        """Mean over the workers of their last mini-batch's loss."""
        losses = [row.loss for row in self.nodes[: self.workers] if row.step and math.isfinite(row.loss)]
        return sum(losses) / len(losses) if losses else None


def name_of(node: int, workers: int) -> str:
    """How people are told of a node.

    >>> name_of(5, workers=4)
    'server 1'
    """
    return f"worker {node}" if node < workers else f"server {node - workers}"
