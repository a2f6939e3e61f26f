# SPDX-License-Identifier: Apache-2.0
"""Strategy-Switch: the rule, one step for all, what is handed over, and what is said if it never happens."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cases import in_both_worlds
from tests.zoo import (
    COUNT,
    adam,
    assert_close,
    assert_same,
    ended,
    events,
    make_data,
    make_large,
    momentum,
    sgd,
    simulate,
    train,
)
from torch import Tensor, nn

from orchestra import (
    ASP,
    EASGD,
    LARS,
    AllReduce,
    AtShare,
    ConfigError,
    Downpour,
    Epochs,
    KAsync,
    Local,
    LocalSGD,
    ParameterServer,
    Plateau,
    Seconds,
    Simulated,
    SlowMo,
    SoftSync,
    Solo,
    Steps,
    Strategy,
    StrategySwitch,
    SyncEASGD,
)
from orchestra.model.flat_optimizer import Factory, FlatOptimizer
from orchestra.runs.events import Logged, Stepped
from orchestra.strategies.switch.triggers import LossHistory

S = Strategy[Any]
WORKERS = 3
HALF = AtShare(share=0.5)
ASYNC = ParameterServer(consistency=ASP())


def logged(run: Path, node: int, name: str) -> list[Logged]:
    return [e for e in events(run, node) if isinstance(e, Logged) and e.name == name]


LOCAL = Local(workers=WORKERS)
SIMULATED = Simulated(workers=WORKERS, compute_time="lognormal:0.05,0.5", network="100mbit,1ms")
in_worlds = partial(in_both_worlds, local=LOCAL, simulated=SIMULATED)


# The rule.


class Told:
    """A node that is told its losses, one a round."""

    def __init__(self, losses: list[float]) -> None:
        self.losses, self.epochs, self.weight, self.budget = losses, 0.0, 1.0, 0.0
        self.loss = 0.0
        self.comm = self
        self.said: list[tuple[str, float]] = []

    def mean_(self, x: Tensor, *, weight: float) -> float:
        return weight

    def gather(self, x: Tensor) -> list[Tensor]:
        return [x - 1, x]

    def log(self, name: str, value: float) -> None:
        self.said.append((name, value))


def rounds_until(when: Plateau, losses: list[float]) -> int | None:
    node, watch = Told(losses), LossHistory()
    for number, loss in enumerate(losses, start=1):
        node.epochs, node.loss = number * when.every, loss
        if when.fires(node, watch):  # type: ignore[arg-type]
            return number
    return None


def test_s_is_the_mean_relative_change_of_a_full_window() -> None:
    losses = [4.0, 2.0, 1.0, 1.1]
    node, watch = Told(losses), LossHistory()
    for number, loss in enumerate(losses, start=1):
        node.epochs, node.loss = float(number), loss
        assert not Plateau(window=4).fires(node, watch)  # type: ignore[arg-type]
    said = [value for name, value in node.said if name == "s"]
    assert said == [pytest.approx((0.5 + 0.5 + 0.1) / 3)]


def test_plateau_fires_when_five_changes_in_a_row_are_small_on_average() -> None:
    falling, settled = [2.0, 1.5, 1.2, 1.1], [1.0] * 6
    assert rounds_until(Plateau(), falling + settled) == len(falling) + 6  # the step down to 1.0 is still in the window
    assert rounds_until(Plateau(window=2), falling + settled) == len(falling) + 2
    assert rounds_until(Plateau(), settled) == 6  # not before the window is full


@pytest.mark.parametrize("change", [0.009999, 0.010001])
def test_the_threshold_is_met_when_it_is_reached(change: float) -> None:
    losses = [1.0]
    for _ in range(5):
        losses.append(losses[-1] * (1 - change))
    assert (rounds_until(Plateau(), losses) == 6) == (change <= 0.01)


def test_a_loss_that_tends_to_zero_never_settles() -> None:
    assert rounds_until(Plateau(), [0.5**i for i in range(35)]) is None


def test_a_round_is_as_long_as_wanted_and_its_loss_a_mean(tmp_path: Path) -> None:
    when = Plateau(window=3, threshold=0.0, every=0.5)
    simulate(StrategySwitch(when=when), tmp_path, workers=WORKERS, budget=Epochs(4), optimizer=sgd)
    said = logged(tmp_path, 0, "loss of the round")
    assert [round(e.step / 3) for e in said] == list(range(1, 9))  # six steps an epoch
    steps = [[e for e in events(tmp_path, w) if isinstance(e, Stepped)] for w in range(WORKERS)]
    first = [[(e.loss or 0.0, e.samples) for e in each[:3]] for each in steps]
    total = sum(loss * 6 for each in first for loss, _ in each)  # six samples in every batch of an early round
    assert said[0].value == pytest.approx(total / (6 * 3 * WORKERS), rel=1e-5)
    assert [e.value for e in said] == [e.value for e in logged(tmp_path, 2, "loss of the round")]


def test_the_largest_loss_of_all_workers(tmp_path: Path) -> None:
    mean, largest = (
        [
            e.value
            for e in logged(simulate(StrategySwitch(when=Plateau(loss=loss)), tmp_path / loss, workers=WORKERS,
                                  budget=Epochs(3)).run, 0, "loss of the round")
        ]
        for loss in ("training", "maximum")
    )  # fmt: skip
    assert all(b > a for a, b in zip(mean, largest, strict=True))


def apart() -> tuple[Tensor, Tensor]:
    return make_data(40)


def test_the_loss_of_samples_set_apart(tmp_path: Path) -> None:
    when = Plateau(loss="validation", every=1)
    with pytest.raises(ConfigError, match="needs the validation loss"):
        train(StrategySwitch(when=when), tmp_path / "without", workers=WORKERS, budget=Epochs(1))
    for name, cluster in (("local", LOCAL), ("simulated", SIMULATED)):
        given: dict[str, Any] = {"cluster": cluster, "budget": Epochs(1), "validation_data": apart}
        result = train(StrategySwitch(when=when), tmp_path / name, **given)
        (said,) = logged(tmp_path / name, 0, "loss of the round")
        x, y = apart()
        with torch.no_grad():
            assert said.value == pytest.approx(float(nn.functional.mse_loss(result.model(x), y)), rel=1e-5)


# One step for all.


@in_worlds(
    "strategy",
    [
        StrategySwitch(when=Plateau(window=3, threshold=0.5, every=0.5)),
        StrategySwitch(when=Plateau(window=3, threshold=0.0, latest=0.4)),
        StrategySwitch(when=HALF, then=ParameterServer(consistency=ASP(), servers=2)),
        StrategySwitch(when=HALF, first=ASYNC, then=AllReduce()),
        StrategySwitch(when=HALF, first=ASYNC, then=LocalSGD(tau=2)),
        StrategySwitch(when=HALF, first=ParameterServer(), then=ASYNC),
        StrategySwitch(when=HALF, first=LocalSGD(tau=4), then=SlowMo(tau=3)),
        StrategySwitch(when=HALF, first=SlowMo(tau=3), then=ParameterServer(consistency=SoftSync(n=2))),
        StrategySwitch(when=Plateau(window=2, threshold=9.0, every=0.5), first=ASYNC, then=AllReduce()),
    ],
    real=lambda strategy: strategy.first == ASYNC,
)
def test_all_workers_switch_after_the_same_step(strategy: S, cluster: Any, tmp_path: Path) -> None:
    result = train(strategy, tmp_path, cluster=cluster, budget=Steps(20), optimizer=momentum)
    steps = {e.step for w in range(WORKERS) for e in logged(tmp_path, w, "switched")}
    assert len(steps) == 1
    assert result.summary.happened is not None
    assert result.summary.happened[0] in steps
    assert result.summary.missing is None
    assert result.summary.steps == 20


# What is handed over.


def servers_keep_their_ranges(first: S, then: S, optimizer: Factory) -> bool:
    return len({first.layout.servers, then.layout.servers} - {0}) < 2


@in_worlds(
    "first, then, optimizer",
    [AllReduce(), ParameterServer(), ParameterServer(servers=2)],
    [AllReduce(), ParameterServer(), ParameterServer(servers=2)],
    [sgd, momentum, adam],  # the first has nothing to hand over
    real=lambda first, then, optimizer: (
        optimizer is adam and {first, then} == {AllReduce(), ParameterServer(servers=2)}
    ),
    possible=servers_keep_their_ranges,
)
def test_from_synchronous_to_synchronous_nothing_changes(
    first: S, then: S, optimizer: Factory, cluster: Any, tmp_path: Path
) -> None:
    """Parameters, momenta, counts of steps, schedule and samples all go on, bit for bit; whatever holds them."""
    given: dict[str, Any] = {"cluster": cluster, "budget": Epochs(3), "optimizer": optimizer, "schedule": falling}
    switching = StrategySwitch(first=first, then=then, when=HALF)
    assert_same(train(switching, tmp_path / "a", **given).model, train(first, tmp_path / "b", **given).model)


def falling(epochs: float) -> float:
    return 1 / (1 + epochs)


def test_large_models_switch_to_servers_as_in_all_reduce(tmp_path: Path) -> None:
    given: dict[str, Any] = {"workers": 2, "budget": Steps(6), "optimizer": momentum, "model": make_large}
    switching = StrategySwitch(then=ParameterServer(servers=2), when=HALF)
    assert_same(
        simulate(switching, tmp_path / "a", **given).model, simulate(AllReduce(), tmp_path / "b", **given).model
    )


def test_local_steps_go_on_at_the_end_of_a_round(tmp_path: Path) -> None:
    given: dict[str, Any] = {"workers": WORKERS, "budget": Steps(16), "optimizer": momentum}
    local = LocalSGD(tau=4)
    switching = StrategySwitch(first=local, then=local, when=HALF)
    # The mean of equal vectors may round.
    assert_close(train(switching, tmp_path / "a", **given).model, train(local, tmp_path / "b", **given).model)


@pytest.mark.parametrize(("momenta", "kept"), [("keep", 1.0), ("reset", None), ("scale", 1 / WORKERS)])
def test_momenta_are_kept_forgotten_or_scaled(momenta: Any, kept: float | None, tmp_path: Path) -> None:
    """By the first update after the switch: v ← 0.9 k v + g, x ← x − γ v."""
    strategy = StrategySwitch(then=ParameterServer(), when=HALF, momenta=momenta)
    switched = flat(simulate(strategy, tmp_path / "a", workers=WORKERS, budget=Steps(2), optimizer=momentum).model)
    start, one, two = _trajectory(tmp_path)
    v1 = (start - one) / 0.02
    g2 = (one - two) / 0.02 - 0.9 * v1
    expected = one - 0.02 * (0.9 * (kept or 0.0) * v1 + g2)
    torch.testing.assert_close(switched, expected, rtol=1e-4, atol=1e-5)


def _trajectory(tmp_path: Path) -> tuple[Tensor, Tensor, Tensor]:
    """x₀, x₁, x₂ of all-reduce."""
    frozen: Factory = partial(torch.optim.SGD, lr=1e-12)
    start, one, two = (
        flat(train(AllReduce(), tmp_path / f"{i}", workers=WORKERS, budget=Steps(steps), optimizer=optimizer).model)
        for i, (steps, optimizer) in enumerate([(1, frozen), (1, momentum), (2, momentum)])
    )
    return start, one, two


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("first", "then", "factor"),
    [
        (AllReduce(), ASYNC, 1 / WORKERS),
        (ASYNC, AllReduce(), WORKERS),
        (AllReduce(), ParameterServer(), 1),
        (ParameterServer(), ParameterServer(consistency=KAsync(k=2)), 2 / WORKERS),
        (AllReduce(), LocalSGD(), 1),
        (AllReduce(), ParameterServer(consistency=SoftSync(n=2)), 1 / 2),
    ],
    ids=str,
)
def test_the_learning_rate_follows_the_number_of_updates(first: S, then: S, factor: float, tmp_path: Path) -> None:
    train(StrategySwitch(first=first, then=then, when=HALF), tmp_path, workers=WORKERS, budget=Steps(4), optimizer=sgd)
    rates = [e.lr for e in events(tmp_path, 0) if isinstance(e, Stepped)]
    assert rates == pytest.approx([0.05, 0.05 * factor, 0.05 * factor, 0.05 * factor])


def test_the_learning_rate_can_be_left_alone(tmp_path: Path) -> None:
    simulate(StrategySwitch(when=HALF, scale=1.0), tmp_path, workers=WORKERS, budget=Steps(4), optimizer=sgd)
    assert {e.lr for e in events(tmp_path, 0) if isinstance(e, Stepped)} == {0.05}


def test_an_optimizer_takes_over_what_another_kept() -> None:
    x, g = torch.ones(6), torch.arange(6.0)
    for factory in (momentum, adam, partial(torch.optim.AdamW, lr=0.1), partial(torch.optim.Adagrad, lr=0.1)):
        whole, heir = FlatOptimizer(factory, x.clone()), FlatOptimizer(factory, x.clone()[2:5])
        whole.step(g)
        heir._flat.data.copy_(whole._flat.data[2:5])  # type: ignore[union-attr]
        heir.adopt(json.loads(json.dumps(whole.outline())), [v[2:5].clone() for v in whole.vectors()])
        whole.step(g)
        heir.step(g[2:5])
        assert torch.equal(heir._flat.data, whole._flat.data[2:5])  # type: ignore[union-attr]


def test_servers_learn_how_many_samples_there_were(tmp_path: Path) -> None:
    """So the schedule goes on where it was, and snapshots go on counting."""
    result = simulate(
        StrategySwitch(when=HALF), tmp_path, workers=WORKERS, budget=Epochs(4), schedule=falling,
        evaluate=lambda model, data: {"one": 1.0}, evaluation_data=make_data, evaluate_every=Epochs(1),
    )  # fmt: skip
    from orchestra.runs.facts import scores_of

    scores = scores_of(result.run)
    assert [s.number for s in scores] == [0, 1, 2, 3, 4, 5]
    samples = [s.samples for s in scores]
    assert samples[1:3] == [101, 202]
    assert all(0 <= s - 101 * n <= 3 * 6 for n, s in enumerate(samples[:5]))


# What is said if it never happens.


def test_a_server_may_hold_an_empty_range(tmp_path: Path) -> None:
    """Two numbers, three servers: momenta are handed over all the same."""
    strategy = StrategySwitch(then=ParameterServer(servers=3), when=AtShare(share=0.5))
    given: dict[str, Any] = {"model": lambda: nn.Linear(1, 1), "data": lambda: (torch.ones(64, 1), torch.ones(64, 1))}
    together = [
        train(s, tmp_path / name, cluster=Simulated(workers=3), budget=Steps(8), optimizer=momentum, **given).model
        for name, s in (("switched", strategy), ("plain", AllReduce()))
    ]
    for mine, theirs in zip(*(m.parameters() for m in together), strict=True):
        assert torch.equal(mine, theirs)


def test_after_the_last_step_there_is_nothing_to_switch_to(tmp_path: Path) -> None:
    whole = StrategySwitch(when=AtShare(share=1.0))
    result = simulate(whole, tmp_path / "run", workers=WORKERS, budget=Steps(4))
    assert "NEVER SWITCHED" in (result.summary.missing or "")
    assert_same(result.model, simulate(AllReduce(), tmp_path / "never", workers=WORKERS, budget=Steps(4)).model)


def test_a_switch_that_never_came_is_said_loudly(tmp_path: Path) -> None:
    never = StrategySwitch(when=Plateau(threshold=0.0))
    result = simulate(never, tmp_path / "never", workers=WORKERS, budget=Epochs(8))
    assert result.summary.missing is not None
    assert "NEVER SWITCHED in 48 steps (s was " in result.summary.missing
    assert "NEVER SWITCHED" in repr(result)
    ending = json.loads((result.run / "ending.json").read_text())
    assert "NEVER SWITCHED" in ending["warnings"][0]
    assert_same(result.model, simulate(AllReduce(), tmp_path / "allreduce", workers=WORKERS, budget=Epochs(8)).model)


# What makes no sense is refused.


@pytest.mark.parametrize(
    ("strategy", "complaint"),
    [
        ("switch(first=ps(servers=2), then=ps(servers=3))", "servers keep their ranges"),
        ("switch(first=ps(consistency=kasync(k=2)))", "never all meet"),
        ("switch(then=hogwild())", "cannot be switched from or to"),
        ("switch(first=switch())", "cannot be switched from or to"),
        ("switch(when=plateau(window=1))", "must be at least 2"),
        ("switch(when=atshare(share=1.5))", "must be at most 1"),
        ("switch(when=plateau(loss=worst))", "must be one of training, maximum, validation"),
    ],
)
def test_what_makes_no_sense_is_refused(strategy: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=complaint):
        simulate(strategy, tmp_path, workers=WORKERS, budget=Steps(1))


@pytest.mark.parametrize("when", ["atshare(share=0.5)", "plateau(latest=0.5)"])
def test_a_share_of_a_budget_that_has_none_is_refused(when: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no share that could be spent"):
        train(f"switch(when={when})", tmp_path / "a", workers=WORKERS, budget=Seconds(1))
    result = train(f"switch(when={when})", tmp_path / "b", workers=WORKERS, budget=Seconds(60) | Steps(8))
    assert result.summary.happened is not None
    assert result.summary.happened[0] == 4


def test_switching_with_one_worker_equals_plain_training(tmp_path: Path) -> None:
    strategy = StrategySwitch(first=Solo(), then=ParameterServer(), when=HALF)
    given: dict[str, Any] = {"workers": 1, "budget": Steps(10), "optimizer": momentum}
    assert_same(simulate(strategy, tmp_path / "a", **given).model, simulate(Solo(), tmp_path / "b", **given).model)


def test_to_a_centre_samples_are_counted_once(tmp_path: Path) -> None:
    for name, then in (("easgd", EASGD(tau=2)), ("downpour", Downpour())):
        result = simulate(StrategySwitch(then=then, when=HALF), tmp_path / name, workers=WORKERS, budget=Epochs(4))
        assert ended(tmp_path / name, WORKERS).samples == result.summary.samples == 4 * COUNT


@in_worlds("promote", [False, True], real=lambda promote: promote)
def test_momenta_of_layers_can_be_forgotten(promote: bool, cluster: Any, tmp_path: Path) -> None:
    then = ParameterServer(servers=2, placement="layers")
    strategy = StrategySwitch(then=then, when=HALF, momenta="reset", promote=promote)
    result = train(strategy, tmp_path, cluster=cluster, budget=Steps(6), optimizer=partial(LARS, lr=0.05))
    assert result.summary.happened is not None


def test_what_is_forgotten_is_not_sent(tmp_path: Path) -> None:
    strategies = [StrategySwitch(then=ASYNC, when=HALF, momenta=momenta) for momenta in ("keep", "reset")]
    kept, reset = (
        simulate(s, tmp_path / s.momenta, workers=WORKERS, optimizer=adam, budget=Steps(4)).summary.sent_total
        for s in strategies
    )
    assert kept - reset > 2 * 4 * 83  # two moments, and what they are called


@pytest.mark.parametrize("strategy", [SlowMo(tau=2), SyncEASGD(tau=2), LocalSGD(tau=3)], ids=repr)
def test_from_a_strategy_to_itself_nothing_changes(strategy: S, tmp_path: Path) -> None:
    switched = StrategySwitch(first=strategy, then=strategy, when=AtShare(share=0.3))
    found = train(switched, tmp_path / "switched", workers=WORKERS, budget=Steps(9))
    assert found.summary.happened == (3, found.summary.happened[1] if found.summary.happened else 0.0)
    assert_same(found.model, train(strategy, tmp_path / "alone", workers=WORKERS, budget=Steps(9)).model)


def test_only_first_moments_are_divided() -> None:
    x = torch.ones(3)
    inner = FlatOptimizer(adam, x)
    inner.step(torch.full((3,), 0.5))
    (first,) = inner.first_moments()
    first.div_(4)
    kept = inner.optimizer.state[inner.optimizer.param_groups[0]["params"][0]]
    assert torch.allclose(kept["exp_avg"], torch.full((3,), 0.05 / 4))
    assert torch.allclose(kept["exp_avg_sq"], torch.full((3,), 0.00025))


def test_a_round_without_a_loss_does_not_count() -> None:
    losses = [2.0, 1.0, math.nan, 1.0, 1.0]
    assert rounds_until(Plateau(window=3), losses) == 5
