# SPDX-License-Identifier: Apache-2.0
"""What torch.distributed would do beside a strategy is refused: wrappers around the model, synchronised layers."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes import together, values
from tests.zoo import make_model, sgd, train
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import orchestra


def open_group(file: Path) -> None:
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)


def steps(model: nn.Module, optimizer: Any, count: int = 2) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(2, 7)).sum().backward()
        optimizer.step()
    optimizer.finish()


def around(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def around_a_part(model: Any) -> Any:
    DistributedDataParallel(model[0])
    return model


def around_more(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(nn.Sequential(model, nn.Linear(1, 1)))


def around_data(model: nn.Module) -> nn.Module:
    return nn.DataParallel(model)


def sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


WRAPPED = [around, around_a_part, around_more, around_data, sharded]


def wrapped_later(wrap: Callable[[nn.Module], nn.Module], file: Path) -> None:
    open_group(file)
    model = make_model()
    model, optimizer = orchestra.prepare(
        model, sgd(model.parameters()), strategy="localsgd(tau=2)", cluster=orchestra.Attached(patience=20)
    )
    steps(wrap(model), optimizer)


@pytest.mark.parametrize("wrap", WRAPPED, ids=lambda wrap: wrap.__name__)
def test_a_wrapper_after_prepare_is_refused(wrap: Any, tmp_path: Path) -> None:
    for outcome in together(2, partial(wrapped_later, wrap, tmp_path / "group")):
        assert "DataParallel" in outcome.error
        assert "leave the wrapper out" in outcome.error
        assert outcome.code in (2, 10)  # its own error, or what the other one told


@pytest.mark.parametrize("wrap", [around, around_data], ids=lambda wrap: wrap.__name__)
def test_a_wrapper_after_prepare_is_refused_with_one_worker(wrap: Any, tmp_path: Path) -> None:
    (outcome,) = together(1, partial(wrapped_later, wrap, tmp_path / "group"))
    assert (outcome.kind, outcome.code) == ("ConfigError", 2)
    assert "leave the wrapper out" in outcome.error


def test_a_wrapper_from_before_is_refused_when_it_is_called(tmp_path: Path) -> None:
    def call() -> None:
        open_group(tmp_path / "group")
        model = make_model()
        wrapper = around(model)
        _, optimizer = orchestra.prepare(model, sgd(model.parameters()), cluster=orchestra.Attached(patience=20))
        steps(wrapper, optimizer)

    for outcome in together(2, call):
        assert "DistributedDataParallel" in outcome.error
        assert "leave the wrapper out" in outcome.error


def test_a_wrapper_that_is_given_or_inside_is_refused(tmp_path: Path) -> None:
    def call() -> None:
        open_group(tmp_path / "group")
        for model in (around(make_model()), nn.Sequential(around(make_model()))):
            with pytest.raises(
                orchestra.ConfigError, match=r"model\S* = .*DistributedDataParallel.* leave the wrapper"
            ):
                orchestra.prepare(model, sgd(model.parameters()))

    values(together(1, call))


def test_other_models_may_be_wrapped_and_this_one_once_it_is_finished(tmp_path: Path) -> None:
    def call() -> None:
        open_group(tmp_path / "group")
        model = make_model()
        model, optimizer = orchestra.prepare(model, sgd(model.parameters()))
        around(make_model())
        nn.Sequential(model)
        steps(model, optimizer)
        around(model)(torch.ones(2, 7))

    values(together(1, call))


def normed(kind: type[nn.Module] = nn.SyncBatchNorm) -> nn.Module:
    return nn.Sequential(nn.Linear(7, 3), kind(3), nn.Linear(3, 1))


def test_synchronised_batch_norm_is_refused_among_several() -> None:
    def call(make: Any, later: Any) -> None:
        model = make()
        model, optimizer = orchestra.prepare(model, sgd(model.parameters()), cluster=orchestra.Attached(patience=20))
        steps(later(model), optimizer)

    convert = nn.SyncBatchNorm.convert_sync_batchnorm
    for make, later in ((normed, lambda model: model), (partial(normed, nn.BatchNorm1d), convert)):
        for outcome in together(2, partial(call, make, later)):
            assert "model.1 = SyncBatchNorm" in outcome.error.replace("'", "")
            assert "use BatchNorm" in outcome.error
            assert outcome.code in (2, 10)


@pytest.mark.parametrize("cluster", [orchestra.Local(workers=2), orchestra.Simulated(workers=2)])
def test_train_refuses_synchronised_batch_norm(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(orchestra.ConfigError, match="use BatchNorm"):
        train(orchestra.AllReduce(), tmp_path / "run", model=normed, cluster=cluster)


def test_synchronised_batch_norm_is_batch_norm_with_one_worker() -> None:
    found = []
    for kind in (nn.SyncBatchNorm, nn.BatchNorm1d):
        torch.manual_seed(0)
        model = normed(kind)
        model, optimizer = orchestra.prepare(model, sgd(model.parameters()))
        steps(model, optimizer)
        found.append(model.state_dict())
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name])
