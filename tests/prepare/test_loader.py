# SPDX-License-Identifier: Apache-2.0
"""Every sample once an epoch, on one worker; equally many batches on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.prepare.loops import COUNT, make_loader
from tests.zoo import BATCH, SEED
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from orchestra.data.feed import IndexedFeed
from orchestra.user_loop.loader import Loader, WorkerShare, count, problems_of


def numbers(many: int, **given: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(many)), **given)


@given(many=st.integers(1, 90), batch=st.integers(1, 9), size=st.integers(2, 5), drop=st.booleans())
def test_every_sample_once_and_equally_many_batches(many: int, batch: int, size: int, drop: bool) -> None:
    loader = numbers(many, batch_size=batch, shuffle=True, drop_last=drop)
    if [*problems_of(loader, size)]:
        assert many < size * (batch if drop else 1)
        return
    shares = [WorkerShare(loader, seed=SEED, rank=rank, size=size).batches(3) for rank in range(size)]
    assert len({len(share) for share in shares}) == 1
    assert len(shares[0]) == len(WorkerShare(loader, seed=SEED, rank=0, size=size))
    used = [i for share in shares for part in share for i in part]
    assert len(used) == len({*used})
    sizes = {len(part) for share in shares for part in share}
    if drop:
        assert sizes == {batch}
        assert many - len(used) < batch * size
    else:
        assert len(used) == many
        assert max(sizes) <= max(batch, 2)
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 2  # of a step by one, and steps by one from each other


@pytest.mark.parametrize("size", [2, 3])
def test_the_batches_are_those_of_train(size: int) -> None:
    loader = make_loader()
    for rank in range(size):
        share = WorkerShare(loader, seed=SEED, rank=rank, size=size)
        feed = IndexedFeed(loader.dataset, batch=BATCH, seed=SEED, rank=rank, size=size)
        for epoch in range(3):
            assert share.batches(epoch) == [feed.indices(epoch, t) for t in range(COUNT // BATCH // size)]


def test_epochs_differ_and_the_position_is_kept() -> None:
    def seen(loader: Loader, most: int = 99) -> list[list[int]]:
        found = []
        for (batch,) in loader:
            found.append(batch.tolist())
            if len(found) == most:
                break
        return found

    def make() -> Loader:
        return Loader(numbers(20, batch_size=3, shuffle=True, num_workers=0), seed=SEED, rank=1, size=2)

    loader = make()
    first, second, third = seen(loader), seen(loader), seen(loader, most=2)
    assert first != second
    assert third != second[:2]
    assert len(loader) == len(first) == 4
    assert seen(loader) != third  # one that is broken off is over
    again = make()
    again.seek(1, 2)
    assert again.position == 1.5
    assert seen(again) == second[2:]
    assert again.position == 2.0


def test_a_sampler_of_ones_own_draws_the_same_everywhere() -> None:
    sampler = WeightedRandomSampler([1.0, 2.0, 3.0] * 8, 24)
    loader = numbers(24, batch_size=4, sampler=sampler)
    torch.manual_seed(1)
    one = WorkerShare(loader, seed=SEED, rank=0, size=2).batches(0)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert WorkerShare(loader, seed=SEED, rank=0, size=2).batches(0) == one
    assert torch.equal(torch.get_rng_state(), before)
    in_order = numbers(8, batch_size=2)
    assert WorkerShare(in_order, seed=SEED, rank=1, size=2).batches(7) == [[2, 3], [6, 7]]


def test_the_rest_of_the_loader_is_as_it_was() -> None:
    plain = numbers(12, batch_size=2, collate_fn=lambda samples: {"x": torch.stack([s[0] for s in samples])})
    loader = Loader(plain, seed=0, rank=0, size=2)
    told: list[int] = []
    loader.fetched = told.append
    assert [batch["x"].shape for batch in loader] == [(2,)] * 3
    assert told == [2, 2, 2]
    assert loader.dataset is plain.dataset
    assert count(3) == 1


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(9))


@pytest.mark.parametrize(
    ("loader", "told"),
    [
        (DataLoader(Stream()), "a stream cannot be divided"),
        (numbers(9, sampler=DistributedSampler(range(9), 2, 0)), "leave it out"),  # type: ignore[arg-type]
        (numbers(9, batch_sampler=[[1, 2], [3]]), "cannot be divided"),
        (numbers(9, batch_size=None), "cannot be divided"),
        (numbers(1), "fewer than the 2 workers"),
        (numbers(9, batch_size=8, drop_last=True), "make no batch for each"),
    ],
)
def test_what_cannot_be_shared_out(loader: DataLoader[Any], told: str) -> None:
    (problem,) = problems_of(loader, 2)
    assert told in str(problem)
    assert not [*problems_of(loader, 1)]
