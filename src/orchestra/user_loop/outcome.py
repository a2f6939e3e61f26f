# SPDX-License-Identifier: Apache-2.0
"""What one worker knows of a loop that has ended: the command that ran the script prints it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from orchestra.engine import expression
from orchestra.engine.node_loop import NodeRuntime


@dataclass(frozen=True)
class LoopOutcome:
    """The figures of one worker."""

    folder: Path | None  # of the run, with all figures
    strategy: str
    workers: int
    servers: int
    parameters: int
    steps: int
    samples: int
    seconds: float
    loss: float | None  # of the last step
    scores: dict[str, float]  # the last ones given
    compute: float  # seconds
    communicate: float
    wait: float
    sent: int  # bytes
    received: int

    @classmethod
    def of(cls, runtime: NodeRuntime, seconds: float, scores: dict[str, float], folder: Path | None) -> Self:
        """Return the figures of a worker that has ended."""
        node, meter, spec = runtime.node, runtime.meter, runtime.spec
        loss = node.loss if math.isfinite(node.loss) else None
        return cls(
            folder, expression.show(spec.strategy), spec.workers, spec.servers, node.x.numel(), node.steps,
            node.samples, seconds, loss, scores, meter.compute, meter.communicate, meter.wait, meter.traffic.sent,
            meter.traffic.received,
        )  # fmt: skip
