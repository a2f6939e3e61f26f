# SPDX-License-Identifier: Apache-2.0
"""Momentum and rate after a switch: by default stable for stale gradients, logged, and the user's to choose."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.prepare.loops import loop
from tests.processes import together
from tests.strategies.test_strategy_switch import ASYNC, HALF, LOCAL, SIMULATED, WORKERS, flat, logged
from tests.zoo import adam, assert_same, events, momentum, sgd, simulate, train
from torch import nn

from orchestra import AllReduce, Attached, ParameterServer, Plateau, Simulated, Solo, Steps, StrategySwitch
from orchestra.cli.summary import describe
from orchestra.model.flat_optimizer import Factory, FlatOptimizer
from orchestra.runs.events import Stepped

LR, GAIN = 0.02, 10  # of `momentum`: γ, and 1/(1 − μ)


def rates(run: Path) -> list[float]:
    return [e.lr for e in events(run, 0) if isinstance(e, Stepped)]


def values(run: Path, node: int) -> list[float]:
    return [e.value for name in ("momentum", "rate") for e in logged(run, node, f"{name} after the switch")]


@pytest.mark.parametrize("cluster", [LOCAL, SIMULATED], ids=["local", "simulated"])
def test_after_the_switch_a_gradient_moves_x_as_far_without_momentum(cluster: Any, tmp_path: Path) -> None:
    """It is logged by every node, and told in the summary."""
    result = train(StrategySwitch(when=HALF), tmp_path, cluster=cluster, budget=Steps(4), optimizer=momentum)
    rate = LR / WORKERS * GAIN
    assert rates(tmp_path) == pytest.approx([LR, rate, rate, rate])
    for node in range(WORKERS + 1):
        assert values(tmp_path, node) == pytest.approx([0.0, rate])
    assert result.summary.afterwards == {"momentum": 0.0, "rate": pytest.approx(rate)}
    assert f"to momentum 0 and rate {rate:.4g}" in describe(tmp_path, result.summary)


def test_among_processes_that_were_started_by_others(tmp_path: Path) -> None:
    call = partial(train, StrategySwitch(when=HALF), tmp_path, cluster=Attached(patience=20), budget=Steps(4))
    for outcome in together(WORKERS + 1, lambda: call().summary.afterwards):
        assert outcome.value == {"momentum": 0.0, "rate": pytest.approx(LR / WORKERS * GAIN)}, outcome.error


def test_a_loop_keeps_its_own_momentum_after_the_switch(tmp_path: Path) -> None:
    """The loop's optimizer stays as it is: the server's goes on without momentum."""
    strategy = "switch(then=ps(consistency=asp()), when=atshare(share=0.5), momenta=reset)"
    own: list[tuple[float, float]] = []

    def each(optimizer: Any) -> None:
        own.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))

    def call() -> Any:
        try:
            loop(strategy, steps=6, each=each, out=tmp_path / "run")
        except SystemExit as end:
            return end.code
        return {*own}

    *workers, server = together(3, call)
    assert [outcome.value for outcome in workers] == [{(LR, 0.9)}] * 2, workers
    assert server.value == 0, server.error
    for node in range(3):
        assert values(tmp_path / "run", node) == pytest.approx([0.0, LR / 2 * GAIN])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"momentum": 0.9}, (0.9, LR / WORKERS)),
        ({"momentum": 0.6}, (0.6, LR / WORKERS * 4)),
        ({"scale": 0.5}, (0.0, LR * 0.5)),
        ({"momentum": 0.5, "scale": 1.0}, (0.5, LR)),
        ({"momentum": 0.0, "then": ParameterServer()}, (0.0, LR * GAIN)),
    ],
    ids=str,
)
def test_momentum_and_rate_after_the_switch_can_be_chosen(
    given: dict[str, Any], expected: tuple[float, float], tmp_path: Path
) -> None:
    strategy = StrategySwitch(when=HALF, **given)
    found = train(strategy, tmp_path, cluster=Simulated(workers=WORKERS), budget=Steps(4)).summary.afterwards
    assert (found["momentum"], found["rate"]) == pytest.approx(expected)


@pytest.mark.parametrize("optimizer", [sgd, adam], ids=["sgd", "adam"])
def test_without_momentum_the_rate_follows_the_updates_alone(optimizer: Factory, tmp_path: Path) -> None:
    cluster = Simulated(workers=WORKERS)
    for name, strategy in (("default", StrategySwitch(when=HALF)), ("told", StrategySwitch(when=HALF, momentum=0.9))):
        result = train(strategy, tmp_path / name, cluster=cluster, budget=Steps(6), optimizer=optimizer)
        first, *_, last = rates(tmp_path / name)
        assert last == pytest.approx(first / WORKERS)
        assert result.summary.afterwards["rate"] == pytest.approx(last)
    assert_same(*(train(StrategySwitch(when=HALF, momentum=m), tmp_path / f"{m}", cluster=cluster, budget=Steps(6),
                        optimizer=optimizer).model for m in (None, 0.9)))  # fmt: skip


def test_one_worker_keeps_its_momentum_bit_for_bit(tmp_path: Path) -> None:
    given: dict[str, Any] = {"workers": 1, "budget": Steps(10), "optimizer": momentum}
    switched = simulate(StrategySwitch(first=AllReduce(), then=ASYNC, when=HALF), tmp_path / "a", **given)
    assert switched.summary.happened is not None
    assert switched.summary.afterwards == {}
    assert_same(switched.model, simulate(Solo(), tmp_path / "b", **given).model)


def test_a_resumed_run_goes_on_with_what_was_set(tmp_path: Path) -> None:
    """Over a synchronous server, where the bits can be compared."""
    when = Plateau(window=2, threshold=9.0, every=0.25)  # fires in the first epoch
    strategy = StrategySwitch(then=ParameterServer(), when=when, momentum=0.5)
    given: dict[str, Any] = {"workers": 2, "schedule": lambda epochs: 1 / (1 + epochs)}
    whole = train(strategy, tmp_path / "whole", budget=Steps(14), **given)
    stopped = train(strategy, tmp_path / "parts", budget=Steps(8), checkpoint_every=Steps(4), **given)
    assert stopped.summary.happened is not None
    resumed = train(strategy, tmp_path / "parts", budget=Steps(14), checkpoint_every=Steps(4), resume=True, **given)
    assert_same(resumed.model, whole.model)


# The optimizer.


def two_groups(params: Any, **more: Any) -> torch.optim.SGD:
    first, second = params
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "lr": 0.1, "momentum": 0.99}]
    return torch.optim.SGD(groups, lr=0.4, momentum=0.75, **more)


@pytest.mark.parametrize("lent", [False, True])
def test_every_group_has_its_own_factor(lent: bool) -> None:
    """x ← x − γ/(1 − μ) g; an optimizer that is lent stays as it was."""
    layers = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))]
    own = two_groups(layers)
    inner = FlatOptimizer.around(own, layers) if lent else FlatOptimizer(lambda _: own, torch.empty(0), layers=layers)
    inner.step(torch.ones(4))  # momenta that play no part afterwards
    before = flat(nn.ParameterList(layers)).clone()
    inner.set_momentum(0.0, keep=True)
    inner.step(torch.ones(4))
    moved = before - flat(nn.ParameterList(layers))
    assert moved.tolist() == pytest.approx([0.4 * 4, 0.4 * 4, 0.1 * 100, 0.1 * 100])
    assert [rate for _, rate in inner.rates()] == pytest.approx([1.6, 10.0])
    assert [group["momentum"] for group in own.param_groups] == ([0.75, 0.99] if lent else [0.0, 0.0])
    assert [group["lr"] for group in own.param_groups] == pytest.approx([0.4, 0.1] if lent else [1.6, 10.0])


def test_dampening_counts_where_there_is_momentum() -> None:
    """(1 − d)/(1 − μ) of a gradient is added in the end, and all of it once if μ is zero."""
    inner = FlatOptimizer(partial(torch.optim.SGD, lr=1.0, momentum=0.5, dampening=0.8), torch.zeros(1))
    inner.set_momentum(0.0, keep=True)
    assert inner.lr == pytest.approx(0.4)


def test_what_a_schedule_elsewhere_says_of_momentum_is_too_late() -> None:
    inner = FlatOptimizer(partial(torch.optim.SGD, lr=1.0, momentum=0.75), torch.zeros(1))
    inner.set_momentum(0.0, keep=True)
    inner.follow("momentum", 0, [0.9])
    inner.follow("lr", 0, [0.5])
    assert inner.momentum == 0.0
    assert inner.lr == pytest.approx(2.0)


def test_pace_is_saved_and_restored() -> None:
    make = partial(FlatOptimizer, partial(torch.optim.SGD, lr=1.0, momentum=0.75), schedule=lambda epochs: 1.0 + epochs)
    inner, again = make(torch.zeros(2)), make(torch.zeros(2))
    inner.set_momentum(0.0, keep=True)
    inner.rescale(0.25)
    again.restore(inner.state())
    for each in (inner, again):
        each.set_progress(1.0)
        assert [each.lr, each.momentum] == pytest.approx([2.0, 0.0])
