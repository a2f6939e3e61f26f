# SPDX-License-Identifier: Apache-2.0
"""SlowMo: its special cases, its three ways with buffers, and an independent telling of Algorithm 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from tests.zoo import (
    BATCH,
    SEED,
    Trap,
    adam,
    assert_close,
    epochs,
    events,
    make_data,
    make_model,
    momentum,
    plain,
    sgd,
    simulate,
    train,
    trapped,
)
from torch import Tensor, nn

from orchestra import AllReduce, Epochs, Layout, LocalSGD, SlowMo, Steps, Updates
from orchestra.core.node import Node
from orchestra.data.feed import IndexedFeed
from orchestra.data.random_state import seed_everything
from orchestra.model.flat_optimizer import Factory
from orchestra.runs.events import Logged
from orchestra.strategies.local_sgd import LocalSGDState

Buffers = Literal["reset", "maintain", "average"]


@pytest.mark.parametrize("tau", [1, 3])
@pytest.mark.parametrize("optimizer", [momentum, adam], ids=["momentum", "adam"])
def test_without_slow_momentum_it_is_local_sgd(tau: int, optimizer: Factory, tmp_path: Path) -> None:
    strategy = SlowMo(tau=tau, alpha=1.0, beta=0.0, buffers="maintain")
    slow = train(strategy, tmp_path / "slowmo", optimizer=optimizer, budget=Epochs(2))
    local = train(LocalSGD(tau=tau), tmp_path / "local", optimizer=optimizer, budget=Epochs(2))
    assert_close(slow.model, local.model, tolerance=1e-5)


def test_tau_1_is_large_batch_sgd_with_momentum_beta(tmp_path: Path) -> None:
    slow = simulate(SlowMo(tau=1, alpha=1.0, beta=0.6), tmp_path, optimizer=sgd, workers=3, budget=Epochs(2))
    expected = plain(optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.6), size=3, steps=12)
    assert_close(slow.model, expected, tolerance=1e-5)


def test_one_worker_without_momentum_is_lookahead(tmp_path: Path) -> None:
    """Zhang, Lucas, Hinton, Ba 2019: slow ← slow + α (fast - slow), every τ steps."""
    tau, alpha, rounds = 4, 0.5, 5
    result = simulate(
        SlowMo(tau=tau, alpha=alpha, beta=0.0, buffers="maintain"), tmp_path, workers=1, budget=Steps(tau * rounds)
    )
    seed_everything(SEED)
    module, data = make_model(), make_data()
    feed = IndexedFeed(data, batch=BATCH, seed=SEED, rank=0, size=1)
    inner = momentum(list(module.parameters()))
    slow = [p.detach().clone() for p in module.parameters()]
    for _ in range(rounds):
        for _ in range(tau):
            (x, y), _ = feed.next()
            inner.zero_grad()
            torch.autograd.backward(F.mse_loss(module(x), y))
            inner.step()
        with torch.no_grad():
            for s, p in zip(slow, module.parameters(), strict=True):
                s += alpha * (p - s)
                p.copy_(s)
    assert_close(result.model, module, tolerance=1e-5)


def falling(done: float) -> float:
    return max(0.1, 1 - 0.3 * done)


def algorithm_1(
    *, workers: int, steps: int, tau: int, alpha: float, beta: float, buffers: Buffers, optimizer: Factory,
    schedule: Callable[[float], float] = falling, batch: int = BATCH,
) -> Tensor:  # fmt: skip
    """The paper's loop, over lists of float64 slow vectors and ordinary modules, one worker after the other."""
    seed_everything(SEED)
    start, data = make_model(), make_data()
    modules = []
    for _ in range(workers):
        module = make_model()
        module.load_state_dict(start.state_dict())
        modules.append(module)
    feeds = [IndexedFeed(data, batch=batch, seed=SEED, rank=r, size=workers) for r in range(workers)]
    inner = [optimizer(list(m.parameters())) for m in modules]
    rate = inner[0].param_groups[0]["lr"]
    x0 = nn.utils.parameters_to_vector(start.parameters()).detach().double()
    u = torch.zeros_like(x0)
    gammas: list[float] = []
    used = [0] * workers
    for step in range(1, steps + 1):
        gammas.append(rate * schedule(epochs(feeds[0], batch * workers)))
        for r in range(workers):
            (x, y), count = feeds[r].next()
            inner[r].param_groups[0]["lr"] = gammas[-1]
            inner[r].zero_grad()
            torch.autograd.backward(F.mse_loss(modules[r](x), y))
            inner[r].step()
            used[r] += count
        if len(gammas) == tau or step == steps:
            gamma = sum(gammas) / len(gammas)
            vectors = [nn.utils.parameters_to_vector(m.parameters()).detach().double() for m in modules]
            mean = sum((n * v for n, v in zip(used, vectors, strict=True)), torch.zeros_like(x0)) / sum(used)
            u = beta * u + (x0 - mean) / gamma
            x0 = x0 - alpha * gamma * u
            for r, m in enumerate(modules):
                nn.utils.vector_to_parameters(x0.float(), m.parameters())
                if buffers == "reset":
                    inner[r] = optimizer(list(m.parameters()))
            if buffers == "average":
                _average(inner)
            gammas, used = [], [0] * workers
    return x0


def _average(inner: list[torch.optim.Optimizer]) -> None:
    for params in zip(*(o.param_groups[0]["params"] for o in inner), strict=True):
        states: list[dict[str, Any]] = [o.state[p] for o, p in zip(inner, params, strict=True)]
        for key, value in states[0].items():
            if isinstance(value, Tensor) and value.dim() > 0:
                mean = torch.stack([s[key] for s in states]).mean(0)
                for s in states:
                    s[key].copy_(mean)


@pytest.mark.parametrize("buffers", ["reset", "maintain", "average"])
@pytest.mark.parametrize("optimizer", [momentum, adam], ids=["momentum", "adam"])
def test_against_algorithm_1_with_a_schedule(buffers: Buffers, optimizer: Factory, tmp_path: Path) -> None:
    strategy = SlowMo(tau=4, alpha=0.9, beta=0.5, buffers=buffers)
    result = simulate(strategy, tmp_path, workers=3, optimizer=optimizer, budget=Steps(15), schedule=falling)
    got = nn.utils.parameters_to_vector(result.model.parameters()).detach().double()
    expected = algorithm_1(
        workers=3, steps=15, tau=4, alpha=0.9, beta=0.5, buffers=buffers, optimizer=optimizer
    )  # fmt: skip
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-6)


def test_the_three_ways_with_buffers_differ(tmp_path: Path) -> None:
    ways: tuple[Buffers, ...] = ("reset", "maintain", "average")
    ends = [
        nn.utils.parameters_to_vector(
            simulate(SlowMo(tau=2, buffers=way), tmp_path / way, budget=Steps(8)).model.parameters()
        )
        for way in ways
    ]
    assert not torch.allclose(ends[0], ends[1], rtol=1e-3)
    assert not torch.allclose(ends[1], ends[2], rtol=1e-3)


def test_a_round_without_learning_rate_ends_in_the_mean(tmp_path: Path) -> None:
    """A warm-up that starts at zero has no direction in its first round, and must not divide by it."""
    result = simulate(
        SlowMo(tau=2), tmp_path, workers=2, budget=Steps(6), schedule=lambda done: 0.0 if done < 0.2 else 1.0
    )
    assert all(bool(torch.isfinite(p).all()) for p in result.model.parameters())
    assert not torch.equal(next(result.model.parameters()), next(plain(steps=0).parameters()))


def test_around_all_reduce_the_mean_changes_nothing(tmp_path: Path) -> None:
    """Wrapped around all-reduce with one worker's view, the slow step sees what all workers have."""
    strategy = SlowMo(tau=3, alpha=1.0, beta=0.0, buffers="maintain", base=AllReduce())
    wrapped = simulate(strategy, tmp_path / "wrapped", budget=Steps(9))
    assert_close(wrapped.model, simulate(AllReduce(), tmp_path / "bare", budget=Steps(9)).model, tolerance=1e-5)


def test_averaging_buffers_when_a_worker_has_none_yet(tmp_path: Path) -> None:
    """A worker whose first gradients are not finite has no momentum when the others average theirs."""
    trap = Trap.at(1, 0, poison, size=2)
    result = train(
        SlowMo(tau=1, buffers="average"), tmp_path, workers=2, model=trapped(trap, model=Poisoned), budget=Steps(4)
    )
    assert result.summary.skipped == 1
    assert all(bool(torch.isfinite(p).all()) for p in result.model.parameters())


def test_averaging_buffers_of_several_groups(tmp_path: Path) -> None:
    def one(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return momentum([{"params": params}])

    def each(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return momentum([{"params": [p]} for p in params])

    strategy = SlowMo(tau=2, buffers="average")
    together = simulate(strategy, tmp_path / "one", workers=2, optimizer=one, budget=Steps(6))
    apart = simulate(strategy, tmp_path / "each", workers=2, optimizer=each, budget=Steps(6))
    assert_close(apart.model, together.model)


def poison() -> None:
    global _poisoned
    _poisoned = True


_poisoned = False


class Poisoned(nn.Module):
    """Gives NaN once after `poison`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()

    def forward(self, x: Tensor) -> Tensor:
        global _poisoned
        y: Tensor = self.inner(x)
        if _poisoned:
            _poisoned = False
            return y * float("nan")
        return y


# What the base wants.


@dataclass(frozen=True, kw_only=True)
class Restless(LocalSGD):
    """Depends on who comes first, or says so; tells when it is finished."""

    layout = Layout(updates=Updates(synchronous=False))

    def finish(self, node: Node, s: LocalSGDState) -> None:
        node.log("finished at", node.steps)
        super().finish(node, s)


@pytest.mark.parametrize("steps", [5, 6, 8])
def test_slowmo_finishes_its_base_strategy(steps: int, tmp_path: Path) -> None:
    """In the middle of a round of the base, at the end of one, and at the end of a slow one."""
    simulate(SlowMo(tau=4, base=Restless(tau=2)), tmp_path, workers=2, budget=Steps(steps))
    for rank in range(2):
        told = [e.value for e in events(tmp_path, rank) if isinstance(e, Logged) and e.name == "finished at"]
        assert told == [steps]


def test_slowmo_is_as_synchronous_as_its_base() -> None:
    assert SlowMo().layout.updates.synchronous
    assert SlowMo(base=LocalSGD(tau=2)).layout.updates.synchronous
    assert not SlowMo(base=Restless()).layout.updates.synchronous
    assert not SlowMo(base=SlowMo(base=Restless())).layout.updates.synchronous
