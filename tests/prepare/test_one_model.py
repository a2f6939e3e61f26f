# SPDX-License-Identifier: Apache-2.0
"""All workers end with one model, or with an error; and with one of whatever else the loop keeps."""

from __future__ import annotations

import contextlib
import os
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.prepare.loops import equal
from tests.processes import together, values
from tests.zoo import make_data, make_model, sgd
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import orchestra
from orchestra.errors import OrchestraError


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def prepared(strategy: str, model: Any = None) -> tuple[Any, Any]:
    module = make_model() if model is None else model
    return orchestra.prepare(
        module, sgd(module.parameters()), strategy=strategy, cluster=orchestra.Attached(patience=20)
    )


def step(model: nn.Module, optimizer: Any) -> None:
    """With samples of this worker's own."""
    x, y = make_data(32)
    mine = slice(8 * rank(), 8 * rank() + 8)
    optimizer.zero_grad()
    F.mse_loss(model(x[mine]), y[mine]).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


# No step.


def by_hand(strategy: str) -> None:
    with contextlib.suppress(SystemExit):
        model, optimizer = prepared(strategy)
        for _ in range(3):
            model(torch.ones(2, 7)).sum().backward()
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-0.1 * (rank() + 1))
        optimizer.finish()


@pytest.mark.parametrize("strategy", ["allreduce", "localsgd(tau=2)", "ps", "ps(consistency=asp())"])
def test_a_loop_without_a_step_is_refused(strategy: str) -> None:
    workers = together(3, partial(by_hand, strategy))
    for outcome in workers[:2] if "ps" in strategy else workers:
        assert outcome.kind in ("OrchestraError", "Stopped"), outcome.error
        assert "after 0 steps" in outcome.error
        assert "Call optimizer.step()" in outcome.error


def test_a_loop_without_a_step_is_refused_with_one_worker() -> None:
    with pytest.raises(OrchestraError, match="after 0 steps"):
        by_hand("allreduce")


# One model.


def touched(strategy: str, by: float, *, frozen: bool = False) -> tuple[dict[str, Tensor], float]:
    """Three steps, and something done to a parameter at worker 1 beside them."""
    torch.manual_seed(0)
    model = make_model()
    model[2].bias.requires_grad_(not frozen)  # type: ignore[index]
    model, optimizer = prepared(strategy, model)
    for _ in range(3):
        step(model, optimizer)
    bias = model[2].bias.data
    before = float(bias[1])
    bias[1] += by * float(bias.abs().max()) if rank() == 1 else 0.0
    optimizer.finish()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, before


@pytest.mark.parametrize(("strategy", "frozen"), [("allreduce", False), ("allreduce", True), ("ps", True)])
def test_what_differs_by_more_than_rounding_is_named(strategy: str, frozen: bool) -> None:
    def call() -> None:
        with contextlib.suppress(SystemExit):
            touched(strategy, 0.5, frozen=frozen)

    for outcome in together(4 if strategy == "ps" else 3, call)[:3]:
        assert outcome.kind in ("ClusterError", "Stopped"), outcome.error
        assert "parameter 2.bias on worker 1 is up to" in outcome.error
        assert "from that of worker 0" in outcome.error
        assert "also=[...]" in outcome.error


def test_nan_on_one_worker_is_no_rounding() -> None:
    for outcome in together(2, partial(touched, "allreduce", float("nan"))):
        assert "parameter 2.bias on worker 1" in outcome.error


def test_below_rounding_all_take_that_of_worker_0() -> None:
    mine, *others = values(together(3, partial(touched, "allreduce", 1e-6)))
    for theirs in others:
        assert equal(mine[0], theirs[0])
    assert float(mine[0]["2.bias"][1]) == mine[1]


def with_buffer(value: float) -> Any:
    """A running mean that is `value` on worker 1, and a mask of −∞ everywhere."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    model, optimizer = prepared("allreduce", model)
    step(model, optimizer)
    if rank() == 1:
        model[1].running_mean[0] = value
    optimizer.finish()
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_buffers_are_equal_in_the_end_whatever_one_worker_had(value: float) -> None:
    mine, theirs = values(together(2, partial(with_buffer, value)))
    for name, buffer in mine.items():
        assert torch.equal(buffer.nan_to_num(7.0), theirs[name].nan_to_num(7.0)), name
    assert mine["1.running_mean"].isfinite().all()  # worker 1 is left out
    assert mine["mask"].tolist() == [0.0, -torch.inf]


def test_where_each_worker_has_its_own_the_mean_is_taken() -> None:
    mine, theirs = values(together(2, partial(touched, "localsgd(tau=8)", 0.5)))
    assert equal(mine[0], theirs[0])


# Also.


def averaging(strategy: str) -> Any:
    """A moving average of this worker's own replica: as it was, and as `finish` leaves it."""
    torch.manual_seed(0)
    with contextlib.suppress(SystemExit):
        model, optimizer = prepared(strategy, nn.Sequential(nn.Linear(7, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)))
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)  # type: ignore[no-untyped-call]
        loss = torch.tensor([1.0 + rank()])
        for _ in range(4):
            step(model, optimizer)
            ema.update_parameters(model)
        before = {name: tensor.clone() for name, tensor in ema.state_dict().items()}
        optimizer.finish(also=[ema, loss])
        return before, ema.state_dict(), loss
    return None


@pytest.mark.parametrize("strategy", ["localsgd(tau=3)", "ps(consistency=asp())", "allreduce"])
def test_a_moving_average_is_averaged(strategy: str) -> None:
    found = values(together(3, partial(averaging, strategy)))[: 2 if "ps" in strategy else 3]
    befores, afters, losses = zip(*found, strict=True)
    assert befores[0].keys() >= {"n_averaged", "module.0.weight", "module.1.running_mean"}
    assert not all(equal(befores[0], before) for before in befores[1:])
    for after in afters:
        assert equal(after, afters[0])
        for name, tensor in after.items():
            mean = torch.stack([before[name].double() for before in befores]).mean(0)
            torch.testing.assert_close(tensor.double(), mean, rtol=1e-6, atol=1e-7)
    assert [*map(float, losses)] == [sum(1.0 + i for i in range(len(found))) / len(found)] * len(found)


def weighing() -> Any:
    """Worker 1 has three times as many samples behind its BatchNorm: the model's, and that of a copy of it."""
    torch.manual_seed(0)
    model, optimizer = prepared("allreduce", nn.Sequential(nn.Linear(7, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)))
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.0), use_buffers=True)  # type: ignore[no-untyped-call]
    x = make_data()[0][8 * rank() : 8 * rank() + 8]
    for _ in range(2):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step(samples=8 + 16 * rank())
        ema.update_parameters(model)
    optimizer.finish(also=[ema])
    return {name: b.clone() for name, b in model.named_buffers()}, {n: b.clone() for n, b in ema.module.named_buffers()}


def test_buffers_of_a_moving_average_are_weighted_as_those_of_the_model() -> None:
    for mine, copied in values(together(2, weighing)):
        for name in ("1.running_mean", "1.running_var"):
            assert torch.equal(mine[name], copied[name]), name


def test_averaging_with_one_worker_changes_nothing() -> None:
    before, after, loss = averaging("localsgd(tau=3)")
    assert equal(before, after)
    assert float(loss) == 1.0


def test_much_more_than_the_model_can_be_averaged() -> None:
    def call() -> Any:
        model, optimizer = prepared("allreduce")
        step(model, optimizer)
        large, whole = torch.full((50_000,), float(rank())), torch.full((30_000,), rank())
        optimizer.finish(also=[large, whole])
        return {*large.tolist()}, {*whole.tolist()}

    assert values(together(2, call)) == [({0.5}, {0})] * 2


def test_what_only_one_worker_gives_is_refused() -> None:
    def call() -> None:
        model, optimizer = prepared("allreduce")
        step(model, optimizer)
        optimizer.finish(also=[torch.zeros(3)] if rank() == 0 else [])

    for outcome in together(2, call):
        assert "holds 1 tensor on worker 0, and others on worker 1 (0)" in outcome.error


def test_what_cannot_be_averaged_is_refused() -> None:
    model, optimizer = prepared("allreduce")
    step(model, optimizer)
    with pytest.raises(orchestra.ConfigError, match=r"also\[1\] = .*str.* must be a module or a tensor"):
        optimizer.finish(also=[torch.zeros(1), "ema"])
    optimizer.finish()
