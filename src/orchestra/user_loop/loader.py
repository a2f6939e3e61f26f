# SPDX-License-Identifier: Apache-2.0
"""Every worker's share of a DataLoader.

    order ← a permutation by (seed, epoch), if the loader shuffles; else the order of its sampler
    cut the order into as many groups as an epoch has steps; cut group t into one part for each worker

All workers take equally many batches, every sample is in one of them, and their sizes differ by at most one: there is
no small batch at the end. If the number of samples is a multiple of batch times workers, these are the batches of
`orchestra.train`. With one worker the loader is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from orchestra.core.vectors import cut
from orchestra.data.feed import fold
from orchestra.data.random_state import left_alone, seed_everything
from orchestra.errors import Problem


def problems_of(loader: Any, workers: int) -> Iterator[Problem]:
    """Yield the reasons why a loader cannot be divided among the workers."""
    if not isinstance(loader, DataLoader):
        message = "must be a torch DataLoader; leave it out if every process reads its own samples"
        yield Problem("loader", type(loader).__name__, message)
        return
    if workers == 1:
        return
    alone = "or leave the loader out of the call, and let every process read its own samples"
    if isinstance(loader.dataset, IterableDataset):
        message = f"a stream cannot be divided: use a map-style Dataset, {alone}"
        yield Problem("loader.dataset", type(loader.dataset).__name__, message)
        return
    if isinstance(loader.sampler, DistributedSampler):
        yield Problem("loader.sampler", "DistributedSampler", "leave it out: `prepare` gives every worker its share")
    elif type(loader.batch_sampler) is not BatchSampler:
        name = type(loader.batch_sampler).__name__
        yield Problem("loader.batch_sampler", name, f"cannot be divided: use batch_size=, {alone}")
    elif len(loader.sampler) < workers:  # type: ignore[arg-type]
        message = f"samples are fewer than the {workers} workers: use fewer workers or more data"
        yield Problem("loader", len(loader.sampler), message)  # type: ignore[arg-type]
    elif loader.drop_last and len(loader.sampler) < workers * (loader.batch_size or 1):  # type: ignore[arg-type]
        message = f"samples make no batch for each of {workers} workers: use drop_last=False, or smaller batches"
        yield Problem("loader", len(loader.sampler), message)  # type: ignore[arg-type]


class WorkerShare:
    """One worker's batches of samples, epoch by epoch: a batch sampler."""

    def __init__(self, loader: DataLoader[Any], *, seed: int, rank: int, size: int) -> None:
        assert loader.batch_size is not None
        self._sampler, self._drop_last = loader.sampler, loader.drop_last
        self._seed, self._rank, self._size = seed, rank, size
        self._together = loader.batch_size * size
        self.epoch = self.start = 0

    def __len__(self) -> int:
        return self._steps(len(self._sampler))  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches(self.epoch)[self.start :])

    def batches(self, epoch: int) -> list[list[int]]:
        """Return the batches of an epoch."""
        order = self._order(epoch)
        steps = self._steps(len(order))
        count = steps * self._together if self._drop_last else len(order)
        found = []
        for t in range(steps):
            group = order[cut(count, steps, t) : cut(count, steps, t + 1)]
            found.append(group[cut(len(group), self._size, self._rank) : cut(len(group), self._size, self._rank + 1)])
        return found

    def _steps(self, count: int) -> int:
        if self._drop_last:
            return count // self._together
        return min(-(-count // self._together), count // self._size)  # no worker has an empty batch

    def _order(self, epoch: int) -> list[Any]:
        sampler, seed = self._sampler, fold(self._seed, epoch)
        if type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None:
            count = len(sampler)
            return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
        with left_alone():
            seed_everything(seed)  # all workers must draw the same
            return list(sampler)


class Loader:
    """A worker's share of a DataLoader, reshuffled every epoch; with the attributes of the DataLoader."""

    def __init__(self, loader: DataLoader[Any], *, seed: int, rank: int, size: int) -> None:
        self._share = WorkerShare(loader, seed=seed, rank=rank, size=size) if size > 1 else None
        self._inner = loader if self._share is None else _rebatched(loader, self._share)
        self.epoch = 0  # the present one, or the next
        self.taken = 0  # batches of it
        self.fetched: Callable[[int], None] = lambda samples: None  # called with the size of every batch
        self._resumed = 0
        self._left: tuple[int, int] | None = None  # where the loop first left a pass before its end

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __iter__(self) -> Iterator[Any]:
        epoch, start, self._resumed = self.epoch, self._resumed, 0
        self.taken = start
        try:
            for batch, samples in self._batches(epoch, start):
                self.taken += 1
                self.fetched(samples)
                yield batch
        finally:
            self._left = self._left or self._short()
            self.epoch, self.taken = epoch + 1, 0

    def _short(self) -> tuple[int, int] | None:
        return (self.epoch, self.taken) if 0 < self.taken < len(self) else None

    @property
    def left(self) -> str | None:
        """Where the loop first left a pass before its end, if it did."""
        found = self._left or self._short()
        return found and f"epoch {found[0] + 1} after {found[1]} of {len(self)} batches"

    def _batches(self, epoch: int, start: int) -> Iterator[tuple[Any, int]]:
        if self._share is None:
            for place, batch in enumerate(self._inner):
                if place >= start:
                    yield batch, count(batch)
            return
        self._share.epoch, self._share.start = epoch, start
        sizes = map(len, self._share.batches(epoch)[start:])
        yield from zip(self._inner, sizes, strict=True)

    @property
    def position(self) -> float:
        """The number of passes over the data so far."""
        return self.epoch + self.taken / len(self) if self.taken else float(self.epoch)

    def seek(self, epoch: int, taken: int) -> None:
        """Begin the next pass at this epoch, after `taken` batches."""
        self.epoch, self.taken, self._resumed = epoch, taken, taken


def _rebatched(loader: DataLoader[Any], share: WorkerShare) -> DataLoader[Any]:
    """Return the same loader with other batches."""
    return DataLoader(
        loader.dataset,
        batch_sampler=share,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def count(batch: Any) -> int:
    """Return the number of samples of a batch, judged by the length of its first tensor or array.

    >>> count({"input": [torch.zeros(3, 2)], "target": torch.zeros(3)})
    3
    """
    todo = [batch]
    while todo:
        match todo.pop(0):
            case Tensor() | np.ndarray() as found if found.ndim:
                return len(found)
            case Mapping() as found:
                todo = [*found.values(), *todo]
            case list() | tuple() as found:
                todo = [*found, *todo]
    return 1


__all__ = ["Loader", "WorkerShare", "count", "problems_of"]
