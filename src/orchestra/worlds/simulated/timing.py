# SPDX-License-Identifier: Apache-2.0
"""Nodes without numerics: vectors have a length but no numbers, so that thousands of nodes can be simulated.

Everything that takes time or traffic is as with numerics: sizes of mini-batches, ranges of updates, number of momenta.
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


Momenta = tuple[dict[str, Any], Sequence[int]]  # the outline of an optimizer's state, and the lengths of its vectors


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
    """A node whose gradients, averages and updates take time and compute nothing."""

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
        """Return the servers' ranges of a vector, cached by dtype, since the vectors hold no numbers."""
        if x.dtype not in self._parts:
            self._parts[x.dtype] = super().parts(x)
        return self._parts[x.dtype]

    def average(self, pushes: Sequence[Message]) -> float:
        """Let the time of an average pass; return the sum of the weights."""
        weights = sum(push.weight for push in pushes)
        if weights:
            self._spend_time_on(len(pushes) * self.x.numel())
        return weights

    def update(self, g: Tensor) -> None:
        """Count an update, and let its time pass."""
        if self.feed is None:
            self.steps += 1
        self.optimizer.step(g)
        self._spend_time_on(self.x.numel())

    def _spend_time_on(self, numbers: int) -> None:
        if not self._at_once:
            self.comm.transport.start(Compute(_nothing, numbers=numbers)).wait()


def _nothing() -> None:
    return None


class _TimedOptimizer:
    """An optimizer that computes nothing, with as many momenta as the real one."""

    lr = 1.0
    draws = False

    def __init__(self, x: Tensor, momenta: Momenta) -> None:
        self._outline, lengths = momenta
        self._momenta = [x.new_empty(length) for length in lengths]
        self._begun = False

    def set_progress(self, epochs: float) -> None:
        """Do nothing: there is no schedule."""

    def rates(self) -> list[tuple[slice, float]]:
        """Return one rate for all of x."""
        return [(slice(None), self.lr)]

    def step(self, g: Tensor) -> None:
        """Note that momenta exist from the first step on."""
        self._begun = True

    def reset(self) -> None:
        """Forget the momenta."""
        self._begun = False

    momentum = None

    def rescale(self, factor: float) -> None:
        """Do nothing: there is no learning rate."""

    def set_momentum(self, momentum: float, *, keep: bool) -> None:
        """Do nothing: the momentum changes neither time nor traffic."""

    def first_moments(self) -> list[Tensor]:
        """Return no vectors: there are no numbers to scale."""
        return []

    def outline(self) -> dict[str, Any]:
        """Return the outline of the real optimizer's state."""
        return self._outline if self._begun else {}

    def adopt(self, outline: dict[str, Any], vectors: Sequence[Tensor]) -> None:
        """Have momenta if the other optimizer had."""
        self._begun = bool(vectors)

    def put(self, vectors: Sequence[Tensor]) -> None:
        """Do nothing: there are no numbers to store."""

    def vectors(self) -> list[Tensor]:
        """Return the momenta, if there are any yet."""
        return self._momenta if self._begun else []


def momenta_of(spec: RunSpec, x0: Tensor) -> Momenta:
    """Return the outline and the vector lengths of a worker's optimizer state, by a trial step."""
    layers = list(trainable(spec.model()).values()) if spec.layerwise else None
    inner = FlatOptimizer(spec.optimizer, x0.clone(), layers=layers)
    inner.step(torch.zeros_like(x0))
    return inner.outline(), [vector.numel() for vector in inner.vectors()]


def _feed(spec: RunSpec, rank: int, data: Any) -> Any:
    """Return a feed of batches of the true sizes; of full ones for a stream, or if the samples are too few."""
    if isinstance(data, IterableDataset) or spec.batch * spec.workers > len(SampleStore(data)):
        return _Stream(spec.batch, spec.workers, spec.steps_per_epoch)
    feed = IndexedFeed(data, batch=spec.batch, seed=spec.seed, rank=rank, size=spec.workers, partition=spec.partition)
    feed.give_nothing()
    return feed


class _Stream:
    """A feed of full batches without samples."""

    draws = False
    dealt = ()

    def __init__(self, batch: int, workers: int, steps_per_epoch: int | None) -> None:
        self.batch, self._workers = batch, workers
        self._steps = steps_per_epoch or 2**62
        self._done = 0  # the sum of the steps of all workers
        self._left = workers

    @property
    def epoch(self) -> int:
        """Number of whole passes so far."""
        return self._done // (self._steps * self._workers)

    @property
    def epochs(self) -> float:
        """Number of passes so far."""
        return self._done / (self._steps * self._workers)

    def distance(self, steps: int) -> float:
        """Return the steps of all workers so far, divided by the initial number of workers."""
        return self._done / self._workers

    def next(self) -> tuple[list[Any], int]:
        """Return an empty batch and its size, and advance."""
        self._done += self._left
        return [], self.batch

    def deal_to(self, places: Sequence[int]) -> None:
        """From here on, deal batches to the workers at these places only."""
        self._left = len(places)
