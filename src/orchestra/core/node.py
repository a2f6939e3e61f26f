# SPDX-License-Identifier: Apache-2.0
"""The node on which a strategy runs, through which it also reaches the other nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from orchestra.core.comm import Comm
from orchestra.core.log import Log, Logged, Skipped
from orchestra.core.ops import Compute, Group, MeanUpdate, Message, PrepareMean
from orchestra.core.vectors import clip_, weighted_mean
from orchestra.errors import Diverged

if TYPE_CHECKING:  # by their types only
    from orchestra.core.strategy import Strategy
    from orchestra.core.view import View
    from orchestra.data.feed import Feed
    from orchestra.model.flat_optimizer import FlatOptimizer
    from orchestra.model.replica import Ready, Replica


class Node:
    """A participant. `x` and `g` are the paper's: parameters and gradient as flat vectors.

    A worker holds the whole of x and a mini-batch at a time; a server holds its range of x and no data.
    """

    def __init__(
        self,
        comm: Comm,
        optimizer: FlatOptimizer,
        x: Tensor,
        *,
        log: Log,
        seed: int,
        replica: Replica | None = None,
        feed: Feed | None = None,
        placement: Sequence[slice] = (),
        fuses: bool = False,
        clip: float | None = None,
        tolerate: int = 10,
        last_step: int | None = None,
        validation: Callable[[], tuple[float, float]] | None = None,
    ) -> None:
        self.comm = comm
        self.x = x
        self.g = replica.g if replica is not None else torch.empty_like(x)
        self.rng = torch.Generator().manual_seed(seed)
        self.steps = 0  # a worker's mini-batches, a server's updates
        self.samples = 0  # samples behind x: a worker's own, a server's of all workers
        self.weight = 0.0  # samples behind g; zero if g must not be used
        self.loss = math.nan  # of the last mini-batch
        self.skipped = 0  # gradients that were not finite
        self.abandoned = False  # whether the last mini-batch was cancelled
        self.replica, self.feed, self.optimizer = replica, feed, optimizer
        self._log = log
        self.placement = placement  # the range of x that each server holds
        self._lengths = [part.stop - part.start for part in placement]
        self._fuses = fuses  # the world does all-reduce and update in one op
        self.clip = clip  # the largest norm allowed
        self._clips_mean = False  # whether `clip` bounds the mean gradient, by the layout in force
        self._tolerate, self._in_a_row = tolerate, 0
        self._last_step, self._validation = last_step, validation
        # A sum in half precision may overflow although every element is finite.
        self._wide = torch.float32 if x.element_size() < 4 else None

    @property
    def rank(self) -> int:
        """Id of this node; workers come first."""
        return self.comm.rank

    @property
    def serves(self) -> bool:
        """Whether this node is a server."""
        return self.feed is None

    @property
    def retired(self) -> bool:
        """Whether this worker takes part no more."""
        return not self.serves and self.rank not in self.comm.workers

    def adopt(self, strategy: Strategy[Any], s: Any) -> None:
        """Apply the clipping and the codec of a strategy, or of its next phase, after its state is set."""
        layout, (phase, state) = strategy.layout_at(s), strategy.phase(s)
        self._clips_mean = layout.updates.clip == "mean"
        self.comm.use(phase.codec(self, state))

    def enter(self, view: View) -> bool:
        """Enter the next view, in which its workers get all remaining samples; see `Comm.enter`."""
        before = self.comm.workers
        with_all = self.comm.enter(view)
        if self.feed is not None and not self.retired and view.workers != before:
            self.feed.deal_to([before.index(worker) for worker in view.workers.members])
        return with_all

    def parts(self, x: Tensor) -> Sequence[Tensor]:
        """Return the servers' ranges of a vector, as views."""
        return torch.split_with_sizes(x, self._lengths)

    @property
    def batch(self) -> int:
        """The number of samples of a full mini-batch of a worker."""
        assert self.feed is not None
        return self.feed.batch

    @property
    def lr(self) -> float:
        """γ: the learning rate in force."""
        return self.optimizer.lr

    @property
    def epochs(self) -> float:
        """Passes over the data as dealt to the workers, used or not; on a server, the mean of the workers' latest."""
        if self.feed is not None:
            return self.feed.epochs
        known = [self.comm.known.get(worker, 0.0) for worker in self.comm.workers.members]
        least = min(known)  # subtracted first: where all are equal, the mean is exactly that
        return least + math.fsum(progress - least for progress in known) / len(known)

    @property
    def budget(self) -> float:
        """The share of its steps that a worker has done; zero if a clock or a score decides when the run ends."""
        return self.steps / self._last_step if self._last_step else 0.0

    def validate(self) -> tuple[float, float]:
        """Return the validation loss at x over this worker's share of the samples: the sum, and their number."""
        assert self._validation is not None, "there are no validation samples"
        return self.comm.transport.start(Compute(self._validation)).wait()

    def gradient(self, *, averaged: bool = False, cancel_on: Group | None = None, unused: bool = False) -> Tensor:
        """g ← the gradient at x over the next mini-batch; `weight` is its number of samples.

        A gradient that is not finite is counted and gets weight zero, so that it changes neither x nor other nodes. The
        mini-batch is `abandoned` if a message arrives meanwhile from a node in `cancel_on`, or at once if `unused`.
        `averaged`: `mean_update` follows, so the world may begin to average the last layers during backward.
        """
        assert self.feed is not None
        start = self.comm.transport.start
        self.comm.progress = self.epochs
        self.optimizer.set_progress(self.comm.progress)
        batch, size = start(Compute(self.feed.next, draws=self.feed.draws)).wait()
        self.steps += 1
        self.abandoned = False
        ahead = PrepareMean(self.g, self.comm.workers, float(size), float(self.batch))
        ready = start(ahead).wait() if averaged else None
        if size == 0 and not unused:
            self.g.zero_()
            self.weight, self.loss = 0.0, math.nan
            return self.g
        taking = Compute(lambda: self._differentiate(batch, size, ready), size, batch, draws=True, cancel_on=cancel_on)
        loss: float | None = None if unused else start(taking).wait()
        if loss is None:
            self.abandoned = True
            self.weight, self.loss = 0.0, math.nan
            self.log("abandoned", 1)
            return self.g
        self.loss = loss
        if math.isfinite(loss):
            self.weight = float(size)
            self.samples += size
            self._in_a_row = 0
            if self.clip is not None and not self._clips_mean:
                clip_(self.g, self.clip)
        else:
            self._skip()
        return self.g

    def _differentiate(self, batch: Any, size: int, ready: Ready | None) -> float:
        """Fill g and return the loss; if either is not finite, restore the buffers and return NaN."""
        assert self.replica is not None
        loss = self.replica.gradient(batch, size, ready)
        if math.isfinite(loss) and math.isfinite(float(self.g.sum(dtype=self._wide))):
            return loss
        self.replica.before.restore()
        return math.nan

    def _skip(self) -> None:
        self.skipped += 1
        self._in_a_row += 1
        self.g.zero_()
        self.weight, self.loss = 0.0, math.nan
        self._log.write(Skipped(self.now(), self.rank, self.steps, self._in_a_row))
        if self._in_a_row >= self._tolerate:
            raise Diverged(
                f"worker {self.rank}: the gradient was NaN or infinite {self._in_a_row} times in a row, last at step "
                f"{self.steps} with learning rate {self.lr:g}. "
                + (
                    "Lower the learning rate, clip the gradient (clip=1.0), or look for bad samples."
                    if self.samples
                    else "It never was finite: check the model, the loss and the data."
                )
            )

    def update(self, g: Tensor) -> None:
        """x ← the inner optimizer's step with gradient g."""
        if self.feed is None:
            self.steps += 1
            self.optimizer.set_progress(self.epochs)
        step = Compute(lambda: self._step(g), numbers=g.numel(), draws=self.optimizer.draws)
        self.comm.transport.start(step).wait()

    def _step(self, g: Tensor) -> None:
        """Step the inner optimizer; first clip g if `clip` bounds the mean."""
        if self.clip is not None and self._clips_mean:
            clip_(g, self.clip)
        self.optimizer.step(g)

    def rates(self) -> Iterator[tuple[slice, float]]:
        """Return γ for each range of x: for the whole, or for each layer if the optimizer has groups of them."""
        return self.optimizer.rates()

    def descend(self, g: Tensor) -> None:
        """x ← x − γ g without the inner optimizer, with the γ of each group of layers."""
        for part, rate in self.rates():
            self.x[part].sub_(g[part], alpha=rate)

    def average(self, pushes: Sequence[Message]) -> float:
        """g ← Σ bᵢ gᵢ / Σ bᵢ of the pushes, in the given order. Return Σ bᵢ; if that is zero, g stays as it is."""
        weights = [push.weight for push in pushes]
        if any(weights):
            vectors = [push.x for push in pushes]
            mean = Compute(lambda: weighted_mean(self.g, vectors, weights), numbers=len(pushes) * self.g.numel())
            self.comm.transport.start(mean).wait()
        return sum(weights)

    def local_step(self) -> None:
        """Do one step of the inner optimizer with this worker's own gradient, unless the gradient cannot be used."""
        g = self.gradient()
        if self.weight:
            self.update(g)

    def mean_update(self, g: Tensor) -> None:
        """x ← the inner optimizer's step with the mean of g over the workers; x is then equal everywhere.

        Equivalent to `mean_` and `update`, but if optimizer and world allow, each worker updates only one range. The
        contents of g are undefined afterwards.
        """
        if self._fuses:
            op = MeanUpdate(self.x, g, self.comm.workers, self.weight, self._step)
            self.comm.transport.start(op).wait()
            return
        if self.comm.mean_(g, weight=self.weight):
            self.update(g)

    def now(self) -> float:
        """Seconds since training began, by this world's clock."""
        return self.comm.transport.now()

    def log(self, name: str, value: float) -> None:
        """Log a number under a name."""
        self._log.write(Logged(self.now(), self.rank, self.steps, name, value))
