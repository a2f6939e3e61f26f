# SPDX-License-Identifier: Apache-2.0
"""Synchronous servers are all-reduce; asynchronous ones count what they miss."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.zoo import Jittery, adam, assert_close, assert_same, events, make_data, momentum, plain, sgd, simulate, train
from torch import nn

from orchestra import ASP, AllReduce, Epochs, ParameterServer, Steps
from orchestra.model.flat_optimizer import Factory
from orchestra.runs.events import Logged


def wide() -> nn.Module:
    """Large enough that messages are lent, not copied."""
    return nn.Sequential(nn.Linear(7, 300), nn.Tanh(), nn.Linear(300, 400), nn.Tanh(), nn.Linear(400, 1))


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("optimizer", [momentum, adam], ids=["momentum", "adam"])
def test_bsp_is_all_reduce_bit_for_bit(servers: int, optimizer: Factory, tmp_path: Path) -> None:
    given = {"workers": 3, "optimizer": optimizer, "budget": Epochs(2)}
    centred = simulate(ParameterServer(servers=servers), tmp_path / "ps", **given)  # type: ignore[arg-type]
    assert_same(centred.model, simulate(AllReduce(), tmp_path / "allreduce", **given).model)  # type: ignore[arg-type]


@pytest.mark.parametrize("servers", [1, 2])
def test_bsp_with_lent_messages(servers: int, tmp_path: Path) -> None:
    centred = simulate(ParameterServer(servers=servers), tmp_path / "ps", model=wide, budget=Steps(12))
    assert_same(centred.model, simulate(AllReduce(), tmp_path / "allreduce", model=wide, budget=Steps(12)).model)


def test_bsp_with_nothing_from_some_workers(tmp_path: Path) -> None:
    data = partial(make_data, 25)
    centred = simulate(ParameterServer(), tmp_path / "ps", workers=4, data=data, budget=Epochs(3))
    assert_same(
        centred.model, simulate(AllReduce(), tmp_path / "allreduce", workers=4, data=data, budget=Epochs(3)).model
    )


def falling(epochs: float) -> float:
    return 1 / (1 + epochs)


@pytest.mark.parametrize("strategy", [AllReduce(), ParameterServer(), ParameterServer(servers=2)], ids=repr)
def test_a_schedule_is_followed_alike(strategy: AllReduce | ParameterServer, tmp_path: Path) -> None:
    result = simulate(strategy, tmp_path, workers=3, schedule=falling, budget=Epochs(2))
    torch.testing.assert_close(
        [*result.model.parameters()],
        [*plain(size=3, schedule=falling, steps=12).parameters()],
        rtol=2e-6,
        atol=2e-6,
    )


def test_clipping_at_one_server_bounds_the_mean_gradient(tmp_path: Path) -> None:
    centred = simulate(ParameterServer(), tmp_path / "ps", clip=0.05)
    assert_same(centred.model, simulate(AllReduce(), tmp_path / "allreduce", clip=0.05).model)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("model", [None, wide], ids=["copied", "lent"])
def test_asp_with_one_worker_is_sgd(servers: int, model: object, tmp_path: Path) -> None:
    given = {} if model is None else {"model": model}
    result = simulate(
        ParameterServer(consistency=ASP(), servers=servers), tmp_path, workers=1, budget=Steps(20), **given
    )
    # Large models use fused kernels, which round differently from torch's default ones.
    (assert_same if model is None else assert_close)(result.model, plain(steps=20, **given))  # type: ignore[arg-type]
    assert result.summary.staleness_counts == {0: 20 * servers}


def test_staleness_is_counted_and_never_negative(tmp_path: Path) -> None:
    strategy = ParameterServer(consistency=ASP(), servers=2)
    workers, steps = 4, 25
    result = train(strategy, tmp_path, workers=workers, budget=Steps(steps), model=Jittery, optimizer=sgd)
    for server in (workers, workers + 1):
        stale = [e.value for e in events(tmp_path, server) if isinstance(e, Logged) and e.name == "staleness"]
        assert len(stale) == workers * steps
        assert all(value >= 0 and value == int(value) for value in stale)
        # Every update is missed by those pushes that were under way: never more of them than other workers can make.
        assert max(stale) > 0
    assert sum(result.summary.staleness_counts.values()) == 2 * workers * steps
    assert result.summary.staleness_mean is not None


def test_split_to_servers_and_put_together_is_the_identity(tmp_path: Path) -> None:
    """With a learning rate so small that nothing changes, the model that comes back is the one that went out."""
    still = partial(torch.optim.SGD, lr=1e-30)
    for servers in (1, 2, 3, 5):
        result = simulate(ParameterServer(servers=servers), tmp_path / f"{servers}", optimizer=still, workers=2)
        assert_same(result.model, plain(optimizer=still, steps=1))


def test_more_servers_than_parameters(tmp_path: Path) -> None:
    def tiny() -> nn.Module:
        return nn.Linear(7, 1, bias=False)

    given = {"model": tiny, "workers": 3}
    centred = simulate(ParameterServer(servers=9), tmp_path / "ps", **given)  # type: ignore[arg-type]
    assert_same(centred.model, simulate(AllReduce(), tmp_path / "allreduce", **given).model)  # type: ignore[arg-type]


def test_asp_learns(tmp_path: Path) -> None:
    x, y = make_data()

    def error(model: nn.Module, data: object) -> float:
        return float(F.mse_loss(model(x), y).detach())

    result = simulate(
        ParameterServer(consistency=ASP()),
        tmp_path,
        workers=3,
        optimizer=partial(torch.optim.SGD, lr=0.02),
        budget=Epochs(25),
        evaluate=error,
        evaluation_data=make_data,
    )
    assert result.metrics["error"] < 0.5 * float(y.var())
