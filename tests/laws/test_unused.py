# SPDX-License-Identifier: Apache-2.0
"""Parameters without a gradient, in no step or in some: as in plain PyTorch and its DistributedDataParallel."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.laws.choosy import NEVER, Lacking, choosy, doubles, wide
from tests.laws.examples import EXAMPLES, WORKERS, alone, each_with, first_phase, in_processes, workers_for
from tests.processes import together, values
from tests.zoo import BATCH, INPUTS, SEED, assert_close, assert_same, make_data, plain, train
from torch import Tensor, nn

import orchestra
from orchestra import (
    AllReduce,
    AtShare,
    Attached,
    LocalSGD,
    ParameterServer,
    Simulated,
    SlowMo,
    Steps,
    Strategy,
    StrategySwitch,
)
from orchestra.core import optimizer_state
from orchestra.core.gradient_mask import ABSENT, pieces_of
from orchestra.core.vectors import weighted_mean
from orchestra.data.feed import IndexedFeed
from orchestra.data.random_state import seed_everything
from orchestra.model.flat_optimizer import Factory, FlatOptimizer
from orchestra.worlds.simulated import numerics

sgd: Factory = partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=0.1)
adam: Factory = partial(torch.optim.Adam, lr=0.01, weight_decay=0.1)
adamw: Factory = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
OPTIMIZERS = {"sgd": sgd, "adam": adam, "adamw": adamw}
FIXED = Simulated(workers=WORKERS, network="1000gbit,0s", compute_time="constant:1", numerics="real")


def start_of(model: Callable[[], nn.Module] = choosy) -> dict[str, Tensor]:
    seed_everything(SEED)
    return model().state_dict()


def assert_never_moved(state: dict[str, Tensor], start: dict[str, Tensor]) -> None:
    for name, value in state.items():
        assert torch.equal(value, start[name]) == name.startswith(NEVER), name


def assert_unused_stayed(state: dict[str, Tensor], start: dict[str, Tensor]) -> None:
    for name, value in state.items():
        if name.startswith(NEVER):
            assert torch.equal(value, start[name]), name
    assert not torch.equal(state["first.weight"], start["first.weight"])  # which every batch uses


def run(strategy: Strategy[Any] | str, out: Path, **given: Any) -> nn.Module:
    asked: dict[str, Any] = {"model": choosy, "data": doubles, "optimizer": adam, "budget": Steps(8)}
    return train(strategy, out, **asked | given).model


def gradients(module: nn.Module, batch: Any) -> list[Tensor | None]:
    module.zero_grad()
    *inputs, target = batch
    torch.autograd.backward(F.mse_loss(module(*inputs), target))
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def ddp(optimizer: Factory, size: int = WORKERS, steps: int = 8) -> nn.Module:
    """As DistributedDataParallel has it: the mean, with zeros for workers that have none, unless no worker has any."""
    seed_everything(SEED)
    module = choosy()
    inner = optimizer(list(module.parameters()))
    feeds = [IndexedFeed(doubles(), batch=BATCH, seed=SEED, rank=r, size=size) for r in range(size)]
    patterns = set()
    for _ in range(steps):
        found = [(gradients(module, batch), count) for batch, count in (feed.next() for feed in feeds) if count]
        total = sum(count for _, count in found)
        for i, p in enumerate(module.parameters()):
            shares = [g * (count / total) for each, count in found if (g := each[i]) is not None]
            p.grad = sum(shares[1:], shares[0]) if shares else None
        patterns.add(tuple(p.grad is None for p in module.parameters()))
        inner.step()
    assert len(patterns) > 1, "no layer was left out in some of the steps only: this would show nothing"
    return module


def average_momenta(modules: list[nn.Module], inners: list[torch.optim.Optimizer]) -> None:
    """Layer by layer, with zeros for workers that have not used the layer; these get none."""
    for each in zip(*(module.parameters() for module in modules), strict=True):
        states = [inner.state.get(p, {}) for inner, p in zip(inners, each, strict=True)]
        for name in ("exp_avg", "exp_avg_sq"):
            found = [state[name] for state in states if state]
            mean = sum(found[1:], found[0].clone()) / len(states) if found else None
            for momentum in found:
                momentum.copy_(mean)


def local(optimizer: Factory, tau: int, size: int = WORKERS, steps: int = 8, *, momenta: bool = False) -> nn.Module:
    """Workers of their own, each plain PyTorch, and the mean of what they have; of their momenta, too, if asked for."""
    modules = []
    for _ in range(size):
        seed_everything(SEED)
        modules.append(choosy())
    inners = [optimizer(list(module.parameters())) for module in modules]
    feeds = [IndexedFeed(doubles(), batch=BATCH, seed=SEED, rank=r, size=size) for r in range(size)]
    for start in range(0, steps, tau):
        weights = [0] * size
        for _ in range(min(tau, steps - start)):
            for i, (module, inner, feed) in enumerate(zip(modules, inners, feeds, strict=True)):
                batch, count = feed.next()
                if count:
                    gradients(module, batch)
                    inner.step()
                weights[i] += count
        with torch.no_grad():
            for each in zip(*(module.parameters() for module in modules), strict=True):
                mean = sum(p * (w / sum(weights)) for p, w in zip(each, weights, strict=True))
                for p in each:
                    p.copy_(mean)
            if momenta:
                average_momenta(modules, inners)
    return modules[0]


# Never used.


@each_with("optimizer", {"sgd": "sgd", "adamw": "adamw"}, EXAMPLES)
def test_what_is_never_used_stays_as_it_was(strategy: Strategy[Any], optimizer: str, tmp_path: Path) -> None:
    cluster = Simulated(workers=workers_for(strategy), compute_time="lognormal:0.05,0.3")
    made = run(strategy, tmp_path / "run", optimizer=OPTIMIZERS[optimizer], cluster=cluster, budget=Steps(9))
    assert_unused_stayed(made.state_dict(), start_of())


@in_processes(EXAMPLES, of=first_phase)
def test_what_is_never_used_stays_as_it_was_in_processes(strategy: Strategy[Any], tmp_path: Path) -> None:
    """Which gradients arrive is chance where workers do not wait for each other: all of a layer may be dropped."""
    slowly = partial(sgd, lr=0.002)
    made = run(strategy, tmp_path / "run", optimizer=slowly, workers=workers_for(strategy), budget=Steps(40))
    if strategy.layout.updates.synchronous:
        assert_never_moved(made.state_dict(), start_of())
    else:
        assert_unused_stayed(made.state_dict(), start_of())


@pytest.mark.parametrize("strategy", ["allreduce", "ps", "localsgd(tau=2)"])
def test_what_is_never_used_stays_as_it_was_over_sockets(strategy: str, tmp_path: Path) -> None:
    """Where the synchronous strategies give the same bits as in the shared memory of one machine."""
    here = run(strategy, tmp_path / "here", optimizer=sgd, workers=2)

    def call() -> Any:
        return run(strategy, tmp_path / "there", optimizer=sgd, cluster=Attached(patience=20)).state_dict()

    start = start_of()
    for state in values(together(3 if strategy == "ps" else 2, call)):
        assert_never_moved(state, start)
        assert all(torch.equal(value, here.state_dict()[name]) for name, value in state.items())


def test_what_is_never_used_stays_as_it_was_with_torch_collectives(tmp_path: Path) -> None:
    """Gloo adds up, with unequal weights: 101 samples, so that some have none in the last step of an epoch."""

    def call() -> Any:
        cluster = Attached(patience=20, trusted=True)
        return run("allreduce", tmp_path / "run", optimizer=adamw, cluster=cluster).state_dict()

    expected = ddp(adamw).state_dict()
    for state in values(together(WORKERS, call)):
        assert_never_moved(state, start_of())
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12)


# Used in some steps.


@each_with("optimizer", {name: name for name in OPTIMIZERS}, EXAMPLES)
def test_a_worker_alone_is_plain_torch(strategy: Strategy[Any], optimizer: str, tmp_path: Path) -> None:
    expected = plain(model=choosy, data=doubles, optimizer=OPTIMIZERS[optimizer], steps=8)
    cluster = Simulated(workers=1, numerics="real")
    found = run(alone(strategy), tmp_path / "run", optimizer=OPTIMIZERS[optimizer], cluster=cluster)
    assert_close(found, expected, tolerance=1e-12)


LIKE_DDP: list[Strategy[Any]] = [
    AllReduce(),
    *(AllReduce(algorithm=name) for name in ("ring", "butterfly", "halving_doubling", "tree", "double_tree")),
    *(AllReduce(algorithm=name) for name in ("hierarchical", "one_device")),
    ParameterServer(),
    ParameterServer(servers=3),
    ParameterServer(servers=2, pieces=3),
    StrategySwitch(when=AtShare(share=0.5), then=ParameterServer(servers=2)),
    StrategySwitch(when=AtShare(share=0.5), first=ParameterServer(servers=2), then=AllReduce()),
]


@pytest.mark.parametrize("strategy", LIKE_DDP, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_workers_together_are_as_in_ddp(strategy: Strategy[Any], optimizer: str, tmp_path: Path) -> None:
    found = run(strategy, tmp_path / "run", optimizer=OPTIMIZERS[optimizer], cluster=FIXED)
    assert_close(found, ddp(OPTIMIZERS[optimizer]), tolerance=1e-11)


def grouped(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Biases without decay: then servers hold pieces of layers from the beginning."""
    weights, others = [p for p in params if p.dim() == 2], [p for p in params if p.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01)


@pytest.mark.parametrize("strategy", ["allreduce", "ps(servers=3)"])
def test_groups_of_layers_are_as_in_ddp(strategy: str, tmp_path: Path) -> None:
    found = run(strategy, tmp_path / "run", optimizer=grouped, cluster=FIXED)
    assert_close(found, ddp(grouped), tolerance=1e-11)


@pytest.mark.parametrize("optimizer", [adam, grouped], ids=["flat", "groups"])
def test_momenta_are_averaged_layer_by_layer(optimizer: Factory, tmp_path: Path) -> None:
    """Whichever layers each worker has used so far: of those that it has not, it has no momentum."""
    strategy = SlowMo(tau=1, beta=0.0, buffers="average")
    found = run(strategy, tmp_path / "run", optimizer=optimizer, cluster=FIXED, budget=Steps(12))
    assert_never_moved(found.state_dict(), start_of())
    assert_close(found, local(optimizer, 1, steps=12, momenta=True), tolerance=1e-11)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_workers_apart_are_plain_torch_each(optimizer: str, tmp_path: Path) -> None:
    found = run(LocalSGD(tau=3), tmp_path / "run", optimizer=OPTIMIZERS[optimizer])
    assert_close(found, local(OPTIMIZERS[optimizer], 3), tolerance=1e-11)
    slow = run(SlowMo(tau=3, beta=0.0, buffers="maintain"), tmp_path / "slow", optimizer=OPTIMIZERS[optimizer])
    assert_close(slow, local(OPTIMIZERS[optimizer], 3), tolerance=1e-11)


@pytest.mark.parametrize("model", [choosy, wide])
def test_the_worlds_agree_to_the_last_bit(model: Callable[[], nn.Module], tmp_path: Path) -> None:
    """However many ranges there are, also of a large model, which fused kernels update."""
    given: dict[str, Any] = {"model": model, "optimizer": adamw, "data": doubles if model is choosy else make_data}
    expected = run("allreduce", tmp_path / "here", **given)
    for i, strategy in enumerate(("ps", "ps(servers=2)", "ps(servers=3)", "switch(when=atshare, then=ps(servers=2))")):
        assert_same(run(strategy, tmp_path / f"{i}", cluster=FIXED, **given), expected)
    assert_same(run("ps(servers=2)", tmp_path / "there", **given), expected)
    assert_never_moved(expected.state_dict(), start_of(model))


@pytest.mark.parametrize("strategy", ["allreduce", "ps(servers=2)", "localsgd(tau=2)"])
def test_a_run_goes_on_from_its_checkpoint(strategy: str, tmp_path: Path) -> None:
    """With what was kept for each layer by itself."""
    given: dict[str, Any] = {"workers": 2, "checkpoint_every": Steps(5)}
    run(strategy, tmp_path / "run", budget=Steps(5), **given)
    resumed = run(strategy, tmp_path / "run", budget=Steps(10), resume=True, **given)
    assert_same(resumed, run(strategy, tmp_path / "whole", budget=Steps(10), workers=2))


@pytest.mark.parametrize("strategy", ["allreduce", "ps(servers=2)", "allreduce(algorithm=ring)", "localsgd(tau=2)"])
def test_unused_parameters_cost_no_extra_bytes(strategy: str, tmp_path: Path) -> None:
    """As many as for a model of the same size in which every layer is used."""

    models = (partial(nn.Linear, INPUTS, 1, bias=False), Lacking)
    runs = [train(strategy, tmp_path / f"{i}", model=model, cluster=FIXED) for i, model in enumerate(models)]
    sent = [run.summary.sent_total for run in runs]
    assert sent[0] == sent[1] > 0


def test_a_layer_used_in_one_micro_batch_has_a_gradient(tmp_path: Path) -> None:
    """A layer that one part of a mini-batch uses has a gradient in that mini-batch."""
    found = run("allreduce", tmp_path / "run", workers=1, accumulate=2, batch=2, budget=Steps(12))
    seed_everything(SEED)
    module = choosy()
    inner = adam(list(module.parameters()))
    feed = IndexedFeed(doubles(), batch=2, seed=SEED, rank=0, size=1)
    for _ in range(12):
        module.zero_grad()
        (x, y), _ = feed.next()
        for i in range(2):
            torch.autograd.backward(F.mse_loss(module(x[i : i + 1]), y[i : i + 1]) / 2)
        inner.step()
    assert_close(found, module, tolerance=1e-12)


# A loop of one's own.


def script(strategy: str | None, *, size: int = 1, set_to_none: bool = True) -> dict[str, Tensor] | None:
    """The model of an ordinary loop; of two workers each takes every other sample."""
    seed_everything(SEED)
    model, rank = choosy(), 0
    made: Any = adamw(list(model.parameters()))
    if strategy is not None:
        try:
            model, made = orchestra.prepare(model, made, strategy=strategy, cluster=Attached(patience=20))
        except SystemExit:
            return None
        rank = made.orchestra.rank
    x, y = doubles()
    for step in range(10):
        chosen = (
            slice(step * 2 * BATCH + rank, (step + 1) * 2 * BATCH, size)
            if size > 1
            else slice(step * BATCH, (step + 1) * BATCH)
        )
        made.zero_grad(set_to_none=set_to_none)
        torch.autograd.backward(F.mse_loss(model(x[chosen]), y[chosen]))
        made.step()
    if strategy is not None:
        made.finish()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_loop_alone_is_plain_torch(set_to_none: bool) -> None:
    """Zeros that the loop leaves in place of gradients count as gradients, as they do in torch."""
    expected, found = (script(strategy, set_to_none=set_to_none) for strategy in (None, "allreduce"))
    assert expected is not None
    assert found is not None
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert_never_moved(found, start_of())


@pytest.mark.parametrize("strategy", ["allreduce", "ps", "localsgd(tau=2)", "downpour"])
def test_a_loop_leaves_alone_what_is_never_used(strategy: str) -> None:
    servers = strategy in ("ps", "downpour")
    states = [state for state in values(together(2 + servers, partial(script, strategy, size=2))) if state is not None]
    assert len(states) == 2
    for state in states:
        assert_never_moved(state, start_of())


# The parts.


def test_gradients_are_not_taken_together_where_some_are_absent() -> None:
    """In one call for all workers they would be zeros."""
    x, y = make_data()
    assert numerics.why_not(Lacking(), F.mse_loss, (x[:4], y[:4])) == "some parameters have no gradient"
    assert numerics.why_not(nn.Linear(INPUTS, 1), F.mse_loss, (x[:4], y[:4])) is None


def test_marks_survive_every_weighted_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for size in range(1, 6):
            for n in (1, 5, 64, 70_001):
                weights = torch.randint(0, 9, (size,), generator=generator).tolist()
                weights[0] += not any(weights)
                vectors = [torch.full((n,), ABSENT, dtype=dtype) for _ in range(size)]
                out = torch.empty(n, dtype=dtype)
                weighted_mean(out, vectors, weights)
                assert torch.signbit(out).all()
                taking_part = next(i for i, weight in enumerate(weights) if weight)
                vectors[taking_part].zero_()
                weighted_mean(out, vectors, weights)
                assert not torch.signbit(out).any()


def test_the_mean_of_equal_numbers_is_that_number() -> None:
    """So that workers that each take the mean of their models do not move what none of them has changed."""
    x = torch.randn(10_001, generator=torch.Generator().manual_seed(0))
    for size in range(1, 9):
        out = torch.empty_like(x)
        weighted_mean(out, [x.clone() for _ in range(size)], [32.0] * (size - 1) + [7.0])
        assert torch.equal(out, x)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_was_cut_is_handed_over_in_parts(optimizer: str) -> None:
    """From one optimizer to two with a range each, and back to one, by way of text as on a wire."""
    layers, parts = [4, 3, 2, 5], [slice(0, 6), slice(6, 14)]
    whole = FlatOptimizer(OPTIMIZERS[optimizer], torch.ones(14), pieces=pieces_of(layers, slice(0, 14)))
    g = torch.arange(1.0, 15.0)
    for lacking in ((), (1,), (1, 3), (0,)):
        given = g.clone()
        for i in lacking:
            given[pieces_of(layers, slice(0, 14))[i]] = ABSENT
        whole.step(given)
    x = whole._flat.data  # type: ignore[union-attr]
    heirs = [FlatOptimizer(OPTIMIZERS[optimizer], x[part].clone(), pieces=pieces_of(layers, part)) for part in parts]
    for heir, part in zip(heirs, parts, strict=True):
        words = json.loads(json.dumps(optimizer_state.within(whole.outline(), part, 14)))
        heir.adopt(words, [vector[part].clone() for vector in whole.vectors()])
        heir.step(g[part].clone())
    again = torch.cat([heir._flat.data for heir in heirs])  # type: ignore[union-attr]
    back = FlatOptimizer(OPTIMIZERS[optimizer], again, pieces=pieces_of(layers, slice(0, 14)))
    said = [json.loads(json.dumps(heir.outline())) for heir in heirs]
    back.adopt(*optimizer_state.joined(parts, said, [heir.vectors() for heir in heirs]))
    whole.step(g.clone())
    for _ in range(2):
        assert torch.equal(back._flat.data, whole._flat.data)  # type: ignore[union-attr]
        back.step(g.clone())
        whole.step(g.clone())
