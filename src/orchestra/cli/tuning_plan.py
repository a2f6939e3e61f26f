# SPDX-License-Identifier: Apache-2.0
"""The number and length of tries before a race, from the time of a few steps: no longer than the race takes.

    in simulation      every worker's steps one after the other, on one core
    real processes     as many at once as there are cores, and a second or two to start

A try has to be long enough to distinguish one rate from another. If the race is shorter than that takes, a minute is
allowed. Beside a simulated race tries are measured in epochs, not in seconds, so that the same command finds the same
rates on every machine; what a run costs besides its epochs is not counted then.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestra.cli import sources
from orchestra.cli.loop_runs import Loop
from orchestra.runs.reading import object_in

if TYPE_CHECKING:
    from orchestra.cli.options import Options
    from orchestra.cli.race import Race

SNAPSHOTS = 10  # scores in a try
_TRIES = 12  # of a strategy
_KEPT = 3  # one in so many tries is in the second rung, three times as long
_LONGEST, _SHORTEST = 1 / 4, 1 / 100  # of the epochs, in the first rung
_SHORTER = 0.95  # factor on the length, until it fits
_MINUTE = 60.0  # seconds that tuning may always take
_WORKERS = 4  # at most, whose steps are measured
_STEPS = (2, 8, 32, 128)  # measured: more if the first take too short a time
_ENOUGH = 0.5  # seconds that are larger than the noise
_TIMES = 6  # measurements of what takes less
_START = 1.5  # seconds until real processes have started


Clock = Callable[[], float]


@dataclass(frozen=True)
class Costs:
    """Seconds that runs take on this machine."""

    run: float  # to start and end a simulated run
    score: float
    epoch: float  # in simulation
    real: float  # an epoch of real processes
    busy: float = 1.0  # times as long as everything takes while other processes compute here
    steps: float = math.inf  # of a worker in an epoch

    def of(self, epochs: float, scores: int, *, real: bool) -> float:
        """Return the seconds of a run with so many scores after the first."""
        return (_START if real else self.run) + (scores + 1) * self.score + epochs * (self.real if real else self.epoch)


@dataclass(frozen=True)
class TuningPlan:
    """The number and length of tries."""

    strategies: int
    epochs: float  # in a run of the race
    worth: float  # runs of each strategy in the race
    costs: Costs
    share_of_epochs: float = 1.0  # that a run of the race takes: it may end at the target
    race_is_real: bool = False
    real: bool = False  # tries run on real processes
    given: int = 0  # rates that were given: no others are tried
    snapshots: int = 40  # in a run of the race
    widenings: int = 1  # times that the grid may be widened, by half as many tries again on one side
    first: float = 0.0  # epochs of a try in the first rung

    @property
    def tries(self) -> int:
        """Tries of each strategy."""
        return self.given or _TRIES

    @property
    def more(self) -> int:
        """Tries of each strategy in a wider grid, besides."""
        return self.tries // 2

    @property
    def kept(self) -> int:
        """Tries of each strategy in the second rung."""
        return max(1, self.tries // _KEPT)

    @property
    def _short(self) -> int:
        """Tries of a strategy in the first rung at most."""
        return self.tries + self.widenings * self.more

    @property
    def seconds(self) -> float:
        """Seconds of all tries, at most."""
        short, long = (self.costs.of(n * self.first, SNAPSHOTS, real=self.real) for n in (1, 3))
        return self.strategies * (self._short * short + self.kept * long)

    @property
    def runs(self) -> int:
        """Runs of the race."""
        return round(self.strategies * self.worth)

    @property
    def race_seconds(self) -> float:
        """Expected seconds of the race."""
        return self.runs * self.costs.of(self.share_of_epochs * self.epochs, self.snapshots, real=self.race_is_real)

    @property
    def fits(self) -> bool:
        """Whether tuning takes no longer than the race.

        Beside a simulated race it always does, as counted in epochs: a measured time would make the tries, and with
        them the rates and the winner, differ from machine to machine.
        """
        return not self.race_is_real or self.seconds <= max(_MINUTE, self.race_seconds)

    def fitted(self) -> TuningPlan:
        """Return a plan with tries as long as the race if that fits, else with shorter ones; even those may not fit."""
        plans = [dataclasses.replace(self, widenings=count)._shortened() for count in ((0,) if self.given else (1, 0))]
        return next((plan for plan in plans if plan.fits), plans[-1])

    def _shortened(self) -> TuningPlan:
        shortest = self.epochs * _SHORTEST
        fair = math.inf if self.race_is_real else self.worth * self.share_of_epochs / (self._short + 3 * self.kept)
        plan = dataclasses.replace(self, first=max(shortest, self.epochs * min(_LONGEST, fair)))
        while not plan.fits and plan.first > shortest:
            plan = dataclasses.replace(plan, first=max(shortest, _SHORTER * plan.first))
        return plan


def measure(race: Race) -> Costs:
    """Measure what runs cost here, from a few steps of a few workers in simulation."""
    import torch

    from orchestra.engine import expression, scoring
    from orchestra.report.verdict import baseline_of

    recipe = race.recipe
    assert not isinstance(recipe, Loop)
    simulable = [name for name in race.strategies if expression.parse(name).layout.model_location != "shared"]
    chosen = race.options_of(baseline_of(simulable) if simulable else "solo", race.seeds)
    workers = min(chosen.workers or 2, _WORKERS)
    few = dataclasses.replace(
        chosen, workers=workers, epochs=None, target=None, seconds=None, sim=True, compute_time=None, straggler=None,
        network=None, trace=None,
    )  # fmt: skip
    model, data = recipe.model(), recipe.evaluation_data()
    clock = time.thread_time if race.shared.device in (None, "cpu") else time.perf_counter
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine several wait for each other longer than they compute
    alone = _seconds(clock, lambda: scoring.figures(recipe.evaluate, model, data))
    torch.set_num_threads(threads)
    score = min(alone, _seconds(clock, lambda: scoring.figures(recipe.evaluate, model, data)))
    before = time.perf_counter(), clock()
    run, epoch, steps = _measured(race, few, clock)
    busy = max(1.0, (time.perf_counter() - before[0]) / max(1e-9, clock() - before[1]))
    if race.shared.sim:
        return Costs(run, score, epoch, epoch, busy, steps)
    _, whole, _ = _measured(race, dataclasses.replace(few, numerics="real"), clock)
    at_once = min(race.shared.workers or 2, len(os.sched_getaffinity(0)))
    return Costs(run, score, epoch, whole / at_once, busy, steps)


def _measured(race: Race, few: Options, clock: Clock) -> tuple[float, float, float]:
    """Return the seconds of a run of one step, and of an epoch, by the clock of this thread; a worker's steps in it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        one = _seconds(clock, lambda: _run(race, few, 1, out))
        for steps in _STEPS:
            began = clock()
            _run(race, few, 1 + steps, out)
            took = clock() - began - one
            if took >= max(_ENOUGH, one):
                break
        config = object_in(next(out.glob("*/config.json")))
    samples = race.stream or int(str(config.get("data")).partition(" ")[0])
    batches = samples / int(config["batch"])
    own = batches / int(config["workers"])
    return one, max(1e-9, took) * own / steps, batches / (race.shared.workers or 2)


def _seconds(clock: Clock, done: Callable[[], object]) -> float:
    """Return the seconds of a call: the first one takes longer, and other processes may make any of them longer."""
    found = list[float]()
    while len(found) < _TIMES and (len(found) < 3 or sum(found) < _ENOUGH):
        began = clock()
        done()
        found.append(clock() - began)
    return min(found)


def _run(race: Race, few: Options, steps: int, out: Path) -> None:
    from orchestra.engine import warnings

    assert not isinstance(race.recipe, Loop)
    folder = next(folder for i in itertools.count() if not (folder := out / str(i)).exists())
    changes = dataclasses.replace(few, steps=steps, out=str(folder)).changes()
    with warnings.silent():
        sources.train_recipe(race.recipe, changes, evaluate=None, evaluation_data=None)
