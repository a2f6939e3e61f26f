# SPDX-License-Identifier: Apache-2.0
"""Means over GPUs, for workers that have one each: NCCL moves the vectors, everything else stays as it is."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore


class NcclMeans:
    """A process group of all workers."""

    def __init__(self, meeting_place: Path, rank: int, workers: int, device: torch.device) -> None:
        # A file in the run folder, not a port: nobody else can join.
        store = FileStore(str(meeting_place), workers)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=workers, device_id=device)

    def mean(self, x: Tensor, weight: float) -> float:
        """x ← Σ wᵢ xᵢ / Σ wᵢ in place; gives Σ wᵢ. A vector of weight zero is not read, so it may hold anything."""
        total = torch.tensor([weight], dtype=torch.float64, device=x.device)
        dist.all_reduce(total)
        whole = float(total)
        if whole:
            if weight:
                x.mul_(weight / whole)
            else:
                x.zero_()
            dist.all_reduce(x)
        return whole

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()
