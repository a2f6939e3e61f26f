# SPDX-License-Identifier: Apache-2.0
"""N workers with batch b follow the path of one process with batch N·b."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from tests.zoo import adam, assert_close, make_classes, make_data, momentum, plain, simulate
from tests.zoo import classifier as make_classifier

from orchestra import AllReduce, ConfigError, Dirichlet, Epochs, LabelSorted, Steps
from orchestra.data.partitions import Partition
from orchestra.model.flat_optimizer import Factory


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("optimizer", [momentum, adam], ids=["momentum", "adam"])
def test_all_reduce_equals_large_batch_training(workers: int, optimizer: Factory, tmp_path: Path) -> None:
    result = simulate(AllReduce(), tmp_path, workers=workers, optimizer=optimizer, budget=Epochs(3))
    per_epoch = -(-101 // (6 * workers))  # the last step of an epoch has fewer samples, not the same on all workers
    expected = plain(optimizer=optimizer, size=workers, steps=3 * per_epoch)
    assert_close(result.model, expected, tolerance=2e-5 if optimizer is adam else 2e-6)
    assert result.summary.samples == 3 * 101


def test_a_last_batch_with_nothing_for_some(tmp_path: Path) -> None:
    data = partial(make_data, 25)  # 2 steps of 4 x 6: the second has one sample, for the first worker
    result = simulate(AllReduce(), tmp_path, workers=4, data=data, budget=Epochs(4))
    assert_close(result.model, plain(data=data, size=4, steps=8))


@pytest.mark.parametrize("partition", [LabelSorted(), Dirichlet(alpha=0.3)], ids=repr)
def test_uneven_shards_are_weighted_by_samples(partition: Partition, tmp_path: Path) -> None:
    given = {"model": make_classifier, "data": make_classes, "loss": torch.nn.functional.cross_entropy}
    result = simulate(AllReduce(), tmp_path, workers=3, partition=partition, budget=Steps(9), **given)
    expected = plain(size=3, partition=partition, steps=9, **given)  # type: ignore[arg-type]
    assert_close(result.model, expected)


def test_clipping_bounds_the_mean_gradient(tmp_path: Path) -> None:
    result = simulate(AllReduce(), tmp_path, workers=3, clip=0.05, budget=Steps(6))
    assert_close(result.model, plain(size=3, clip=0.05, steps=6))


def test_whole_layers_and_ranges_give_the_same(tmp_path: Path) -> None:
    def two_groups(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": [p for p in params if p.dim() > 1]}, {"params": [p for p in params if p.dim() <= 1]}]
        return momentum(groups)

    by_layer = simulate(AllReduce(), tmp_path / "layers", workers=3, optimizer=two_groups, budget=Steps(6))
    by_range = simulate(AllReduce(), tmp_path / "ranges", workers=3, budget=Steps(6))
    assert_close(by_layer.model, by_range.model)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (AllReduce(algorithm="ring", group=2), "strategy.group = 2 .*ring has no groups"),
        (AllReduce(group=2), "strategy.group = 2 .*native has no groups"),
        (AllReduce(algorithm="hierarchical", group=0), "strategy.group = 0 .*at least 1"),
        (AllReduce(algorithm="hierarchical", group="rack"), "must be a whole number, or None"),  # type: ignore[arg-type]
    ],
)
def test_groups_that_cannot_be_are_refused(strategy: AllReduce, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(strategy, tmp_path, workers=2)
