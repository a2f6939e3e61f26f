# SPDX-License-Identifier: Apache-2.0
"""Who gets which sample when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from orchestra import IID, Dirichlet, LabelSorted
from orchestra.data.feed import IndexedFeed, StreamFeed, fold, hand, make_feed
from orchestra.data.partitions import Partition

partitions = st.one_of(
    st.none(),
    st.just(IID()),
    st.just(LabelSorted()),
    st.builds(Dirichlet, alpha=st.sampled_from([0.01, 0.1, 1.0, 100.0])),
)


def numbered(count: int) -> tuple[Tensor, Tensor]:
    """Samples that are their own index, with labels in no order."""
    return torch.arange(count), torch.arange(count) * 7 % 5


def epoch_of(feed: Any) -> list[list[int]]:
    """One epoch, as the samples of each step."""
    start, steps = feed.epoch, []
    while feed.epoch == start:
        pieces, size = feed.next()
        assert size == (len(pieces[0]) if pieces else 0)
        assert all(len(piece) == size for piece in pieces)
        steps.append(pieces[0].tolist() if pieces else [])
    return steps


@given(
    count=st.integers(1, 120),
    size=st.integers(1, 6),
    batch=st.integers(1, 9),
    seed=st.integers(0, 5),
    partition=partitions,
)
@settings(max_examples=150, deadline=None)
def test_every_sample_once_an_epoch(count: int, size: int, batch: int, seed: int, partition: Partition | None) -> None:
    data = numbered(count)
    feeds = [IndexedFeed(data, batch=batch, seed=seed, rank=r, size=size, partition=partition) for r in range(size)]
    for _ in range(2):
        epochs = [epoch_of(feed) for feed in feeds]
        assert len({len(steps) for steps in epochs}) == 1
        assert len(epochs[0]) == feeds[0].steps_per_epoch
        assert Counter(i for steps in epochs for step in steps for i in step) == Counter(range(count))
        assert all(len(step) <= batch for steps in epochs for step in steps)
        # No step in which no worker has a sample: it would be a step without a gradient.
        assert all(any(steps[i] for steps in epochs) for i in range(len(epochs[0])))


@given(count=st.integers(1, 60), size=st.integers(1, 4), batch=st.integers(1, 7), seed=st.integers(0, 9))
@settings(deadline=None)
def test_a_pure_function_of_seed_epoch_rank_and_size(count: int, size: int, batch: int, seed: int) -> None:
    data = numbered(count)
    for rank in range(size):
        a = IndexedFeed(data, batch=batch, seed=seed, rank=rank, size=size)
        b = IndexedFeed(data, batch=batch, seed=seed, rank=rank, size=size)
        torch.manual_seed(count)  # whatever state the global generators are in
        forwards = [a.indices(e, s) for e in range(3) for s in range(a.steps_per_epoch or 0)]
        backwards = [b.indices(e, s) for e in reversed(range(3)) for s in reversed(range(b.steps_per_epoch or 0))]
        assert forwards == backwards[::-1]


@given(
    count=st.integers(1, 120),
    size=st.integers(2, 6),
    batch=st.integers(1, 9),
    partition=partitions,
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_every_sample_is_used_once_if_some_workers_stop(
    count: int, size: int, batch: int, partition: Partition | None, data: st.DataObject
) -> None:
    def feed(rank: int) -> IndexedFeed:
        return IndexedFeed(numbered(count), batch=batch, seed=1, rank=rank, size=size, partition=partition)

    feeds = [feed(rank) for rank in range(size)]
    epoch = data.draw(st.integers(0, 1))
    places = sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=size - 1)))
    step = data.draw(st.integers(0, (feeds[0].steps_per_epoch or 1) - 1))
    used: Counter[int] = Counter()
    for each in feeds:
        each.seek(epoch, 0)
        for _ in range(step):
            used.update(i for piece in each.next()[0][:1] for i in piece.tolist())
    before = [each.epochs for each in feeds]
    left = [feeds[place] for place in places]
    for each in left:
        each.deal_to(places)
    assert [each.epochs for each in feeds] == before
    for number in (epoch, epoch + 1):
        rest = [epoch_of(each) for each in left]
        assert len({len(steps) for steps in rest}) == 1
        assert Counter(i for steps in rest for step in steps for i in step) + used == Counter(range(count))
        assert all(len(step) <= batch for steps in rest for step in steps)
        assert {each.epochs for each in left} == {number + 1}
        used.clear()
    sought = feed(places[0])
    for at, within, dealt in left[0].dealt:
        sought.seek(at, within)
        sought.deal_to(dealt)
    sought.seek(left[0].epoch, left[0].step)
    assert [epoch_of(sought) for _ in range(2)] == [epoch_of(left[0]) for _ in range(2)]


def test_epochs_and_seeds_differ() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return IndexedFeed(numbered(50), batch=50, seed=seed, rank=0, size=1).indices(epoch, 0)

    assert len({tuple(order(s, e)) for s in range(5) for e in range(5)}) == 25
    assert fold(1, 2) == fold(1, 2) != fold(2, 1)


@given(
    count=st.integers(1, 60),
    size=st.integers(1, 4),
    batch=st.integers(1, 7),
    partition=partitions,
    epoch=st.integers(0, 2),
    data=st.data(),
)
@settings(deadline=None)
def test_seek_goes_on_where_it_was(
    count: int, size: int, batch: int, partition: Partition | None, epoch: int, data: st.DataObject
) -> None:
    samples, rank = numbered(count), size - 1
    run = IndexedFeed(samples, batch=batch, seed=1, rank=rank, size=size, partition=partition)
    step = data.draw(st.integers(0, (run.steps_per_epoch or 1) - 1))
    while (run.epoch, run.step) != (epoch, step):
        run.next()
    sought = IndexedFeed(samples, batch=batch, seed=1, rank=rank, size=size, partition=partition)
    sought.seek(epoch, step)
    for _ in range(5):
        (a, n), (b, m) = run.next(), sought.next()
        assert n == m
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        assert (run.epoch, run.step, run.epochs) == (sought.epoch, sought.step, sought.epochs)


def test_label_sorted_gives_runs_of_labels() -> None:
    _, labels = numbered(100)
    shards = LabelSorted().shards(labels, 5, seed=0)
    assert [sorted(set(labels[s].tolist())) for s in shards] == [[0], [1], [2], [3], [4]]


def test_dirichlet_is_uneven_for_small_alpha_and_even_for_large() -> None:
    labels = torch.arange(1000) % 10

    def unevenness(alpha: float) -> float:
        shards = Dirichlet(alpha=alpha).shards(labels, 4, seed=0)
        counts = torch.stack([torch.bincount(labels[s], minlength=10) for s in shards]).float()
        return float((counts / 100).std(0).mean())

    assert unevenness(1000) < 0.05 < 0.3 < unevenness(0.05)


class Listed(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tensors[0][index], self.tensors[1][index]


class Plain(Listed):
    """Python numbers instead of tensors."""

    def __getitem__(self, index: int) -> Any:
        return self.tensors[0][index].item(), self.tensors[1][index].item()


@pytest.mark.parametrize("kind", [Listed, Plain, TensorDataset])
@pytest.mark.parametrize("partition", [None, LabelSorted(), Dirichlet(alpha=0.3)], ids=repr)
def test_a_dataset_is_a_tuple_of_tensors(kind: type[Any], partition: Partition | None) -> None:
    tensors = numbered(37)
    for rank in range(3):
        given_ = {"batch": 4, "seed": 2, "rank": rank, "size": 3, "partition": partition}
        a = make_feed(tensors, **given_)  # type: ignore[arg-type]
        b = make_feed(kind(*tensors), **given_)  # type: ignore[arg-type]
        for _ in range(9):
            (x, n), (y, m) = a.next(), b.next()
            assert n == m
            assert all(torch.equal(p, q) for p, q in zip(x, y, strict=True))


class Stream(IterableDataset[tuple[int, int]]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((i, i * 7 % 5) for i in range(self.count))


@given(count=st.integers(1, 100), size=st.integers(1, 5), batch=st.integers(1, 7))
@settings(deadline=None)
def test_a_stream_is_dealt_out_once_and_ends_for_all_at_once(count: int, size: int, batch: int) -> None:
    feeds = [StreamFeed(Stream(count), seed=1, batch=batch, rank=r, size=size) for r in range(size)]
    for _ in range(2):
        epochs = [epoch_of(feed) for feed in feeds]
        assert {len(steps) for steps in epochs} == {-(-count // (batch * size))}
        assert Counter(i for steps in epochs for step in steps for i in step) == Counter(range(count))
        assert all(len(step) <= batch for steps in epochs for step in steps)


@given(count=st.integers(1, 60), size=st.integers(1, 3), batch=st.integers(1, 5), past=st.integers(0, 20))
@settings(deadline=None)
def test_a_stream_can_be_resumed(count: int, size: int, batch: int, past: int) -> None:
    run = StreamFeed(Stream(count), seed=1, batch=batch, rank=size - 1, size=size)
    for _ in range(past):
        run.next()
    sought = StreamFeed(Stream(count), seed=1, batch=batch, rank=size - 1, size=size)
    sought.seek(run.epoch, run.step)
    for _ in range(6):
        (a, n), (b, m) = run.next(), sought.next()
        assert n == m
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        assert (run.epoch, run.step, run.epochs) == (sought.epoch, sought.step, sought.epochs)


def test_an_empty_stream_is_refused() -> None:
    with pytest.raises(ValueError, match="the stream is empty"):
        StreamFeed(Stream(0), seed=1, batch=1, rank=0, size=1)


def test_a_stream_is_not_read_further_than_one_group_ahead() -> None:
    read: list[int] = []

    class Endless(IterableDataset[tuple[int, int]]):
        def __iter__(self) -> Iterator[tuple[int, int]]:
            i = 0
            while True:
                read.append(i)
                yield i, 0
                i += 1

    feed = StreamFeed(Endless(), seed=1, batch=4, rank=0, size=3)
    for _ in range(5):
        feed.next()
    assert len(read) <= 12 * 6


@given(count=st.integers(0, 60), size=st.integers(1, 8), batch=st.integers(1, 9))
def test_no_worker_is_dealt_a_single_sample(count: int, size: int, batch: int) -> None:
    count = min(count, size * batch)
    sizes = [s.stop - s.start for s in (hand(count, size, batch, rank) for rank in range(size))]
    assert sum(sizes) == count
    assert len(sizes) == size
    assert max(sizes) <= batch
    if batch > 2 and count > 1:  # three samples in batches of two: one worker has a single sample
        assert 1 not in sizes


@pytest.mark.parametrize("partition", [None, LabelSorted(), Dirichlet(alpha=100.0)], ids=repr)
@pytest.mark.parametrize(("count", "size", "batch"), [(140_003, 2, 1000), (66_000, 1, 999), (200_001, 3, 4096)])
def test_many_samples_never_make_a_batch_too_large(
    count: int, size: int, batch: int, partition: Partition | None
) -> None:
    """Samples are cut exactly, not at multiples of anything, however many there are."""
    data = (torch.zeros(count, 1), torch.arange(count) % 5)
    seen = torch.zeros(count, dtype=torch.int64)
    for rank in range(size):
        feed = IndexedFeed(data, batch=batch, seed=1, rank=rank, size=size, partition=partition)
        assert feed.steps_per_epoch is not None
        sizes = []
        for step in range(feed.steps_per_epoch):
            chosen = feed.indices(0, step)
            sizes.append(len(chosen))
            seen[torch.tensor(chosen, dtype=torch.int64)] += 1
        assert max(sizes) <= batch
        if partition is not None:
            assert max(sizes) - min(sizes) <= 1
    assert bool((seen == 1).all())
