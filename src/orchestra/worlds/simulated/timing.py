# SPDX-License-Identifier: Apache-2.0
"""Nodes that compute nothing: vectors have a length but no numbers, so that thousands of them can be timed.

All that takes time or traffic is as with numbers: the sizes of mini-batches, who updates what, how many momenta.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from orchestra.core.comm import Comm
from orchestra.core.log import Log
from orchestra.core.node import Node
from orchestra.core.ops import Compute, Message
from orchestra.data.feed import IndexedFeed, SampleStore
from orchestra.model.flat_optimizer import FlatOptimizer
from orchestra.model.replica import Ready, trainable

if TYPE_CHECKING:
    from orchestra.engine.spec import RunSpec


Momenta = tuple[dict[str, Any], Sequence[int]]  # the outline of what an optimizer keeps, and the lengths of its vectors


def timed(
    spec: RunSpec, rank: int, comm: Comm, log: Log, x0: Tensor, data: Any, momenta: Momenta, *, at_once: bool
) -> Node:
    """Return a worker or a server without numbers; `at_once`: averages and updates take no time."""
    if rank < spec.workers:
        x = torch.empty_like(x0, device="meta")
        return _TimedNode(comm, _TimedOptimizer(x, momenta), x, at_once, log, spec, feed=_feed(spec, rank, data))
    part = spec.range_of(rank)
    x = torch.empty(part.stop - part.start, dtype=x0.dtype, device="meta")
    outline, lengths = momenta
    return _TimedNode(comm, _TimedOptimizer(x, (outline, [x.numel() for _ in lengths])), x, at_once, log, spec)


class _TimedNode(Node):
    """Takes its time over gradients, averages and updates, and does nothing."""

    def __init__(
        self, comm: Comm, optimizer: Any, x: Tensor, at_once: bool, log: Log, spec: RunSpec, feed: Any = None
    ) -> None:
        last = None if feed is None else spec.last_step
        more: dict[str, Any] = {"last_step": last, "placement": spec.placement, "fuses": spec.fused}
        super().__init__(comm, optimizer, x, log=log, seed=spec.seed, feed=feed, **more)
        self._at_once = at_once
        self._parts: dict[torch.dtype, Sequence[Tensor]] = {}

    def _differentiate(self, batch: list[Any], size: int, ready: Ready | None) -> float:
        return 0.0

    def parts(self, x: Tensor) -> Sequence[Tensor]:
        """The servers' ranges: all vectors of a kind have the same, since they hold nothing."""
        if x.dtype not in self._parts:
            self._parts[x.dtype] = super().parts(x)
        return self._parts[x.dtype]

    def average(self, pushes: Sequence[Message]) -> float:
        """Take one's time over it."""
        weights = sum(push.weight for push in pushes)
        if weights:
            self._pass_over(len(pushes) * self.x.numel())
        return weights

    def update(self, g: Tensor) -> None:
        """Count, and take one's time over it."""
        if self.feed is None:
            self.steps += 1
        self.optimizer.step(g)
        self._pass_over(self.x.numel())

    def _pass_over(self, numbers: int) -> None:
        if not self._at_once:
            self.comm.transport.start(Compute(_nothing, numbers=numbers)).wait()


def _nothing() -> None:
    return None


class _TimedOptimizer:
    """An optimizer with nothing to optimize, but with as many momenta as the real one."""

    lr = 1.0
    draws = False

    def __init__(self, x: Tensor, momenta: Momenta) -> None:
        self._outline, lengths = momenta
        self._momenta = [x.new_empty(length) for length in lengths]
        self._begun = False

    def set_progress(self, epochs: float) -> None:
        """No schedule."""

    def rates(self) -> list[tuple[slice, float]]:
        """One of all."""
        return [(slice(None), self.lr)]

    def step(self, g: Tensor) -> None:
        """From the first on there are momenta."""
        self._begun = True

    def reset(self) -> None:
        """Forget them."""
        self._begun = False

    momentum = None

    def rescale(self, factor: float) -> None:
        """No learning rate."""

    def set_momentum(self, momentum: float, *, keep: bool) -> None:
        """Nothing that it would change."""

    def first_moments(self) -> list[Tensor]:
        """Nothing to scale."""
        return []

    def outline(self) -> dict[str, Any]:
        """As that of the real one."""
        return self._outline if self._begun else {}

    def adopt(self, outline: dict[str, Any], vectors: Sequence[Tensor]) -> None:
        """Have them if another one had."""
        self._begun = bool(vectors)

    def put(self, vectors: Sequence[Tensor]) -> None:
        """There are no numbers to keep."""

    def vectors(self) -> list[Tensor]:
        """Those it has."""
        return self._momenta if self._begun else []


def momenta_of(spec: RunSpec, x0: Tensor) -> Momenta:
    """What a worker's optimizer keeps, by a trial."""
    layers = list(trainable(spec.model()).values()) if spec.layerwise else None
    inner = FlatOptimizer(spec.optimizer, x0.clone(), layers=layers)
    inner.step(torch.zeros_like(x0))
    return inner.outline(), [vector.numel() for vector in inner.vectors()]


def _feed(spec: RunSpec, rank: int, data: Any) -> Any:
    """Mini-batches of the true sizes; full ones of a stream, whose length nobody knows, and of too few samples."""
    if isinstance(data, IterableDataset) or spec.batch * spec.workers > len(SampleStore(data)):
        return _Stream(spec.batch, spec.workers, spec.steps_per_epoch)
    feed = IndexedFeed(data, batch=spec.batch, seed=spec.seed, rank=rank, size=spec.workers, partition=spec.partition)
    feed.give_nothing()
    return feed


class _Stream:
    """Full batches, without samples in them."""

    draws = False
    reshared: int | None = None

    def __init__(self, batch: int, workers: int, steps_per_epoch: int | None) -> None:
        self.batch, self._workers = batch, workers
        self._steps = steps_per_epoch or 2**62
        self._done = 0  # steps of single workers: so many make one of all
        self._left = workers

    @property
    def epoch(self) -> int:
        """Whole passes so far."""
        return self._done // (self._steps * self._workers)

    @property
    def epochs(self) -> float:
        """Passes so far."""
        return self._done / (self._steps * self._workers)

    def distance(self, steps: int) -> float:
        """Steps so far, as all workers together would have done them."""
        return self._done / self._workers

    def next(self) -> tuple[list[Any], int]:
        """The size of the next batch."""
        self._done += self._left
        return [], self.batch

    def reshare(self, size: int) -> None:
        """From here on only so many workers have batches."""
        self.reshared = self._left = size
