# SPDX-License-Identifier: Apache-2.0
"""`Local`: a run in processes of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from orchestra.engine import compute_times
from orchestra.engine.cluster import Cluster, Device, Ending, Order
from orchestra.engine.compute_times import Delay
from orchestra.engine.environment import half_set, launched
from orchestra.errors import Problem


@dataclass(frozen=True, kw_only=True)
class Local(Cluster):
    """Processes on this machine, exchanging tensors in shared memory.

    `workers` may exceed the number of cores; each process then has one thread. Servers, if the strategy has any, are
    further processes beside the workers.
    """

    workers: int = 2
    device: Device = "cpu"
    threads: int | None = None  # of each process; None shares the cores out evenly
    patience: float = 300.0  # seconds for all nodes to be ready; a tenth of it without a sign of life is a hang
    delay: Delay | str | None = None  # makes workers as slow as this, by sleeping: see orchestra.engine.compute_times

    def get_delay(self) -> Delay | None:
        """The delays, read if they were given as text."""
        return compute_times.parse(self.delay) if isinstance(self.delay, str) else self.delay

    def about(self) -> dict[str, Any]:
        """What to remember of it."""
        return {"kind": "local", "delay": None if self.delay is None else str(self.get_delay())}

    def problems(self) -> Iterator[Problem]:
        """What cannot be run on this machine."""
        yield from super().problems()
        if launched() and os.environ["WORLD_SIZE"] != "1":
            message = (
                "every process that torchrun started would begin a run of its own: leave it out, or say Attached()"
            )
            yield Problem("cluster", "Local(...)", message)
        yield from half_set()
        if isinstance(self.workers, int) and self.workers > 512:
            yield Problem("cluster.workers", self.workers, "is more than one machine will bear: at most 512")
        if self.threads is not None and not (isinstance(self.threads, int) and self.threads >= 1):
            yield Problem("cluster.threads", self.threads, "must be at least 1, or None to share the cores out")
        if self.delay is not None:
            yield from compute_times.look(self.delay)
        if not isinstance(self.patience, int | float) or not self.patience > 0:
            yield Problem("cluster.patience", self.patience, "must be a number of seconds above zero")

    def carry_out(self, order: Order) -> Ending:
        """Run the job to its end. Raises what ended it early; leaves no process and no memory behind."""
        from orchestra.worlds.shared_memory.coordinator import (
            LocalCoordinator,  # processes are not needed to describe a cluster
        )

        return LocalCoordinator(order, patience=self.patience).run()

    def one_gpu_each(self) -> bool:
        """Where there are enough."""
        return self.resolve_device() == "cuda" and torch.cuda.device_count() >= self.workers > 1

    def threads_for(self, nodes: int) -> int:
        """As given, or the cores shared out."""
        return self.threads or super().threads_for(nodes)
