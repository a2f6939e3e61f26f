# SPDX-License-Identifier: Apache-2.0
"""Tuning takes no longer than the race, and says beforehand how long both take."""

from __future__ import annotations

import dataclasses
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.tunings import COSTS, best_at, made

from orchestra.cli import fairness, tuning_plan
from orchestra.cli.options import Options
from orchestra.cli.race import Race
from orchestra.cli.tuning_plan import Costs, TuningPlan


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


def test_tries_before_a_short_race_train_three_quarters_of_a_run() -> None:
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
    assert tuning.startswith(
        "tuning 2 strategies, 12 tries each (6 more each if the best rate of one is at the edge), in simulation, seeds "
        "3 and 4: about 60 min at most, "
    )
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


def test_the_estimate_warns_of_tries_with_few_steps(tmp_path: Path) -> None:
    tuned = made(best_at(0.06), ("allreduce",), tmp_path / "a", costs=replace(COSTS, steps=100.0))
    steps = 100 * tuned.plan.first
    assert "hardly differ" not in tuned._estimate()
    short = made(best_at(0.06), ("allreduce",), tmp_path / "b", costs=replace(COSTS, steps=800 / steps))
    assert "the first tries have only 8 steps of a worker, in which rates hardly differ" in short._estimate()


@pytest.mark.parametrize(("steps", "said"), [(8, True), (20, False)])
def test_the_page_warns_of_tries_with_few_steps(steps: int, said: bool, tmp_path: Path) -> None:
    found = best_at(0.06)
    tuned = made(lambda setting: replace(found(setting), steps=steps), ("allreduce",), tmp_path).run()
    assert ("(the first tries have only 8 steps of a worker" in fairness.rates(tuned)) is said


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
