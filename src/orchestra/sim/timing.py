# SPDX-License-Identifier: Apache-2.0
"""Nodes that compute nothing: vectors have a length but no numbers, so that thousands of them can be timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from orchestra.node import Comm, Log, Node
from orchestra.ops import Compute, Message
from orchestra.vectors import ranges

if TYPE_CHECKING:
    from orchestra.job import Job


def timed(job: Job, rank: int, comm: Comm, log: Log, x0: Tensor, *, at_once: bool) -> Node:
    """A worker or a server without numbers; `at_once`: averages and updates take no time."""
    inner: Any = _Inner()
    if rank < job.workers:
        x = torch.empty_like(x0, device="meta")
        feed: Any = _Feed(job.batch, job.steps_per_epoch)
        node = _TimedNode(comm, inner, x, log=log, seed=job.seed, feed=feed)
        node.at_once = at_once
        return node
    part = ranges(x0.numel(), job.servers)[rank - job.workers]
    x = torch.empty(part.stop - part.start, dtype=x0.dtype, device="meta")
    node = _TimedNode(comm, inner, x, log=log, seed=job.seed, samples_per_epoch=job.samples_per_epoch)
    node.at_once = at_once
    return node


class _TimedNode(Node):
    at_once = True

    def _differentiate(self, batch: list[Any], size: int) -> float:
        return 0.0

    def average(self, pushes: Sequence[Message]) -> float:
        """Take one's time over it."""
        self._pass_over(len(pushes) * self.x.numel())
        return sum(push.weight for push in pushes)

    def update(self, g: Tensor) -> None:
        """Count, and take one's time over it."""
        if self.feed is None:
            self.steps += 1
        self._pass_over(self.x.numel())

    def _pass_over(self, numbers: int) -> None:
        if not self.at_once:
            self.comm.transport.start(Compute(_nothing, numbers=numbers)).wait()


def _nothing() -> None:
    return None


class _Inner:
    """An optimizer with nothing to optimize."""

    lr = 1.0
    draws = False

    def set_progress(self, epochs: float) -> None:
        """No schedule."""

    def reset(self) -> None:
        """No momenta."""

    def vectors(self) -> list[Tensor]:
        """None."""
        return []


class _Feed:
    """Full batches, without samples in them."""

    draws = False

    def __init__(self, batch: int, steps_per_epoch: int | None) -> None:
        self._batch = batch
        self._steps = steps_per_epoch or 2**62
        self._done = 0

    @property
    def epoch(self) -> int:
        """Whole passes so far."""
        return self._done // self._steps

    @property
    def epochs(self) -> float:
        """Passes so far."""
        return self._done / self._steps

    def next(self) -> tuple[list[Any], int]:
        """The size of the next batch."""
        self._done += 1
        return [], self._batch
