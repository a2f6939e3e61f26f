# SPDX-License-Identifier: Apache-2.0
"""A loop of one's own is plain PyTorch alone, and `train` among others."""

from __future__ import annotations

import contextlib
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.prepare.loops import COUNT, equal, loop, make_loader
from tests.processes import together, values
from tests.zoo import SEED, Dicey, adam, make_data, make_model, momentum, plain, sgd, train
from torch import nn

import orchestra
from orchestra import Attached, Epochs, Steps
from orchestra.data.random_state import seed_everything
from orchestra.engine import expression
from orchestra.model.flat_optimizer import Factory
from orchestra.user_loop.loader import WorkerShare


@pytest.mark.parametrize("optimizer", [sgd, momentum, adam])
@pytest.mark.parametrize("strategy", ["allreduce", "localsgd(tau=3)", "solo"])
def test_prepare_with_one_worker_equals_plain_torch_for_every_strategy(strategy: str, optimizer: Factory) -> None:
    """Bit for bit, dropout, BatchNorm, uneven batches and reshuffling included."""
    uneven = partial(make_loader, 101)
    expected = loop(None, model=Dicey, optimizer=optimizer, loader=uneven)
    found = loop(strategy, model=Dicey, optimizer=optimizer, loader=uneven)
    assert found[0] == expected[0]
    assert equal(found[1], expected[1])


STRATEGIES = {
    2: [
        "allreduce(algorithm=ring)",
        "slowmo(tau=4, buffers=average)",
        "synceasgd(tau=3)",
        "switch(first=allreduce, then=localsgd(tau=3), when=atshare(share=0.4), scale=0.5)",
    ],
    3: ["allreduce", "localsgd(tau=4)", "slowmo(tau=5)", "synceasgd(tau=2, alpha=0.3)", "ps"],
    4: ["ps(servers=2)"],
}
STEPS = 15


def simulated(strategy: str, out: Path, *, workers: int, **given: Any) -> orchestra.Result:
    """Train in a simulation, which gives the same bits as processes."""
    data = partial(make_data, COUNT)
    return train(strategy, out, data=data, cluster=orchestra.Simulated(workers=workers), **given)


@pytest.mark.parametrize("size", STRATEGIES)
def test_prepare_with_several_workers_equals_train(size: int, tmp_path: Path) -> None:
    """Bit for bit: the same batches, the same strategy. On a server's process the script ends."""

    def call() -> list[Any]:
        found: list[Any] = []
        for strategy in STRATEGIES[size]:  # one after the other: a script may prepare again
            try:
                found.append(loop(strategy, steps=STEPS, epochs=3))
            except SystemExit as end:
                found.append(end.code)
        return found

    outcomes = values(together(size, call))
    for i, strategy in enumerate(STRATEGIES[size]):
        servers = expression.parse(strategy).layout.servers
        assert [outcome[i] for outcome in outcomes[size - servers :]] == [0] * servers
        here = simulated(strategy, tmp_path / str(i), workers=size - servers, budget=Steps(STEPS))
        for outcome in outcomes[: size - servers]:
            losses, state = outcome[i]
            assert len(losses) == STEPS
            assert equal(state, here.model.state_dict()), strategy


def test_all_reduce_is_the_script_on_all_batches_together() -> None:
    expected = nn.utils.parameters_to_vector(plain(data=partial(make_data, COUNT), size=3, steps=12).parameters())
    for _, state in values(together(3, partial(loop, "allreduce", epochs=2))):
        found = torch.cat([tensor.reshape(-1) for tensor in state.values()])
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_uneven_batches_stay_unbiased() -> None:
    loader, size = make_loader(101), 2
    shares = [WorkerShare(loader, seed=SEED, rank=rank, size=size).batches(0) for rank in range(size)]
    assert len({len(part) for share in shares for part in share}) > 1
    seed_everything(SEED)
    model = make_model()
    optimizer = sgd(model.parameters())
    x, y = make_data(101)
    for parts in zip(*shares, strict=True):
        optimizer.zero_grad()
        chosen = [i for part in parts for i in part]
        F.mse_loss(model(x[chosen]), y[chosen]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    call = partial(loop, "allreduce", optimizer=sgd, loader=partial(make_loader, 101), epochs=1)
    for _, state in values(together(size, call)):
        assert all(torch.allclose(state[name], t, rtol=1e-5, atol=1e-7) for name, t in model.state_dict().items())


def test_servers_follow_a_schedule() -> None:
    """A synchronous server is all-reduce, bit for bit."""
    *workers, _ = together(3, partial(loop, "ps", decay=0.8))
    for (_, found), (_, expected) in zip(
        values(workers), values(together(2, partial(loop, "allreduce", decay=0.8))), strict=True
    ):
        assert equal(found, expected)


def test_asynchronous_servers_end_with_one_model() -> None:
    strategies = ["ps(consistency=asp())", "easgd(tau=3)", "downpour(n_push=2)", "ps(consistency=ssp(staleness=1))"]

    def call() -> list[Any]:
        found: list[Any] = []
        for strategy in strategies:
            with contextlib.suppress(SystemExit):
                found.append(loop(strategy, optimizer=sgd, epochs=4))
        return found

    mine, theirs, server = values(together(3, call))
    assert server == []
    for (losses, state), (_, other) in zip(mine, theirs, strict=True):
        assert equal(state, other)
        assert sum(losses[-9:]) < sum(losses[:9])


def test_batch_statistics_are_averaged(tmp_path: Path) -> None:
    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))

    here = simulated("localsgd(tau=3)", tmp_path / "run", workers=2, model=normed, budget=Epochs(2))
    for _, state in values(together(2, partial(loop, "localsgd(tau=3)", model=normed))):
        for name, tensor in here.model.state_dict().items():  # sums over a batch depend on the number of threads
            torch.testing.assert_close(state[name], tensor, rtol=1e-5, atol=1e-6)


def test_all_begin_with_the_model_of_worker_0() -> None:
    def call() -> Any:
        torch.manual_seed(int(os.environ["RANK"]))
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        model[1].running_mean.fill_(float(os.environ["RANK"]))  # type: ignore[operator]
        model, optimizer = orchestra.prepare(model, sgd(model.parameters()))
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.finish()
        return state

    mine, theirs = values(together(2, call))
    assert equal(mine, theirs)


def test_a_plateau_is_told_by_the_losses(tmp_path: Path) -> None:
    strategy = "switch(first=allreduce, then=localsgd(tau=2), when=plateau(window=2, threshold=0.3))"
    here = simulated(strategy, tmp_path / "run", workers=2, budget=Epochs(5))
    call = partial(loop, strategy, epochs=5, told=True, out=tmp_path / "mine")
    for _, state in values(together(2, call)):
        assert equal(state, here.model.state_dict())
    assert here.summary.happened is not None


@pytest.mark.parametrize(
    "strategy",
    ["allreduce", "slowmo(tau=4)", "switch(then=ps(consistency=bsp()), when=atshare(share=0.5), momenta=reset)"],
)
def test_means_by_torch_are_those_by_messages(strategy: str) -> None:
    """On a network that is trusted; equal but for rounding."""
    seen: list[Any] = []

    def call(collectives: str) -> Any:
        def each(optimizer: Any) -> None:
            seen.append(optimizer.orchestra._node.comm.transport.inner.means is not None)

        cluster = Attached(trusted=True, collectives=collectives, patience=20)
        with contextlib.suppress(SystemExit):
            found = loop(strategy, cluster=cluster, loader=partial(make_loader, 101), each=each, told=True, steps=12)
            return found, {*seen}
        return None

    size = 3 if "ps" in strategy else 2
    mine = values(together(size, partial(call, "auto")))
    theirs = values(together(size, partial(call, "messages")))
    for (found, by_torch), (expected, by_messages) in zip(mine[:2], theirs[:2], strict=True):
        assert (by_torch, by_messages) == ({True}, {False})
        for name, tensor in expected[1].items():
            torch.testing.assert_close(found[1][name], tensor, rtol=1e-5, atol=1e-6)
    assert equal(mine[0][0][1], mine[1][0][1])


def test_who_is_lost_is_named_also_where_torch_takes_the_means() -> None:
    def each(optimizer: Any) -> None:
        if optimizer.orchestra.steps == 5 and optimizer.orchestra.rank:
            os.kill(os.getpid(), signal.SIGKILL)

    lives, _ = together(2, partial(loop, each=each, cluster=Attached(trusted=True, patience=20)))
    assert lives.code == 6
    assert "worker 1 died" in lives.error
