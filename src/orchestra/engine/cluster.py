# SPDX-License-Identifier: Apache-2.0
"""The description of a cluster, where a run takes place. `clusters/runners.py` maps each cluster to its runner."""

from __future__ import annotations

import os
from abc import ABC
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from orchestra.engine.compute_times import ComputeTime
from orchestra.errors import Problem

if TYPE_CHECKING:
    from orchestra.core.strategy import Strategy
    from orchestra.engine.spec import TrainArguments

Device = Literal["cpu", "cuda", "auto"]


@dataclass(frozen=True)
class Abilities:
    """The abilities of a cluster."""

    one_memory: bool = True  # its workers can share one x
    checkpoints: bool = True  # runs there are saved and resumed
    trains: bool = True  # gradients are computed; without, only time passes


@dataclass(frozen=True)
class Resources:
    """The resources of each process of a run on a cluster."""

    device: str  # "cpu" or "cuda"
    threads: int
    uses_torch_collectives: bool = False  # torch.distributed takes the averages; between GPUs that is NCCL
    compute_time: ComputeTime | None = None  # how long a worker takes for a mini-batch; None: as long as it takes


class Cluster(ABC):
    """A place to train. Subclasses are frozen, keyword-only dataclasses."""

    workers: int
    device: Device

    @property
    def abilities(self) -> Abilities:
        """What the cluster can do."""
        return Abilities()

    @property
    def is_coordinator(self) -> bool:
        """Whether this process coordinates the run and owns the run folder."""
        return True

    def problems(self) -> Iterator[Problem]:
        """Yield the reasons why no run is possible on this cluster."""
        if not isinstance(self.workers, int) or isinstance(self.workers, bool) or self.workers < 1:
            yield Problem("cluster.workers", self.workers, "must be a whole number of at least 1")
        if self.device not in ("cpu", "cuda", "auto"):
            yield Problem("cluster.device", self.device, 'must be "cpu", "cuda" or "auto"')
        elif self.device == "cuda" and not torch.cuda.is_available():
            yield Problem("cluster.device", self.device, 'no CUDA device is visible here: use "cpu" or "auto"')

    def for_strategy(self, strategy: Strategy[Any]) -> Cluster:
        """Return the cluster with its processes divided into workers and the servers of a strategy."""
        return self

    def check_model(self, given: TrainArguments, module: nn.Module, data: Any) -> Iterator[Problem]:
        """Yield what the arguments ask for but this model and data do not allow on this cluster."""
        return iter(())

    def resolved(self, given: TrainArguments, strategy: Strategy[Any], module: nn.Module, data: Any) -> Cluster:
        """Return the cluster with every "auto" replaced by a choice, which may depend on model and data."""
        return self

    def resources(self, nodes: int) -> Resources:
        """Return the resources of each of `nodes` processes."""
        return Resources(resolve_device(self.device), share_of_cores(nodes))

    def about(self) -> dict[str, Any]:
        """Return what a run folder records of the cluster."""
        return {"kind": type(self).__name__.lower()}


def resolve_device(device: Device) -> str:
    """Return the device, with `auto` replaced by CUDA where there is any."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def share_of_cores(processes: int) -> int:
    """Return how many threads each of some processes of this machine has, if they share the cores evenly."""
    return max(1, len(os.sched_getaffinity(0)) // processes)
