# SPDX-License-Identifier: Apache-2.0
"""LARS and LAMB, against the papers' loops written out, against torch in their limits, and inside every strategy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.zoo import BATCH, SEED, assert_close, assert_same, flat, make_data, make_model, plain, train
from torch import Tensor, nn

from orchestra import LAMB, LARS, AllReduce, LocalSGD, ParameterServer, Simulated, SlowMo, Steps, Strategy, Warmup
from orchestra.data.feed import IndexedFeed
from orchestra.data.random_state import seed_everything
from orchestra.errors import CheckpointError, ConfigError
from orchestra.model.flat_optimizer import Factory, FlatOptimizer

lars: Factory = partial(LARS, lr=0.3, momentum=0.9, weight_decay=1e-3, eta=0.02)
lamb: Factory = partial(LAMB, lr=0.02, weight_decay=0.05)
both = pytest.mark.parametrize("optimizer", [lars, lamb], ids=["lars", "lamb"])

SHAPES = ((5, 3), (4, 2, 3, 3), (5,), (3, 4), (2, 6), ())


def parameters() -> list[nn.Parameter]:
    """A matrix, a kernel, a bias, a matrix of zeros, one that will get no gradient to speak of, and a number."""
    draw = torch.Generator().manual_seed(1)
    made = [nn.Parameter(torch.randn(s, generator=draw, dtype=torch.float64)) for s in SHAPES]
    made[3].data.zero_()
    return made


def gradients(step: int) -> list[Tensor]:
    """Of very different sizes, one of them always zero."""
    draw = torch.Generator().manual_seed(100 + step)
    made = [10.0 ** (i - 2) * torch.randn(s, generator=draw, dtype=torch.float64) for i, s in enumerate(SHAPES)]
    made[4].zero_()
    return made


def rate(step: int) -> float:
    return 0.5 if step < 5 else 0.2


def lars_by_the_paper(m: float, beta: float, eta: float, least_ndim: int, steps: int) -> list[Tensor]:
    ws = [p.detach().clone() for p in parameters()]
    vs = [torch.zeros_like(w) for w in ws]
    for step in range(steps):
        for i, g in enumerate(gradients(step)):
            w, size, slope = ws[i], float(ws[i].pow(2).sum()) ** 0.5, float(g.pow(2).sum()) ** 0.5
            decay, trust = (beta, eta) if w.ndim >= least_ndim else (0.0, None)
            zero = trust is None or size == 0 or slope == 0
            local = 1.0 if zero or trust is None else trust * size / (slope + decay * size)
            vs[i] = m * vs[i] + rate(step) * local * (g + decay * w)
            ws[i] = w - vs[i]
    return ws


def lamb_by_the_paper(
    betas: tuple[float, float], eps: float, decay: float, phi: tuple[float, float] | None, least_ndim: int, steps: int
) -> list[Tensor]:
    xs = [p.detach().clone() for p in parameters()]
    ms, vs = [torch.zeros_like(x) for x in xs], [torch.zeros_like(x) for x in xs]
    for step in range(steps):
        for i, g in enumerate(gradients(step)):
            ms[i] = betas[0] * ms[i] + (1 - betas[0]) * g
            vs[i] = betas[1] * vs[i] + (1 - betas[1]) * g * g
            u = ms[i] / (1 - betas[0] ** (step + 1)) / ((vs[i] / (1 - betas[1] ** (step + 1))).sqrt() + eps)
            ratio = 1.0
            if xs[i].ndim >= least_ndim:
                u = u + decay * xs[i]
                size, length = float(xs[i].pow(2).sum()) ** 0.5, float(u.pow(2).sum()) ** 0.5
                scaled = size if phi is None else min(max(size, phi[0]), phi[1])
                ratio = scaled / length if size and length else 1.0
            xs[i] = xs[i] - rate(step) * ratio * u
    return xs


def follow(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], start: int, stop: int) -> list[Tensor]:
    for step in range(start, stop):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        for p, g in zip(params, gradients(step), strict=True):
            p.grad = g
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("least_ndim", [0, 2])
@pytest.mark.parametrize("decay", [0.0, 0.03])
def test_lars_is_algorithm_1(decay: float, least_ndim: int) -> None:
    params = parameters()
    made = LARS(params, lr=1.0, momentum=0.9, weight_decay=decay, eta=0.01, least_ndim=least_ndim)
    expected = lars_by_the_paper(0.9, decay, 0.01, least_ndim, 12)
    torch.testing.assert_close(follow(made, params, 0, 12), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("least_ndim", [0, 2])
@pytest.mark.parametrize("phi", [None, (0.5, 2.0)])
def test_lamb_is_algorithm_2(phi: tuple[float, float] | None, least_ndim: int) -> None:
    params = parameters()
    made = LAMB(params, lr=1.0, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.03, phi=phi, least_ndim=least_ndim)
    expected = lamb_by_the_paper((0.8, 0.95), 1e-6, 0.03, phi, least_ndim, 12)
    torch.testing.assert_close(follow(made, params, 0, 12), expected, rtol=1e-12, atol=1e-12)


def test_without_local_rates_they_are_sgd_and_adam() -> None:
    pairs: list[tuple[Callable[..., torch.optim.Optimizer], Callable[..., torch.optim.Optimizer]]] = [
        (partial(LARS, lr=0.5, momentum=0.9, least_ndim=9), partial(torch.optim.SGD, lr=0.5, momentum=0.9)),
        (partial(LAMB, lr=0.5, eps=1e-6, least_ndim=9), partial(torch.optim.Adam, lr=0.5, eps=1e-6)),
    ]
    for ours, theirs in pairs:
        mine, other = parameters(), parameters()
        # Up to where the rate changes: torch's SGD has it outside of the momentum.
        expected = follow(theirs(other), other, 0, 5)
        torch.testing.assert_close(follow(ours(mine), mine, 0, 5), expected, rtol=1e-12, atol=1e-12)


def test_the_size_of_a_gradient_does_not_matter_to_lars() -> None:
    ends = []
    for scale in (1.0, 1e4):
        w = nn.Parameter(parameters()[0].detach().clone())
        made = LARS([w], lr=0.5, eta=0.01)
        for step in range(4):
            w.grad = scale * gradients(step)[0]
            made.step()
        ends.append(w.detach())
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-12)


@both
def test_nothing_moves_without_a_gradient_and_nothing_is_nan(optimizer: Factory) -> None:
    without, zero = parameters(), parameters()
    for p in zero:
        p.grad = torch.zeros_like(p)
    optimizer(without).step()
    optimizer(zero, weight_decay=0.0).step()
    for made in (without, zero):
        for p, before in zip(made, parameters(), strict=True):
            assert torch.equal(p, before)


@both
def test_groups_have_hyper_parameters_of_their_own(optimizer: Factory) -> None:
    params = parameters()
    apart = [[params[0]], params[1:]]
    made = optimizer([{"params": apart[0], "lr": 0.0}, {"params": apart[1], "weight_decay": 0.5, "least_ndim": 0}])
    alone = parameters()
    other = optimizer(alone[1:], weight_decay=0.5, least_ndim=0)
    for p, q, g in zip(params, alone, gradients(0), strict=True):
        p.grad, q.grad = g, g.clone()
    made.step()
    other.step()
    assert torch.equal(params[0], alone[0])  # rate zero
    for p, q, before in zip(params[1:], alone[1:], parameters()[1:], strict=True):
        assert torch.equal(p, q)
        assert not torch.equal(p, before)  # by the decay, where the gradient is zero


@both
def test_a_closure_is_called_with_gradients_on(optimizer: Factory) -> None:
    w = nn.Parameter(torch.ones(2, 2))
    made = optimizer([w])

    def closure() -> float:
        made.zero_grad()
        loss = (w**2).sum()
        torch.autograd.backward(loss)
        return loss.item()

    assert made.step(closure) == 4.0
    assert float(w.detach().pow(2).sum()) < 4.0


@both
def test_a_saved_state_goes_on_bit_for_bit(optimizer: Factory) -> None:
    params = parameters()
    made = optimizer(params)
    follow(made, params, 0, 4)
    others = [nn.Parameter(p.detach().clone()) for p in params]
    other = optimizer(others)
    other.load_state_dict(copy.deepcopy(made.state_dict()))
    for p, q in zip(follow(made, params, 4, 9), follow(other, others, 4, 9), strict=True):
        assert torch.equal(p, q)


@both
def test_norms_do_not_overflow_in_half_precision(optimizer: Factory) -> None:
    w = nn.Parameter(torch.full((300, 300), 300.0, dtype=torch.float16))
    w.grad = torch.full_like(w, 300.0)
    optimizer([w]).step()
    assert bool(torch.isfinite(w).all())
    assert bool((w < 300).all())


@pytest.mark.parametrize(
    "wrong",
    [
        partial(LARS, lr=-1.0),
        partial(LARS, lr=1.0, momentum=1.0),
        partial(LARS, lr=1.0, eta=float("nan")),
        partial(LAMB, betas=(0.9, 1.0)),
        partial(LAMB, weight_decay=-0.1),
    ],
)
def test_wrong_hyper_parameters_are_refused(wrong: Factory) -> None:
    with pytest.raises(ValueError, match="must be at least 0"):
        wrong(parameters())


# Inside the strategies.

WORLDS: list[Strategy[Any]] = [
    AllReduce(), AllReduce(algorithm="ring"), LocalSGD(tau=2), SlowMo(tau=3), SlowMo(tau=3, buffers="average"),
]  # fmt: skip


@both
@pytest.mark.parametrize("algorithm", ["native", "ring"])
def test_all_reduce_is_the_optimizer_on_the_whole_batch(optimizer: Factory, algorithm: Any, tmp_path: Path) -> None:
    schedule = Warmup(epochs=1, factor=2.0)
    given: dict[str, Any] = {"optimizer": optimizer, "schedule": schedule}
    result = train(AllReduce(algorithm=algorithm), tmp_path, workers=3, budget=Steps(9), **given)
    assert_close(result.model, plain(size=3, steps=9, **given), tolerance=2e-5)


@both
@pytest.mark.parametrize("strategy", [AllReduce(), LocalSGD(tau=2)], ids=lambda s: type(s).__name__)
def test_one_worker_is_the_optimizer_itself(strategy: Strategy[Any], optimizer: Factory, tmp_path: Path) -> None:
    result = train(strategy, tmp_path, workers=1, optimizer=optimizer, budget=Steps(20))
    assert_same(result.model, plain(optimizer=optimizer, steps=20))


@both
def test_local_sgd_is_the_mean_of_optimizers_apart(optimizer: Factory, tmp_path: Path) -> None:
    result = train(LocalSGD(tau=2), tmp_path, workers=3, optimizer=optimizer, budget=Steps(4))
    seed_everything(SEED)
    start = make_model()
    modules = [copy.deepcopy(start) for _ in range(3)]
    inner = [optimizer(list(module.parameters())) for module in modules]
    feeds = [IndexedFeed(make_data(), batch=BATCH, seed=SEED, rank=rank, size=3) for rank in range(3)]
    for step in range(4):
        for module, made, feed in zip(modules, inner, feeds, strict=True):
            (x, y), _ = feed.next()
            made.zero_grad()
            torch.autograd.backward(F.mse_loss(module(x), y))
            made.step()
        if step % 2:
            with torch.no_grad():
                for together in zip(*(module.parameters() for module in modules), strict=True):
                    mean = torch.stack(list(together)).mean(0)
                    for p in together:
                        p.copy_(mean)
    assert_close(result.model, modules[0], tolerance=1e-5)


@both
@pytest.mark.parametrize("strategy", WORLDS, ids=str)
def test_a_simulation_equals_the_real_run(strategy: Strategy[Any], optimizer: Factory, tmp_path: Path) -> None:
    given: dict[str, Any] = {"optimizer": optimizer, "budget": Steps(8)}
    real = train(strategy, tmp_path / "real", workers=3, **given)
    virtual = train(strategy, tmp_path / "virtual", cluster=Simulated(workers=3), **given)
    assert_same(real.model, virtual.model)


@both
def test_gradients_taken_together_reach_the_layers(optimizer: Factory, tmp_path: Path) -> None:
    given: dict[str, Any] = {"optimizer": optimizer, "budget": Steps(8)}
    one, many = (
        train(LocalSGD(tau=2), tmp_path / how, cluster=Simulated(workers=3, numerics=how), **given)
        for how in ("real", "batched")
    )
    assert_close(one.model, many.model, tolerance=1e-4)
    seed_everything(SEED)
    assert float((flat(many.model) - flat(make_model())).abs().max()) > 1e-3


@both
def test_layers_take_the_gradient_that_is_passed_to_step(optimizer: Factory) -> None:
    params, alone = parameters(), parameters()
    inner, other = FlatOptimizer(optimizer, torch.empty(0), layers=params), optimizer(alone)
    for step in range(3):
        inner.step(torch.cat([g.reshape(-1) for g in gradients(step)]))
        for p, g in zip(alone, gradients(step), strict=True):
            p.grad = g
        other.step()
    for p, q in zip(params, alone, strict=True):
        assert torch.equal(p, q)


@both
@pytest.mark.parametrize("strategy", [AllReduce(), SlowMo(tau=3)], ids=lambda s: type(s).__name__)
def test_resumed_is_never_stopped(strategy: Strategy[Any], optimizer: Factory, tmp_path: Path) -> None:
    given: dict[str, Any] = {"workers": 2, "optimizer": optimizer, "schedule": Warmup(epochs=1, factor=3.0)}
    train(strategy, tmp_path / "run", budget=Steps(6), checkpoint_every=Steps(3), **given)
    resumed = train(strategy, tmp_path / "run", budget=Steps(12), resume=True, **given)
    never = train(strategy, tmp_path / "never", budget=Steps(12), **given)
    assert_same(resumed.model, never.model)
    with pytest.raises(CheckpointError, match="schedule"):
        train(strategy, tmp_path / "run", budget=Steps(15), resume=True, **given | {"schedule": Warmup(factor=3.0)})


@both
@pytest.mark.usefixtures("no_process")
def test_servers_refuse_them_by_name(optimizer: Factory, tmp_path: Path) -> None:
    name = "LARS" if optimizer is lars else "LAMB"
    with pytest.raises(ConfigError, match=f"optimizer = '{name}' .* a server of ParameterServer holds a range"):
        train(ParameterServer(servers=2), tmp_path, optimizer=optimizer)
