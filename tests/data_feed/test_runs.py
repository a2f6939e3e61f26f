# SPDX-License-Identifier: Apache-2.0
"""All kinds of data through whole runs."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.zoo import (
    BATCH,
    COUNT,
    SEED,
    Dicey,
    Trap,
    assert_close,
    assert_same,
    classifier,
    die_after,
    make_classes,
    make_data,
    my_rank,
    plain,
    train,
    trapped,
)
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from orchestra import AllReduce, ConfigError, Epochs, LocalSGD, ParameterServer, Samples, Steps, Strategy
from orchestra.core.vectors import cut
from orchestra.data.partitions import Dirichlet
from orchestra.engine import checkpoint
from orchestra.errors import WorkerLost
from orchestra.runs.facts import scores_of


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, count: int = COUNT) -> None:
        self.count = count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(*make_data(self.count), strict=True)


STRATEGIES: list[Strategy[Any]] = [AllReduce(), ParameterServer(), LocalSGD(tau=2)]
SERVERLESS = [s for s in STRATEGIES if not s.layout.servers]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
def test_a_dataset_trains_like_a_tuple(strategy: Strategy[Any], tmp_path: Path) -> None:
    tensors = train(strategy, tmp_path / "tuple", budget=Epochs(1))
    dataset = train(strategy, tmp_path / "dataset", budget=Epochs(1), data=lambda: TensorDataset(*make_data()))
    assert_same(tensors.model, dataset.model)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
def test_a_stream_ends_after_its_epochs(strategy: Strategy[Any], workers: int, tmp_path: Path) -> None:
    result = train(strategy, tmp_path, workers=workers, data=Stream, budget=Epochs(2))
    assert result.summary.samples == 2 * COUNT
    assert result.summary.steps == 2 * -(-COUNT // (6 * workers))


def test_a_stream_in_the_order_of_its_samples(tmp_path: Path) -> None:
    """The stream's order is the order of training: one process that reads it in groups of N·b goes the same way."""
    result = train(AllReduce(), tmp_path, workers=2, data=Stream, budget=Epochs(1))
    torch.manual_seed(SEED)
    module = plain(steps=0)
    inner = torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.9)
    for x, y in zip(*(torch.split(t, 12) for t in make_data()), strict=True):
        inner.zero_grad()
        torch.autograd.backward(torch.nn.functional.mse_loss(module(x), y))
        inner.step()
    assert_close(result.model, module)


def falling(epochs: float) -> float:
    return 1 / (1 + epochs)


@pytest.mark.parametrize("strategy", SERVERLESS, ids=lambda s: type(s).__name__)
def test_a_stream_resumes_bit_for_bit_also_with_a_schedule(strategy: Strategy[Any], tmp_path: Path) -> None:
    out = tmp_path / "run"
    given: dict[str, Any] = {
        "workers": 2, "data": partial(Stream, 40), "schedule": falling, "budget": Epochs(4),
        "checkpoint_every": Steps(7),
    }  # fmt: skip
    # Sample 1 comes in the first step of every epoch: this trap springs in the third.
    calls = tmp_path / "calls"
    death = Trap(1, partial(_die_the_third_time, calls, out / "checkpoints" / "step-00000007"))
    with pytest.raises(WorkerLost):
        train(strategy, out, model=trapped(death), **given)
    resumed = train(strategy, out, model=trapped(), resume=True, **given)
    never = train(strategy, tmp_path / "never", model=trapped(), **given)
    assert_same(resumed.model, never.model)


def _die_the_third_time(calls: Path, after: Path) -> None:
    with calls.open("a") as file:
        file.write("x")
    if calls.stat().st_size >= 3:
        die_after(after)


def off(epochs: float) -> float:
    return 1.0 if epochs < 1 else 0.0


def test_a_schedule_moves_on_over_a_stream(tmp_path: Path) -> None:
    three = train(AllReduce(), tmp_path / "three", workers=2, data=Stream, schedule=off, budget=Epochs(3))
    one = train(AllReduce(), tmp_path / "one", workers=2, data=Stream, schedule=off, budget=Epochs(1))
    assert_same(three.model, one.model)


@pytest.mark.usefixtures("no_process")
def test_servers_do_not_see_where_a_stream_ends(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"schedule .* cannot be followed by servers"):
        train(ParameterServer(), tmp_path, workers=2, data=Stream, schedule=off, budget=Epochs(3))


def test_samples_are_a_budget(tmp_path: Path) -> None:
    result = train(AllReduce(), tmp_path, workers=2, budget=Samples(60))
    assert result.summary.samples == 60


def test_the_first_budget_to_run_out_ends_the_run(tmp_path: Path) -> None:
    result = train(AllReduce(), tmp_path, workers=2, budget=Epochs(50) | Steps(4) | Samples(1000))
    assert result.summary.steps == 4


class Shuffled(IterableDataset[tuple[Tensor, Tensor]]):
    """Shuffles itself at the start of every pass."""

    def __init__(self, way: str, count: int = COUNT) -> None:
        self.way, self.count = way, count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = make_data(self.count)
        order = list(range(self.count))
        if self.way == "random":
            random.shuffle(order)
        elif self.way == "numpy":
            np.random.shuffle(order)
        else:
            order = torch.randperm(self.count).tolist()
        return iter([(x[i], y[i]) for i in order])


class Buffered(IterableDataset[tuple[Tensor, Tensor]]):
    """Draws while it is read, as a shuffle buffer does."""

    def __init__(self, count: int = COUNT) -> None:
        self.count = count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        held: list[tuple[Tensor, Tensor]] = []
        for sample in zip(*make_data(self.count), strict=True):
            held.append(sample)
            if len(held) == 16:
                yield held.pop(random.randrange(16))
        random.shuffle(held)
        yield from held


class Noting(nn.Module):
    """Writes down the samples it meets, a line a step, in a file of its process."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.inner = Dicey()
        self.folder = folder

    def forward(self, x: Tensor) -> Tensor:
        if my_rank() >= 0:
            with (self.folder / f"seen-{os.getpid()}").open("a") as file:
                file.write(f"{torch.round(x[:, 0] * 100).int().tolist()}\n")
        y: Tensor = self.inner(x)
        return y


shuffled: dict[str, Any] = {way: partial(Shuffled, way) for way in ("random", "numpy", "torch")} | {"buffer": Buffered}
each_way = pytest.mark.parametrize("stream", shuffled.values(), ids=shuffled.keys())


@each_way
def test_a_stream_that_shuffles_itself_gives_every_sample_once(stream: Any, tmp_path: Path) -> None:
    workers = 3
    given: dict[str, Any] = {"workers": workers, "data": stream, "budget": Epochs(2)}
    train(AllReduce(), tmp_path / "run", model=partial(Noting, tmp_path), **given)
    per_epoch = -(-COUNT // (6 * workers))
    by_worker = [[json.loads(line) for line in p.read_text().splitlines()] for p in tmp_path.glob("seen-*")]
    assert [len(steps) for steps in by_worker] == [2 * per_epoch] * workers
    orders = []
    for epoch in range(2):
        within = slice(epoch * per_epoch, (epoch + 1) * per_epoch)
        orders.append([i for steps in by_worker for taken in steps[within] for i in taken])
        assert sorted(orders[-1]) == list(range(COUNT))
    assert orders[0] != orders[1]  # shuffled again
    assert orders[0] != sorted(orders[0])


@each_way
def test_a_stream_that_shuffles_itself_resumes_bit_for_bit(stream: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    given: dict[str, Any] = {
        "workers": 2, "data": partial(stream, count=40), "budget": Epochs(4), "checkpoint_every": Steps(7),
    }  # fmt: skip
    death = Trap(1, partial(_die_the_third_time, tmp_path / "calls", out / "checkpoints" / "step-00000007"))
    with pytest.raises(WorkerLost):
        train(AllReduce(), out, model=trapped(death, model=Dicey), **given)
    assert checkpoint.newest(out / "checkpoints")[0].step == 7  # of 4 steps an epoch
    resumed = train(AllReduce(), out, model=trapped(model=Dicey), resume=True, **given)
    assert_same(resumed.model, train(AllReduce(), tmp_path / "never", model=trapped(model=Dicey), **given).model)


@pytest.mark.parametrize("strategy", ["allreduce", "ps"])
def test_scores_of_shards_have_their_true_samples(strategy: str, tmp_path: Path) -> None:
    partition = Dirichlet(alpha=0.3)

    def score(model: nn.Module, data: Any) -> float:
        return 0.0

    train(
        strategy, tmp_path, data=make_classes, loss=F.cross_entropy, model=classifier, partition=partition,
        budget=Epochs(1), evaluate=score, evaluation_data=make_classes, evaluate_every=Steps(2),
    )  # fmt: skip
    shards = partition.shards(make_classes()[1], 3, SEED)
    steps = max(-(-len(shard) // BATCH) for shard in shards)
    expected = {n: sum(cut(len(s), steps, 2 * n) for s in shards) for n in range(1, steps // 2 + 1)}
    found = {s.number: s.samples for s in scores_of(tmp_path)}
    assert {n: found[n] for n in expected} == expected
