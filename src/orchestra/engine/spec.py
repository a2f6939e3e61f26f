# SPDX-License-Identifier: Apache-2.0
"""The settings of a run: the arguments of `train`, and the `RunSpec` made from them, with no choice left open."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from orchestra.core.ops import Group
from orchestra.core.strategy import Strategy
from orchestra.core.vectors import cut, is_small, ranges, ranges_of_layers
from orchestra.core.view import View
from orchestra.data import samples
from orchestra.data.batches import Loss
from orchestra.data.partitions import Partition
from orchestra.data.random_state import seed_everything
from orchestra.engine.compute_times import ComputeTime
from orchestra.model.flat_optimizer import Factory, Schedule
from orchestra.runs.budget import Budget, Epochs, Steps
from orchestra.runs.status import RunStatus

if TYPE_CHECKING:
    from orchestra.engine.cluster import Cluster
    from orchestra.engine.scoring import Evaluate


@dataclass(frozen=True, kw_only=True)
class TrainArguments:
    """The arguments of `train`, documented there. A loop under `prepare` leaves most of them at their defaults."""

    model: Callable[[], nn.Module]
    data: Callable[[], Any]
    loss: Loss | None = None
    optimizer: Factory
    strategy: Strategy[Any] | str
    cluster: Cluster
    batch: int
    budget: Budget = field(default_factory=lambda: Epochs(1))
    evaluate: Evaluate | None = None
    evaluation_data: Callable[[], Any] | None = None
    evaluate_every: Steps | Epochs = field(default_factory=lambda: Epochs(1))
    validation_data: Callable[[], Any] | None = None
    seed: int
    out: str | Path | None = None
    schedule: Schedule | None = None
    clip: float | None = None
    accumulate: int = 1
    precision: str = "float32"
    partition: Partition | None = None
    checkpoint_every: Steps | Epochs | None = None
    resume: bool = False
    tolerate: int
    keep_snapshots: bool = False
    score_afterwards: bool = False
    trace: bool = False
    progress: Callable[[RunStatus], None] | bool | None = None
    note: dict[str, Any] = field(default_factory=dict)

    def validation_samples(self) -> Any:
        """Return what `validation_data` makes, if it is given. Samples that are drawn come out alike everywhere."""
        if self.validation_data is None:
            return None
        seed_everything(self.seed)
        return samples.read(self.validation_data())


@dataclass(frozen=True, kw_only=True)
class RunSpec(TrainArguments):
    """One run, with every choice made."""

    strategy: Strategy[Any]
    workers: int
    device: str  # "cpu" or "cuda"
    one_memory: bool = False  # workers can share one x
    uses_torch_collectives: bool = False  # for all-reduces; then every worker updates the whole of x
    run: Path = Path()  # the run folder
    launch: str = ""  # different whenever the run is started or resumed
    last_step: int | None = None  # of each worker; None if a clock, a score or the end of a stream decides
    last_epoch: float | None = None  # for streams, whose length is not known beforehand
    snapshot_steps: int | None = None  # between two snapshots
    checkpoint_steps: int | None = None  # between two checkpoints
    steps_per_epoch: int | None = None  # of each worker
    samples_per_epoch: int | None = None
    shards: tuple[int, ...] | None = None  # samples of each worker, where that is settled beforehand
    names: tuple[str, ...]  # of the parameters that make up x, in its order
    layers: tuple[tuple[int, ...], ...]  # their shapes
    layerwise: bool  # the optimizer must see whole layers
    checkpoint: Path | None = None  # a verified checkpoint to go on from
    threads: int
    compute_time: ComputeTime | None = None  # how long workers take for a mini-batch; None: as long as it takes

    def for_nodes(self) -> RunSpec:
        """Return the settings without those that only the caller's process uses; some of them cannot be pickled."""
        return replace(self, evaluate=None, evaluation_data=None, progress=None, note={})

    @property
    def servers(self) -> int:
        """The number of servers."""
        return self.strategy.layout.servers

    @cached_property
    def parameters(self) -> int:
        """The number of elements of x."""
        return sum(map(math.prod, self.layers))

    @cached_property
    def placement(self) -> list[slice]:
        """The range of x that each server holds: the one place where x is cut among them."""
        if self.strategy.layout.placement == "layers":
            return ranges_of_layers([size for shape in self.layers if (size := math.prod(shape))], self.servers)
        return ranges(self.parameters, self.servers)

    @cached_property
    def cuts(self) -> list[int]:
        """The first elements of the ranges of x that servers hold, or that each worker updates for all."""
        owned = ranges(self.parameters, self.workers) if self.updated == "own range" else []
        return [part.start for part in (*self.placement, *owned) if part.start < part.stop]

    def range_of(self, rank: int) -> slice:
        """Return the range of x that a server holds."""
        return self.placement[rank - self.workers]

    @cached_property
    def machines(self) -> tuple[int, ...]:
        """The machine of every node. Each has its own, but for servers that are colocated with the last workers."""
        shared = self.strategy.layout.colocated
        last = ((k - self.servers) % self.workers if shared else self.workers + k for k in range(self.servers))
        return (*range(self.workers), *last)

    def near(self, rank: int) -> frozenset[int]:
        """Return the other nodes on a node's machine: messages between them do not use the network."""
        return frozenset(n for n, at in enumerate(self.machines) if at == self.machines[rank] and n != rank)

    @cached_property
    def updated(self) -> Literal["whole", "own range", "shared"]:
        """The part of x that a worker updates: the one place where this is decided.

        `shared`: all workers update one x. `own range`: each worker updates one range for all; this requires that the
        replicas are always equal, that the optimizer is element-wise, and that the model is large enough to profit.
        `whole`: each worker updates all of its own x.
        """
        location = self.strategy.layout.model_location
        if location == "shared":
            return "shared"
        possible = (
            location == "everywhere" and not self.layerwise and self.clip is None and not self.uses_torch_collectives
        )
        return "own range" if possible and not is_small(self.parameters, self.workers) else "whole"

    @property
    def fused(self) -> bool:
        """Whether the world averages gradients and updates x in one operation."""
        return self.updated == "own range" or self.uses_torch_collectives

    @property
    def shares_x(self) -> bool:
        """Whether one x in memory serves all workers of a machine."""
        return self.one_memory and (self.updated == "shared" or (self.updated == "own range" and self.device == "cpu"))

    @cached_property
    def view(self) -> View:
        """The first view: the workers, and the servers after them; all nodes of a simulation hold the same one."""
        nodes = tuple(range(self.workers + self.servers))
        return View(0, Group(nodes[: self.workers]), Group(nodes[self.workers :]))

    def samples_by(self, step: int) -> int:
        """Return the samples that all workers together have used after `step` steps of each."""
        together = self.batch * self.workers
        if self.steps_per_epoch is None or self.samples_per_epoch is None:
            return step * together
        epochs, rest = divmod(step, self.steps_per_epoch)
        if self.shards is not None:
            within = sum(cut(length, self.steps_per_epoch, rest) for length in self.shards)
            return epochs * self.samples_per_epoch + within
        return epochs * self.samples_per_epoch + min(rest * together, self.samples_per_epoch)
