# SPDX-License-Identifier: Apache-2.0
"""The state of a run while it goes on, as seen by tools and `train(progress=...)`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class NodeStatus(NamedTuple):
    """The latest figures that a node reported; all but the loss are totals."""

    step: float
    samples: float
    loss: float
    compute: float  # seconds
    communicate: float  # seconds, waiting excluded
    wait: float  # seconds
    sent: float  # bytes
    received: float  # bytes
    t: float  # seconds
    far: float  # steps as budgets count them; infinite if the other workers do the remaining ones


@dataclass(frozen=True)
class RunStatus:
    """One moment of a run: the argument of `train(progress=...)`."""

    run: Path
    strategy: str
    workers: int
    servers: int
    last_step: int | None  # of each worker, if the budget fixes it
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
        """Mean over the workers of the loss of their latest mini-batch."""
        losses = [row.loss for row in self.nodes[: self.workers] if row.step and math.isfinite(row.loss)]
        return sum(losses) / len(losses) if losses else None


def name_of(node: int, workers: int) -> str:
    """Return the name of a node in messages.

    >>> name_of(5, workers=4)
    'server 1'
    """
    return f"worker {node}" if node < workers else f"server {node - workers}"
