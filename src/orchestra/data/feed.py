# SPDX-License-Identifier: Apache-2.0
"""Which sample goes to which worker at which step: a pure function of (seed, epoch, rank, size).

Every sample is used once per epoch, uneven ends included. All workers do equally many steps per epoch, so that
synchronous strategies stay in lockstep; the last batches may be smaller or empty, and means are weighted by samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from orchestra.core.vectors import cut
from orchestra.data.partitions import IID, Partition
from orchestra.data.random_state import get_states, left_alone, seed_everything, set_states
from orchestra.data.samples import SampleStore, collate, is_columns

Batch = tuple[Any, int]  # the inputs and the target, and how many samples they hold


class Feed(Protocol):
    """A worker's endless supply of batches, with a position that can be saved."""

    batch: int  # samples of a full one
    epoch: int
    step: int  # within the epoch
    steps_per_epoch: int | None  # None: not known before the stream ends
    draws: bool  # whether taking a batch may draw from the global random generators

    @property
    def epochs(self) -> float:
        """Passes over the data so far: the samples of all workers divided by those of a pass."""
        ...

    def next(self) -> Batch:
        """Return the batch at the current position, and advance."""
        ...

    def seek(self, epoch: int, step: int) -> None:
        """Go to a position."""
        ...

    def deal_to(self, places: Sequence[int]) -> None:
        """From here on, deal the remaining samples only to the workers at these places among the present ones."""
        ...

    def distance(self, steps: int) -> float:
        """Return the steps so far, counted as if every epoch had `steps` steps."""
        ...

    @property
    def shards(self) -> tuple[int, ...] | None:
        """The number of samples of each worker, if it is fixed beforehand."""
        ...

    @property
    def dealt(self) -> Sequence[tuple[int, int, Sequence[int]]]:
        """Epoch, step and places of every call of `deal_to`."""
        ...


class _Deal(NamedTuple):
    """The division of the samples of an epoch."""

    epoch: int
    used: int  # samples used before `deal_to` in this epoch
    lengths: list[int]  # of all samples together, or of each worker's
    steps: int


class IndexedFeed:
    """Batches of samples that can be picked by index."""

    def __init__(
        self, data: Any, *, batch: int, seed: int, rank: int, size: int, partition: Partition | None = None
    ) -> None:
        self.data = data
        self._samples = SampleStore(data)
        self.draws = not is_columns(data)
        self._pick: Callable[[], Any] = lambda: self._samples.take(self.indices(self.epoch, self.step))
        self.batch, self._seed, self._rank, self._size = batch, seed, rank, size
        self._shards: list[Tensor] | None = None
        if partition is not None and not isinstance(partition, IID):
            self._shards = partition.shards(self._samples.labels(), size, seed)
        self.epoch = self.step = 0
        self.dealt: list[tuple[int, int, Sequence[int]]] = []
        self._used = 0  # samples used before the last call of `deal_to` in its epoch
        self._left: list[Tensor] = []  # the remaining ones of that epoch by worker, with fixed shards
        self._order_of = -1
        self._order = torch.empty(0, dtype=torch.int64)
        self._deal = self._deal_for(-1)
        self.steps_per_epoch: int | None = self._deal.steps

    def indices(self, epoch: int, step: int) -> list[int]:
        """Return the samples of this rank at a step of an epoch."""
        if self._order_of != epoch:
            self._order, self._order_of = self._shuffle(epoch, self._rank), epoch
        chosen: list[int] = self._order[self._here(epoch, step)].tolist()
        return chosen

    def _deal_in(self, epoch: int) -> _Deal:
        if self._deal.epoch != epoch:
            self._deal = self._deal_for(epoch)
        return self._deal

    def _deal_for(self, epoch: int) -> _Deal:
        """Return how the samples of an epoch are dealt out."""
        broken = self._broken(epoch)
        used = self._used if broken else 0
        if self._shards is None:
            count = len(self._samples)
            return _Deal(epoch, used, [count - used], -(-(count - used) // (self.batch * self._size)))
        lengths = [len(shard) for shard in (self._left if broken else self._shards)]
        return _Deal(epoch, used, lengths, max(-(-length // self.batch) for length in lengths))

    def _broken(self, epoch: int) -> bool:
        """Return whether `deal_to` was last called during an epoch."""
        return bool(self.dealt) and self.dealt[-1][0] == epoch

    def _here(self, epoch: int, step: int) -> slice:
        """Return the range of this rank's samples of a step in the order of an epoch."""
        deal = self._deal_in(epoch)
        if self._shards is not None:
            mine = deal.lengths[self._rank]
            return slice(cut(mine, deal.steps, step), cut(mine, deal.steps, step + 1))
        together = self.batch * self._size
        part = hand(min(together, deal.lengths[0] - step * together), self._size, self.batch, self._rank)
        start = deal.used + step * together
        return slice(start + part.start, start + part.stop)

    def _shuffle(self, epoch: int, rank: int) -> Tensor:
        """Return the order of an epoch: of all samples, or of a rank's shard."""
        seed = fold(self._seed, epoch)
        if self._shards is None:
            return _permutation(len(self._samples), seed)
        if self._broken(epoch):
            return self._left[rank]
        shard = self._shards[rank]
        return shard[_permutation(len(shard), seed)]

    @property
    def epochs(self) -> float:
        """Passes over the data so far."""
        # Servers count samples, not steps: with this formula they have the same learning rate.
        return self.distance(1)

    def distance(self, steps: int) -> float:
        """Return the steps so far, counted as if every epoch had `steps` steps."""
        count = len(self._samples)
        # Multiply first, so that whole numbers are exact.
        return (self.epoch * count + self._used_by(self.step)) * steps / count

    @property
    def shards(self) -> tuple[int, ...] | None:
        """The number of samples of each worker, if it is fixed beforehand."""
        return None if self._shards is None else tuple(map(len, self._shards))

    def _used_by(self, step: int) -> int:
        """Return the samples of this epoch that all workers have used before a step."""
        deal = self._deal_in(self.epoch)
        if self._shards is None:
            return deal.used + min(step * self.batch * self._size, deal.lengths[0])
        return deal.used + sum(cut(length, deal.steps, step) for length in deal.lengths)

    def next(self) -> Batch:
        """Return the batch at the current position, and advance."""
        here = self._here(self.epoch, self.step)
        size = here.stop - here.start
        batch = self._pick() if size else []
        self.step += 1
        if self.step == self._deal.steps:
            self.epoch, self.step = self.epoch + 1, 0
        return batch, size

    def deal_to(self, places: Sequence[int]) -> None:
        """From here on, deal the remaining samples only to the workers at these places among the present ones."""
        epoch, step, used = self.epoch, self.step, self._used_by(self.step)
        if self._shards is not None:
            orders, steps = [self._shuffle(epoch, rank) for rank in range(self._size)], self._deal.steps
            self._left = _dealt([order[cut(len(order), steps, step) :] for order in orders], places)
            self._shards = _dealt(self._shards, places)
        self.dealt.append((epoch, step, tuple(places)))
        self._used, self._rank, self._size = used, [*places].index(self._rank), len(places)
        self.step, self._order_of = 0, -1
        self._deal = self._deal_for(-1)
        self.steps_per_epoch = self._deal.steps

    def give_indices(self) -> None:
        """Return indices instead of samples from now on: the caller takes the samples of many batches at once."""
        self._pick = lambda: [self.indices(self.epoch, self.step)]

    def give_nothing(self) -> None:
        """Return only the number of samples from now on."""
        self._pick = lambda: []
        self.draws = False

    def seek(self, epoch: int, step: int) -> None:
        """Go to a position."""
        self.epoch, self.step = epoch, step


class StreamFeed:
    """Batches of an IterableDataset, never held in memory.

    Every rank reads the whole stream and keeps its own part of each group of `batch * size` samples. That is what makes
    the assignment a pure function of the position, and all ranks see the end at the same step. A stream that shuffles
    itself must do so alike everywhere: it draws from global generators that are seeded by the epoch while it is read.
    """

    dealt = ()
    shards = None

    def __init__(self, data: Any, *, batch: int, seed: int, rank: int, size: int) -> None:
        self._data = data
        self.draws = False  # a stream has its own generators
        self.batch, self._seed, self._rank, self._size = batch, seed, rank, size
        self.steps_per_epoch: int | None = None
        self._ahead: list[Any]
        self.seek(0, 0)
        if not self._ahead:
            raise ValueError("the stream is empty: the IterableDataset gave no sample")

    @property
    def epochs(self) -> float:
        """Whole passes over the stream, whose length is unknown until it ends."""
        return float(self.epoch)

    def next(self) -> Batch:
        """Return the batch at the current position, and advance; begin the stream again at its end."""
        group = self._ahead
        mine = group[hand(len(group), self._size, self.batch, self._rank)]
        self.step += 1
        self._ahead = self._read()
        if not self._ahead:
            self.steps_per_epoch = self.step
            self.seek(self.epoch + 1, 0)
        return (collate(mine) if mine else []), len(mine)

    def seek(self, epoch: int, step: int) -> None:
        """Go to a position by reading up to it."""
        self.epoch, self.step = epoch, step
        with left_alone():
            seed_everything(fold(self._seed, epoch))
            self._stream: Iterator[Any] = iter(self._data)  # which may shuffle at once, or later
            self._generators = get_states()
        for _ in range(step):
            self._read()
        self._ahead = self._read()

    def distance(self, steps: int) -> float:
        """Raise: this is only used after `deal_to`."""
        raise NotImplementedError("a stream cannot be divided among fewer workers")

    def deal_to(self, places: Sequence[int]) -> None:
        """Raise: a stream is read in groups for a fixed number of workers."""
        raise NotImplementedError("a stream cannot be divided among fewer workers")

    def _read(self) -> list[Any]:
        """Read the next group of samples of all ranks, with the stream's own generators."""
        with left_alone():
            set_states(self._generators)
            group = list(islice(self._stream, self.batch * self._size))
            self._generators = get_states()
        return group


def hand(count: int, size: int, batch: int, rank: int) -> slice:
    """Return one worker's share when the samples of a step are dealt out among `size` workers.

    If batches are larger, no worker gets a single sample where that can be avoided, because BatchNorm cannot train on
    one; other workers then get none.

    >>> [hand(5, 4, 8, rank) for rank in range(4)]
    [slice(0, 3, None), slice(3, 5, None), slice(5, 5, None), slice(5, 5, None)]
    """
    busy = min(size, max(1, count // 2, -(-count // batch)))
    return slice(cut(count, busy, rank), cut(count, busy, rank + 1)) if rank < busy else slice(count, count)


def _dealt(shards: Sequence[Tensor], places: Sequence[int]) -> list[Tensor]:
    """Return the shards at some places, each extended by an equal part of the others' shards."""
    size = len(places)
    spare = torch.cat([shards[0][:0], *(shard for place, shard in enumerate(shards) if place not in places)])
    return [
        torch.cat([shards[place], spare[cut(len(spare), size, i) : cut(len(spare), size, i + 1)]])
        for i, place in enumerate(places)
    ]


@lru_cache(maxsize=4)
def _permutation(count: int, seed: int) -> Tensor:
    """Return a random permutation, cached for all workers of a process."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def make_feed(data: Any, *, batch: int, seed: int, rank: int, size: int, partition: Partition | None) -> Feed:
    """Return a feed for this kind of data."""
    if isinstance(data, IterableDataset):
        return StreamFeed(data, batch=batch, seed=seed, rank=rank, size=size)
    return IndexedFeed(data, batch=batch, seed=seed, rank=rank, size=size, partition=partition)


def fold(seed: int, *more: int) -> int:
    """Derive a seed from a seed and a key, well mixed, the same on every machine.

    >>> fold(0, 1) != fold(1, 0)
    True
    """
    state = seed & 0xFFFFFFFFFFFFFFFF
    for value in more:
        # One round of splitmix64 for each number folded in.
        state = (state + 0x9E3779B97F4A7C15 * (value + 1)) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state & 0x7FFFFFFFFFFFFFFF


__all__ = ["Batch", "Feed", "IndexedFeed", "SampleStore", "StreamFeed", "fold", "hand", "make_feed"]
