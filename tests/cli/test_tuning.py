# SPDX-License-Identifier: Apache-2.0
"""Every strategy is tuned with equally many tries, on other seeds, in no more time than the race takes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.conftest import Orchestra, story
from torch.utils.data import IterableDataset

from orchestra.cli import compare, fairness, sources, streams, tuning, tuning_cache, tuning_plan
from orchestra.cli.candidates import Setting, grid, settings
from orchestra.cli.options import Options
from orchestra.cli.race import Race
from orchestra.cli.table import Outcome
from orchestra.cli.tuning import Tuning
from orchestra.cli.tuning_plan import Costs, TuningPlan
from orchestra.cli.tuning_results import TuningResult, is_lost, rank
from orchestra.errors import ConfigError
from orchestra.model.adjusted_optimizer import Adjusted
from orchestra.report import model
from orchestra.strategies.catalogue import ROWS

EVERY = sorted({text for row in ROWS for text in (*row.search_space, row.short or row.name)})


# What is tried.


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("fixed", [True, False])
def test_all_strategies_have_equally_many_different_tries(momentum: float, fixed: bool) -> None:
    tries = 12
    for text in EVERY:
        found = settings(text, fixed=fixed, own=0.1, momentum=momentum)
        assert len({*grid(found, tries)}) == tries, text
        for side in (-1, 1):
            assert len({*grid(found, tries, side)} - {*grid(found, tries)}) == tries // 2, text
        assert any(setting.rate == pytest.approx(0.1) and setting.momentum is None for setting in grid(found, tries))


def test_asynchronous_strategies_are_tried_without_momentum_as_well() -> None:
    asp = settings("ps(consistency=asp)", fixed=False, own=0.1, momentum=0.9)
    assert {setting.momentum for setting in asp} == {None, 0.0}
    assert all(s.momentum is None for s in settings("allreduce", fixed=False, own=0.1, momentum=0.9))
    assert all(s.momentum is None for s in settings("ps(consistency=asp)", fixed=False, own=0.1, momentum=0.0))


@pytest.mark.parametrize(
    ("text", "tuned"), [("localsgd", True), ("localsgd(tau=8)", False), ("slowmo(beta=0.5)", True)]
)
def test_an_option_that_was_given_stays(text: str, tuned: bool) -> None:
    race = compare.prepare(sources.find("digits"), [text], Options(workers=2, sim=True), 3, None, Path("nowhere"))
    (name,) = race.strategies
    found = settings(name, fixed=name in race.fixed, own=0.1, momentum=0.9)
    assert len({setting.strategy for setting in found}) == (3 if tuned else 1)


# How long it takes.


@pytest.mark.parametrize("worth", [1, 2, 3, 5, 10, 40])
@pytest.mark.parametrize("given", [0, 2, 7])
@pytest.mark.parametrize(
    ("costs", "real"),
    [
        (Costs(run=0.0, score=0.0, epoch=10.0, real=10.0), False),
        (Costs(run=0.5, score=0.1, epoch=10.0, real=10.0), True),
        (Costs(run=0.5, score=0.1, epoch=10.0, real=5.0), True),  # two at once
    ],
)
def test_tuning_takes_at_most_as_long_as_the_race(worth: int, given: int, costs: Costs, real: bool) -> None:
    plan = TuningPlan(4, 20.0, worth, costs, race_is_real=real, given=given).fitted()
    assert plan.seconds <= plan.race_seconds
    assert plan.runs == 4 * worth
    assert 20 / 100 <= plan.first <= 20 / 4
    assert plan.widenings == (0 if given else 1)


def test_beside_a_simulated_race_the_machine_does_not_matter() -> None:
    quick = TuningPlan(4, 20.0, 3, Costs(run=0.0, score=0.0, epoch=1.0, real=1.0)).fitted()
    slow = TuningPlan(4, 20.0, 3, Costs(run=9.0, score=5.0, epoch=30.0, real=30.0)).fitted()
    assert dataclasses.replace(slow, costs=quick.costs) == quick


def test_all_that_the_race_takes_is_used() -> None:
    plan = TuningPlan(4, 20.0, 3, Costs(run=0.0, score=0.0, epoch=10.0, real=10.0)).fitted()
    assert plan.seconds == pytest.approx(plan.race_seconds)
    many = dataclasses.replace(plan, race_is_real=True, costs=Costs(0.0, 0.0, epoch=10.0, real=5.0)).fitted()
    assert 0.9 * many.race_seconds < many.seconds <= many.race_seconds


def test_where_runs_end_early_tries_are_as_much_shorter() -> None:
    whole = TuningPlan(4, 20.0, 3, Costs(run=0.0, score=0.0, epoch=10.0, real=10.0)).fitted()
    early = dataclasses.replace(whole, share_of_epochs=0.4).fitted()
    assert early.first == pytest.approx(0.4 * whole.first)
    assert early.race_seconds == pytest.approx(0.4 * whole.race_seconds)
    assert early.seconds <= early.race_seconds * (1 + 1e-9)


def test_where_it_cannot_be_short_enough_a_minute_is_allowed() -> None:
    costs = Costs(run=0.5, score=0.01, epoch=0.1, real=0.1)
    quick = TuningPlan(1, 20.0, 1, costs, race_is_real=True, real=True).fitted()
    assert (quick.fits, quick.race_seconds < quick.seconds < 60) == (True, True)
    slow = dataclasses.replace(quick, strategies=9).fitted()
    assert not slow.fits
    assert slow.first == pytest.approx(20 / 100)


def test_before_a_race_of_seconds_tries_are_long() -> None:
    """The longest try trains for three quarters of a run: the best rate at a tenth of it may collapse later."""
    costs = Costs(run=0.05, score=0.01, epoch=0.1, real=0.05)
    assert TuningPlan(3, 3.0, 2, costs, race_is_real=True).fitted().first == pytest.approx(3 / 4)


def test_many_cores_tune_on_real_processes_where_simulation_is_too_slow(tmp_path: Path) -> None:
    """Sixteen workers on as many cores: one core takes sixteen times as long to simulate them."""
    costs = Costs(run=1.0, score=1.0, epoch=1600.0, real=100.0)
    tuned = made(best_at(0.06), ("allreduce",), tmp_path, costs=costs, sim=False)
    assert tuned.plan.real
    assert tuned.run().tuning == "on real processes"
    costs = dataclasses.replace(costs, epoch=200.0)
    two = made(best_at(0.06), ("allreduce",), tmp_path / "two", costs=costs, sim=False)
    assert two.run().tuning == "in simulation"


def test_where_tries_take_longer_than_the_race_there_are_none(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    costs = Costs(run=9.0, score=9.0, epoch=0.1, real=0.1)
    tuned = made(best_at(0.06), ("allreduce", "ps"), tmp_path, costs=costs, sim=False)
    tuned.quiet = False
    race = tuned.run()
    assert not race.settings
    assert "untuned: the shortest tries would take" in capfd.readouterr().err
    assert fairness.rates(race).startswith("untuned (the shortest tries would take")


def test_the_estimate_covers_tuning_and_race(tmp_path: Path) -> None:
    tuned = made(best_at(0.06), ("allreduce", "ps"), tmp_path, costs=Costs(run=0.0, score=0.0, epoch=30.0, real=30.0))
    tuning, race = tuned._estimate().splitlines()
    assert tuning.startswith("tuning 2 strategies, 12 tries each, in simulation, seeds 3 and 4: about 60 min at most, ")
    assert race == "the race, 6 runs of 20 epochs: about 60 min."
    busy = made(best_at(0.06), ("allreduce", "ps"), tmp_path, costs=Costs(0.0, 0.0, epoch=30.0, real=30.0, busy=1.5))
    tuning, race = busy._estimate().splitlines()
    assert "seeds 3 and 4: about 1.5 h at most, " in tuning
    assert race == "the race, 6 runs of 20 epochs: about 1.5 h."


def test_what_is_begun_goes_on_with_tries_as_long_as_before(tmp_path: Path) -> None:
    """The time of a step is never the same twice."""
    costs = Costs(run=2.0, score=0.1, epoch=4.0, real=2.0)
    slower = Costs(run=2.0, score=0.1, epoch=8.0, real=2.0)
    before = made(best_at(0.06), ("allreduce",), tmp_path, costs=costs, sim=False)
    before.run()
    again = made(best_at(0.06), ("allreduce",), tmp_path, costs=slower, sim=False)
    assert again.plan.first == before.plan.first != again.plan.fitted().first
    other = made(best_at(0.06), ("allreduce",), tmp_path, seeds=4)
    assert other.plan.first != before.plan.first


# Which is best.


def test_sooner_at_the_target_is_better_and_then_the_score_at_one_time() -> None:
    slow, fast, near, far, lost = (Setting(name) for name in ("slow", "fast", "near", "far", "lost"))
    found = {
        far: TuningResult(curve=((1.0, 0.3), (9.0, 0.9))),  # better in the end, but that is later than all others ended
        lost: TuningResult(failed="Diverged"),
        slow: TuningResult(seconds=4.0, curve=((1.0, 0.1), (4.0, 0.95))),
        near: TuningResult(curve=((1.0, 0.5), (3.0, 0.6))),
        fast: TuningResult(seconds=2.0, curve=((1.0, 0.1), (2.0, 0.95))),
    }
    assert rank(found, -1) == [fast, slow, near, far]
    assert rank(found, -1, whole=True) == [fast, slow, far, near]


def test_what_collapses_after_the_target_is_worse_than_what_never_reaches_it() -> None:
    wild, tame = Setting("wild"), Setting("tame")
    found = {wild: TuningResult(2.0, ((2.0, 0.95),), collapsed=True), tame: TuningResult(curve=((2.0, 0.5),))}
    assert rank(found, -1) == [tame, wild]


@pytest.mark.parametrize(
    ("scores", "lost"),
    [
        ((0.1, 0.9, 0.95, 0.92), False),
        ((0.1, 0.9, 0.6), False),
        ((0.1, 0.9, 0.4), True),
        ((0.1,), False),
        ((0.5, 0.4, 0.3), False),  # it has never gained anything
    ],
)
def test_half_of_the_gain_may_be_lost(scores: tuple[float, ...], lost: bool, tmp_path: Path) -> None:
    assert is_lost([-score for score in scores]) is lost


@pytest.mark.parametrize("largest", [0.3, 0.05], ids=["some collapse", "all collapse"])
def test_the_last_rung_goes_on_after_the_target(largest: float, tmp_path: Path) -> None:
    """The largest rate is the first at the target, and has lost it some epochs later."""
    tuned, asked = made(best_at(0.1), ("allreduce",), tmp_path), list[tuple[float, str | None]]()

    def one(setting: Setting, epochs: float, seed: int, *, whole: bool = False) -> TuningResult:
        asked.append((epochs, tuned._race_of(setting, epochs, whole=whole).shared.target))
        return TuningResult(1 / setting.rate, ((1.0, 0.9),), collapsed=whole and setting.rate > largest)

    tuned._one = one  # type: ignore[method-assign]
    chosen = tuned.run().settings["allreduce"]
    assert {*asked} == {(tuned.plan.first, "accuracy=0.95"), (3 * tuned.plan.first, None)}
    ranked = sorted({setting.rate for setting in tuned._grid("allreduce") + tuned._grid("allreduce", 1)})
    assert chosen.rate == max(rate for rate in ranked if rate <= largest or rate < min(ranked[-4:]))


def test_where_the_best_tries_collapse_or_fail_another_one_is_chosen(tmp_path: Path) -> None:
    tuned, last = made(best_at(0.1), ("allreduce",), tmp_path), list[Setting]()

    def one(setting: Setting, epochs: float, seed: int, *, whole: bool = False) -> TuningResult:
        if whole:
            last.append(setting)
            return (
                TuningResult(failed="Diverged") if len(last) == 1 else TuningResult(1.0, ((1.0, 0.9),), collapsed=True)
            )
        return best_at(0.1)(setting)

    tuned._one = one  # type: ignore[method-assign]
    chosen = tuned.run().settings["allreduce"]
    assert len(last) == tuned.plan.kept > 2
    assert chosen not in last


COSTS = Costs(run=0.1, score=0.0, epoch=0.1, real=0.1)


def made(
    found: Callable[[Setting], TuningResult], names: tuple[str, ...], out: Path, seeds: int = 3, *,
    costs: Costs = COSTS, sim: bool = True,
) -> Tuning:  # fmt: skip
    """A tuning of which the outcomes are known beforehand, and what runs cost."""
    shared = Options(workers=2, sim=sim or None)
    race = compare.prepare(sources.find("digits"), [*names], shared, seeds, None, out)
    tuned = Tuning(race, seeds, quiet=True)
    tuned._measure = lambda: costs  # type: ignore[method-assign]
    tuned._one = lambda setting, epochs, seed, **of: found(setting)  # type: ignore[method-assign]
    return tuned


def best_at(rate: float) -> Callable[[Setting], TuningResult]:
    return lambda setting: TuningResult(curve=((1.0, -abs(math.log(setting.rate / rate))),))


def test_the_best_rate_is_found_and_the_grid_widens_for_all(tmp_path: Path) -> None:
    near = made(best_at(0.06), ("allreduce", "ps(consistency=asp)"), tmp_path / "a").run()
    assert near.tries == 12
    assert not near.edges
    assert all(setting.rate == pytest.approx(0.06, rel=0.6) for setting in near.settings.values())
    far = made(best_at(1.5), ("allreduce", "ps"), tmp_path / "b").run()
    assert far.tries == 18
    assert all(setting.rate == pytest.approx(1.5, rel=0.3) for setting in far.settings.values())


def test_one_at_the_edge_widens_the_grid_of_the_others(tmp_path: Path) -> None:
    def found(setting: Setting) -> TuningResult:
        return best_at(1.5 if setting.strategy == "ps" else 0.05)(setting)

    tuned = made(found, ("allreduce", "ps"), tmp_path)
    seen: dict[str, set[Setting]] = {"allreduce": set(), "ps": set()}
    one = tuned._one
    tuned._one = lambda setting, *rest, **of: (seen[setting.strategy].add(setting), one(setting, *rest, **of))[1]  # type: ignore
    race = tuned.run()
    assert len(seen["allreduce"]) == len(seen["ps"]) == 18
    assert race.settings["allreduce"].rate == pytest.approx(0.05)


def test_two_that_come_to_the_same_stay_two(tmp_path: Path) -> None:
    def found(setting: Setting) -> TuningResult:
        return TuningResult(
            curve=((1.0, 1.0 if setting.strategy == "localsgd(tau=16)" and setting.factor == 1 else 0.5),)
        )

    race = made(found, ("localsgd(tau=16)", "localsgd"), tmp_path).run()
    assert len(race.strategies) == 2
    assert race.strategies[0] == "localsgd(tau=16)"


def test_a_strategy_that_always_fails_races_as_it_is(tmp_path: Path) -> None:
    race = made(lambda setting: TuningResult(failed="Diverged"), ("allreduce",), tmp_path).run()
    assert race.settings["allreduce"].options == {}


@pytest.mark.parametrize(
    ("shared", "lab", "real", "said"),
    [
        (Options(workers=2, sim=True), None, False, "in simulation"),
        (Options(workers=2), None, False, "in simulation, hogwild on real processes"),
        (Options(workers=2), None, True, "on real processes"),
        (Options(workers=2), "10mbit,1ms", False, "in the lab"),
    ],
)
def test_where_it_takes_place_is_said(shared: Options, lab: str | None, real: bool, said: str, tmp_path: Path) -> None:
    """The words of the estimate and of the page, and what the tries do."""
    names = ("allreduce", "hogwild") if "hogwild" in said else ("allreduce",)
    tuned = made(best_at(0.06), names, tmp_path, sim=bool(shared.sim))
    tuned.race, tuned.real = replace(tuned.race, shared=shared, lab=lab), real
    assert f"12 tries each, {said}, seeds" in tuned._estimate()
    race = tuned.run()
    assert fairness.rates(race).startswith(f"tuned {said}, each the best of 12 tries")
    tries = {name: tuned._race_of(Setting(name), 1.0) for name in tuned.race.strategies}
    assert {name: (race.shared.sim, race.lab) for name, race in tries.items()} == {
        name: (True if said.startswith("in simulation") and name == "allreduce" else None, lab) for name in tries
    }


def test_tries_of_few_steps_are_called_that(tmp_path: Path) -> None:
    tuned = made(best_at(0.06), ("allreduce",), tmp_path / "a", costs=replace(COSTS, steps=100.0))
    steps = 100 * tuned.plan.first
    assert "hardly differ" not in tuned._estimate()
    short = made(best_at(0.06), ("allreduce",), tmp_path / "b", costs=replace(COSTS, steps=800 / steps))
    assert "the first tries have only 8 steps of a worker, in which rates hardly differ" in short._estimate()


@pytest.mark.parametrize(("steps", "said"), [(8, True), (20, False)])
def test_the_page_calls_them_that_as_well(steps: int, said: bool, tmp_path: Path) -> None:
    found = best_at(0.06)
    tuned = made(lambda setting: replace(found(setting), steps=steps), ("allreduce",), tmp_path).run()
    assert ("(the first tries have only 8 steps of a worker" in fairness.rates(tuned)) is said


# What it changes.


def test_an_optimizer_is_adjusted_in_every_group() -> None:
    def groups(parameters: Any) -> torch.optim.Optimizer:
        first, second = parameters
        made: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "lr": 0.5}]
        return torch.optim.SGD(made, lr=0.1, momentum=0.9, nesterov=True)

    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    found = Adjusted(groups, 2.0, 0.0)(parameters).param_groups
    assert [(g["lr"], g["momentum"], g["nesterov"]) for g in found] == [(0.2, 0.0, False), (1.0, 0.0, False)]
    adam = Adjusted(torch.optim.Adam, 0.5, 0.0)(parameters).param_groups
    assert [(g["lr"], "momentum" in g) for g in adam] == [(5e-4, False)]


@pytest.mark.parametrize("option", ["--lr-factor=-1", "--lr-factor=nan", "--momentum=1", "--momentum=-0.1"])
def test_what_is_no_rate_or_momentum_is_refused(option: str, orchestra: Orchestra) -> None:
    answer = orchestra("sim", "digits", option)
    assert answer.code == 2
    assert option.partition("=")[0].removeprefix("--") in answer.err


# In all.

QUICK = ("--sim", "-n", "2", "--epochs", "2", "--target", "accuracy=0.6", "--seeds", "1", "--out", "out")


def test_the_estimate_is_measured_until_it_can_be_told_from_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of `digits` takes a millisecond: eight of them are lost in the time that a run takes to start."""
    steps: list[int] = []

    def run(_race: Race, few: Options, count: int, out: Path) -> None:
        steps.append(count)
        clock[0] += 0.3 + 0.002 * count + (5.0 if len(steps) == 1 else 0.0)
        (out / "0").mkdir(exist_ok=True)
        (out / "0" / "config.json").write_text('{"data": "1437 samples", "batch": 16, "workers": 2}')

    clock = [0.0]
    monkeypatch.setattr(tuning_plan, "_run", run)
    monkeypatch.setattr(time, "perf_counter", lambda: 3 * clock[0])
    monkeypatch.setattr(time, "thread_time", lambda: clock[0])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    costs = tuning_plan.measure(made(best_at(0.1), ("allreduce",), tmp_path).race)
    assert steps == [1, 1, 1, 3, 9, 33, 129]
    assert costs.run == pytest.approx(0.302)
    assert costs.epoch == costs.real == pytest.approx(0.002 * 1437 / 16 / 2)
    assert costs.busy == pytest.approx(3)
    assert costs.steps == pytest.approx(1437 / 16 / 2)
    real = tuning_plan.measure(made(best_at(0.1), ("hogwild",), tmp_path, sim=False).race)
    assert real.real == pytest.approx(real.epoch / 2)  # two at once


def test_compare_tunes_by_default(orchestra: Orchestra, monkeypatch: pytest.MonkeyPatch) -> None:
    said = orchestra("compare", "digits", "-s", "localsgd,ps(consistency=asp)", *QUICK)
    assert said.code == 0, said.err
    assert "tuning 2 strategies, 12 tries each, in simulation, seeds 1 and 2: about" in said.err
    assert "· tuned ·" in said.out
    record = json.loads(Path("out/table.json").read_text())
    assert record["tuned"] is True
    kept = json.loads(Path("out/tuning.json").read_text())
    assert {*kept["chosen"]} == {row["strategy"] for row in record["rows"]}
    assert not Path("out/tuning").exists()
    (asp,) = (run for run in Path("out").glob("ps-*/seed0/config.json"))
    setting = kept["chosen"]["ps(consistency=asp)"]
    assert f"'lr': {setting['lr']:.4g}"[:10] in json.loads(asp.read_text())["optimizer"]
    seeds = {json.loads(path.read_text())["seed"] for path in Path("out").rglob("config.json")}
    assert not seeds & {*kept["seeds"]}


@pytest.mark.parametrize("how", [("--no-tune",), ("--lr", "0.05")])
def test_untuned_is_said(how: tuple[str, ...], orchestra: Orchestra) -> None:
    said = orchestra("compare", "digits", "-s", "allreduce", *QUICK, *how)
    assert said.code == 0, said.err
    assert "tuning" not in said.err
    assert "· untuned ·" in said.out
    assert f"untuned ({how[0]}): the learning rate is" in " ".join(model.build([Path("out")])["fairness"])


def test_tries_are_kept_where_tuning_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    race = compare.prepare(
        sources.find("digits"), ["allreduce"], Options(workers=2, sim=True, epochs=1.0), 1, "accuracy=0.5", tmp_path
    )
    real, runs = Race.run_one, list[float]()

    def stopping(race: Race, strategy: str, *rest: Any, **more: Any) -> Outcome:
        if len(runs) == 3:
            raise KeyboardInterrupt
        runs.append(race.settings[strategy].rate)
        return real(race, strategy, *rest, **more)

    monkeypatch.setattr(Race, "run_one", stopping)
    with pytest.raises(KeyboardInterrupt):
        Tuning(race, 1, quiet=True).run()
    assert len(runs) == 3
    again: list[float] = []

    def going_on(race: Race, strategy: str, *rest: Any, **more: Any) -> Outcome:
        again.append(race.settings[strategy].rate)
        return real(race, strategy, *rest, **more)

    monkeypatch.setattr(Race, "run_one", going_on)
    tuned = Tuning(race, 1, quiet=True).run()
    assert not {*runs} & {*again[:3]}
    kept = again.copy()
    assert Tuning(race, 1, quiet=True).run().settings == tuned.settings
    assert again == kept  # everything was known


STREAM = """
import torch
import orchestra
from torch.utils.data import IterableDataset

class Stream(IterableDataset):
    def __iter__(self):
        random = torch.Generator().manual_seed(0)
        for _ in range(640):
            x = torch.randn(4, generator=random)
            yield x, x[:3].argmax()

def test():
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(1))
    return x, x[:, :3].argmax(1)

def accuracy(model, data):
    return {"accuracy": float((model(data[0]).argmax(1) == data[1]).float().mean())}

def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.5)

def linear():
    return torch.nn.Linear(4, 3)

what = dict(model=linear, data=Stream, loss=torch.nn.functional.cross_entropy, optimizer=sgd, batch=16)
what |= dict(evaluate=accuracy, evaluation_data=test)
"""
AS_RECIPE = 'RECIPE = orchestra.Recipe(name="a", about="", epochs=2.0, target="accuracy=0.8", **what)'
AS_SCRIPT = "orchestra.train(budget=orchestra.Epochs(2), cluster=orchestra.Local(workers=2), **what)"


@pytest.mark.parametrize("ending", [pytest.param(AS_RECIPE, marks=pytest.mark.nightly), AS_SCRIPT])
def test_strategies_are_tuned_on_a_stream(ending: str, orchestra: Orchestra) -> None:
    """Its parts of an epoch are steps: only whole passes over a stream end a run."""
    Path("mine.py").write_text(f"{STREAM}\n{ending}\n")
    said = orchestra("compare", "mine.py", "--sim", "-n", "2", "-s", "allreduce,solo", "--seeds", "1", "--out", "c")
    assert said.code == 0, said.err
    assert "· tuned ·" in said.out
    configs = {path.parts[1]: json.loads(path.read_text()) for path in Path("c").rglob("config.json")}
    assert {name: config["budget"] for name, config in configs.items()} == {
        "allreduce": ["epochs=2.0"],
        "solo": ["epochs=2.0"],
    }
    assert {name: config["snapshot_every"] for name, config in configs.items()} == {"allreduce": 1, "solo": 2}
    race = compare.prepare(sources.find("mine.py"), ["allreduce"], Options(workers=2, sim=True), 1, None, Path("d"))
    tries = [Tuning(race, 1)._race_of(Setting(name), 0.5).options_of(name, 1) for name in ("allreduce", "solo")]
    assert [(one.epochs, one.steps) for one in tries] == [(None, 10), (None, 20)]


def test_on_a_stream_without_an_end_nothing_is_tuned(
    orchestra: Orchestra, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(streams, "_LONGEST", 0.0)
    Path("mine.py").write_text(f"{STREAM}\n{AS_RECIPE}\n")
    said = orchestra("compare", "mine.py", "--sim", "-n", "2", "-s", "allreduce", "--seeds", "1", "--out", "c")
    assert said.code == 0, said.err
    assert "untuned: the data is a stream that did not end within a minute" in said.err
    assert "· untuned ·" in said.out


def test_a_stream_that_says_its_length_is_not_read() -> None:
    class Long(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError

        def __len__(self) -> int:
            return 640

    assert streams.samples_of(Long) == 640
    assert streams.samples_of(lambda: torch.zeros(3)) is None


def keys(folder: Path, *args: str) -> tuple[str, ...]:
    """What a try of a script and one of a loop are known by."""
    found = []
    for name, text in (("script.py", AS_SCRIPT), ("loop.py", "orchestra.prepare()")):
        path = folder / name
        if not path.exists():
            path.write_text(f"{STREAM}\nimport beside\n{text}\n")
        race = compare.prepare(
            sources.find(str(path), args), ["allreduce"], Options(workers=2), 3, "accuracy=0.8", folder / "c"
        )
        found.append(tuning_cache.key(race, "allreduce", 3))
    return tuple(found)


def test_a_try_of_another_script_or_with_other_arguments_is_another(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("from below import inner\n")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "inner.py").write_text("")
    seen = [keys(tmp_path)]
    assert keys(tmp_path) == seen[0]
    seen.append(keys(tmp_path, "--depth", "3"))
    (tmp_path / "below" / "inner.py").write_text("RATE = 1\n")
    seen.append(keys(tmp_path))
    for name in ("script.py", "loop.py"):
        path = tmp_path / name
        path.write_text(path.read_text().replace("lr=0.02", "lr=0.03"))
    seen.append(keys(tmp_path))
    assert all(len({*each}) == 4 for each in zip(*seen, strict=True))


SWEEP = ("sweep", "--grid", "bandwidth=10mbit,1gbit", "--tune-each")


@pytest.mark.parametrize("verb", [("compare",), pytest.param(SWEEP, marks=pytest.mark.nightly)])
def test_tuning_that_is_stopped_says_how_to_go_on(
    verb: tuple[str, ...], orchestra: Orchestra, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Typed as it is said, the command makes no try again."""
    real, runs, stops = Race.run_one, list[Any](), [3]

    def stopping(race: Race, strategy: str, *rest: Any, **more: Any) -> Outcome:
        if race.out.name == "tuning":
            if len(runs) in stops:
                begun = race.out / "allreduce" / "seed1"
                begun.mkdir(parents=True)
                (begun / "config.json").touch()
                raise KeyboardInterrupt
            runs.append((race.settings[strategy].rate, race.shared.epochs, race.out.parent.name))
        return real(race, strategy, *rest, **more)

    monkeypatch.setattr(Race, "run_one", stopping)
    Path("mine.py").write_text(f"{STREAM}\n{AS_RECIPE.replace('accuracy=0.8', '')}\n")
    said = orchestra(*verb, "mine.py", "--sim", "-s", "allreduce", "--seeds", "1", "--", "--out", "of the script")
    assert said.code == 130
    assert "The 3 tries so far are kept; to go on: orchestra " in said.err
    words = shlex.split(said.err.rpartition("to go on: orchestra ")[2])
    assert words[-3:] == ["--", "--out", "of the script"]
    assert ("--target" in words, words[words.index("--out") + 1][:5]) == (True, "runs/")
    stops.clear()
    said = orchestra(*words)
    assert said.code == 0, said.err
    assert len(runs) > 16
    assert len({*runs}) == len(runs)


def test_a_sweep_tunes_once(orchestra: Orchestra, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned: list[Path] = []

    def once(self: Tuning) -> Race:
        tuned.append(self.race.out)
        setting = Setting("allreduce", own=0.05, factor=0.5 * len(tuned))
        return replace(self.race, settings={"allreduce": setting}, tries=12, tuning="in simulation")

    monkeypatch.setattr(tuning.Tuning, "run", once)
    grid = ("--grid", "bandwidth=10mbit,1gbit", "-s", "allreduce")
    said = orchestra("sweep", "digits", *QUICK, *grid)
    assert said.code == 0, said.err
    assert tuned == [Path("out")]
    optimizers = {json.loads(path.read_text())["optimizer"] for path in Path("out").rglob("config.json")}
    assert len(optimizers) == 1
    assert "'lr': 0.025" in optimizers.pop()
    words = "tuned in simulation, each the best of 12 tries, on seeds that no run of it uses: allreduce lr 0.025"
    assert story("out/report.html")["fairness"][-1] == words
    assert words in Path("out/sweep.md").read_text()
    assert words in " ".join(said.out.split())
    assert json.loads(Path("out/sweep.json").read_text())["rates"] == [words]
    tuned.clear()
    assert orchestra("sweep", "digits", *QUICK[:-1], "each", *grid, "--tune-each").code == 0
    assert len(tuned) == 2
    points = story("each/report.html")["fairness"]
    assert f"bandwidth-10mbit: {words}" in points
    assert f"bandwidth-1gbit: {words.replace('0.025', '0.05')}" in points
    assert "same initial parameters: equal sums for equal seeds" in points
    rates = json.loads(Path("each/sweep.json").read_text())["rates"]
    assert rates == [f"bandwidth 10mbit: {words}", f"bandwidth 1gbit: {words.replace('0.025', '0.05')}"]


def test_a_sweep_says_why_it_is_untuned(orchestra: Orchestra) -> None:
    said = orchestra("sweep", "digits", *QUICK, "--grid", "lr=0.02,0.05", "-s", "allreduce")
    assert said.code == 0, said.err
    points = story("out/report.html")["fairness"]
    for rate in ("0.02", "0.05"):
        assert f"lr-{rate}: untuned (--grid lr=...): the learning rate is {rate} for all" in "\n".join(points)
        assert f"lr {rate}: untuned (--grid lr=...)" in " ".join(said.out.split())


@pytest.mark.parametrize("fixed", [("--no-tune",), ("--lr", "0.1"), ("--grid", "lr=0.1,0.2")])
def test_tuning_that_is_asked_for_and_forbidden_is_refused(fixed: tuple[str, ...], orchestra: Orchestra) -> None:
    said = orchestra("sweep", "digits", *QUICK, "--grid", "bandwidth=10mbit,1gbit", "--tune-each", *fixed)
    assert said.code == 2
    assert f"tunes learning rates, and {fixed[0]}" in said.err
    assert "tune-each = True" in said.err
    if fixed[0] == "--grid":
        return
    for option in (("--lrs", "0.1,0.2"), ("--tune-real",)):
        said = orchestra("compare", "digits", *QUICK, *option, *fixed)
        assert said.code == 2
        assert f"{fixed[0]} fixes them" in said.err
    assert not Path("out").exists()


def test_rates_that_were_given_are_not_widened(tmp_path: Path) -> None:
    tuned = made(best_at(9.0), ("allreduce",), tmp_path)
    tuned.rates = (0.1, 0.2)
    race = tuned.run()
    assert race.settings["allreduce"].rate == 0.2
    assert fairness.rates(race).endswith("allreduce lr 0.2 (at the edge of the rates tried)")
    with pytest.raises(ConfigError):
        tuning.read("0.1")
