# SPDX-License-Identifier: Apache-2.0
"""`Local`: a run in processes of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from orchestra.engine import compute_times
from orchestra.engine.cluster import Cluster, Device, Resources, resolve_device, share_of_cores
from orchestra.engine.compute_times import ComputeTime
from orchestra.engine.environment import half_set, launched
from orchestra.errors import Problem


@dataclass(frozen=True, kw_only=True)
class Local(Cluster):
    """Processes on this machine, which exchange tensors in shared memory.

    `workers` may exceed the number of cores; each process then has one thread. Servers, if the strategy has any, are
    further processes beside the workers.
    """

    workers: int = 2
    device: Device = "cpu"
    threads: int | None = None  # of each process; None divides the cores evenly
    patience: float = 300.0  # seconds for all nodes to be ready; a tenth of it without a sign of life is a hang
    # least time of a mini-batch: workers sleep for the rest of it; see orchestra.engine.compute_times
    compute_time: ComputeTime | str | None = None

    def about(self) -> dict[str, Any]:
        """Return what a run folder records of the cluster."""
        time = None if self.compute_time is None else str(compute_times.read(self.compute_time))
        return {"kind": "local", "compute_time": time}

    def resources(self, nodes: int) -> Resources:
        """Return what each process has: GPUs are used by torch.distributed where each worker has one of its own."""
        device = resolve_device(self.device)
        one_gpu_each = device == "cuda" and torch.cuda.device_count() >= self.workers > 1
        return Resources(
            device, self.threads or share_of_cores(nodes), one_gpu_each, compute_times.read(self.compute_time)
        )

    def problems(self) -> Iterator[Problem]:
        """Yield what is wrong with this description."""
        yield from super().problems()
        if launched() and os.environ["WORLD_SIZE"] != "1":
            message = (
                "every process that torchrun started would begin a run of its own: leave it out, or use Attached()"
            )
            yield Problem("cluster", "Local(...)", message)
        yield from half_set()
        if isinstance(self.workers, int) and self.workers > 512:
            yield Problem("cluster.workers", self.workers, "is too many for one machine: at most 512")
        if self.threads is not None and not (isinstance(self.threads, int) and self.threads >= 1):
            yield Problem("cluster.threads", self.threads, "must be at least 1, or None to divide the cores")
        if self.compute_time is not None:
            yield from compute_times.problems_of(self.compute_time)
        if not isinstance(self.patience, int | float) or not self.patience > 0:
            yield Problem("cluster.patience", self.patience, "must be a number of seconds above zero")
