# SPDX-License-Identifier: Apache-2.0
"""What every process of a run is told."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import nn

from orchestra.core.ops import Group
from orchestra.core.strategy import Strategy
from orchestra.core.vectors import cut, is_small, ranges, ranges_of_layers
from orchestra.data.batches import Loss
from orchestra.data.partitions import Partition
from orchestra.engine.compute_times import Delay
from orchestra.model.flat_optimizer import Factory, Schedule


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run, resolved: no choice is left open."""

    model: Callable[[], nn.Module]
    data: Callable[[], Any]
    loss: Loss | None
    optimizer: Factory
    strategy: Strategy[Any]
    workers: int
    batch: int
    seed: int
    device: str  # "cpu" or "cuda"
    one_memory: bool  # workers can share one x
    torch_means: bool  # means are taken by torch.distributed, and every worker updates the whole of x
    run: Path
    launch: str  # different whenever the run is started or resumed
    last_step: int | None  # of each worker; None if only a clock, a score or the end of a stream can tell
    last_epoch: float | None  # for streams, whose length is not known before
    schedule: Schedule | None
    validation: Callable[[], Any] | None  # makes samples whose loss tells strategies how the model does
    partition: Partition | None
    clip: float | None  # largest norm of the gradient
    accumulate: int
    bf16: bool
    tolerate: int  # gradients in a row that may be not finite
    snapshot_every: int | None  # steps
    checkpoint_every: int | None  # steps
    steps_per_epoch: int | None  # of each worker
    samples_per_epoch: int | None
    shards: tuple[int, ...] | None  # samples of each worker, where that is settled beforehand
    names: tuple[str, ...]  # of the parameters that make up x, in its order
    layers: tuple[tuple[int, ...], ...]  # their shapes
    layerwise: bool  # the optimizer must see whole layers
    resume: Path | None  # a verified checkpoint
    threads: int
    trace: bool  # every op is written down
    delay: Delay | None  # how long workers take for a mini-batch; None: as long as it takes

    @property
    def servers(self) -> int:
        """How many servers there are."""
        return self.strategy.layout.servers

    @cached_property
    def parameters(self) -> int:
        """Numbers in x."""
        return sum(map(math.prod, self.layers))

    @cached_property
    def placement(self) -> list[slice]:
        """The range of x that each server holds: the one place where x is cut among them."""
        if self.strategy.layout.placement == "layers":
            return ranges_of_layers([size for shape in self.layers if (size := math.prod(shape))], self.servers)
        return ranges(self.parameters, self.servers)

    @cached_property
    def cuts(self) -> list[int]:
        """Where the ranges of x begin that servers hold, or that workers update for all."""
        owned = ranges(self.parameters, self.workers) if self.updated == "own range" else []
        return [part.start for part in (*self.placement, *owned) if part.start < part.stop]

    def range_of(self, rank: int) -> slice:
        """The range of x that a server holds."""
        return self.placement[rank - self.workers]

    @cached_property
    def machines(self) -> tuple[int, ...]:
        """The machine of every node. Each has its own, but for servers that live with the last workers."""
        shared = self.strategy.layout.colocated
        last = ((k - self.servers) % self.workers if shared else self.workers + k for k in range(self.servers))
        return (*range(self.workers), *last)

    def near(self, rank: int) -> frozenset[int]:
        """The other nodes on a node's machine: what passes between them does not pass the network."""
        return frozenset(n for n, at in enumerate(self.machines) if at == self.machines[rank] and n != rank)

    @cached_property
    def updated(self) -> Literal["whole", "own range", "shared"]:
        """What of x a worker updates: the one place where this is decided.

        `shared`: one x, together with the others. `own range`: one range, for all workers; then the replicas must
        always be equal, the optimizer treat every element alike, and the model be so large that it pays. `whole`: all
        of its own x.
        """
        location = self.strategy.layout.model_location
        if location == "shared":
            return "shared"
        possible = location == "everywhere" and not self.layerwise and self.clip is None and not self.torch_means
        return "own range" if possible and not is_small(self.parameters, self.workers) else "whole"

    @property
    def shares_x(self) -> bool:
        """Whether one x in memory serves all workers of a machine."""
        return self.one_memory and (self.updated == "shared" or (self.updated == "own range" and self.device == "cpu"))

    @cached_property
    def groups(self) -> tuple[Group, Group]:
        """The workers, and the servers after them; all nodes of a simulation hold the same two."""
        nodes = tuple(range(self.workers + self.servers))
        return Group(nodes[: self.workers]), Group(nodes[self.workers :])

    def samples_by(self, step: int) -> int:
        """Samples that all workers together have used after so many steps of each."""
        together = self.batch * self.workers
        if self.steps_per_epoch is None or self.samples_per_epoch is None:
            return step * together
        epochs, rest = divmod(step, self.steps_per_epoch)
        if self.shards is not None:
            within = sum(cut(length, self.steps_per_epoch, rest) for length in self.shards)
            return epochs * self.samples_per_epoch + within
        return epochs * self.samples_per_epoch + min(rest * together, self.samples_per_epoch)


class ModelCheck(Protocol):
    """Compares this process's model and data with those of the caller."""

    def require_same(self, module: nn.Module, data: Any, seed: int) -> None:
        """Raise if they differ."""

    def require_same_outputs(self, module: nn.Module, data: Any, seed: int) -> None:
        """Raise if the model computes something else with the caller's parameters."""
