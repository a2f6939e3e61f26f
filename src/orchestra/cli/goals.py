# SPDX-License-Identifier: Apache-2.0
"""The target of a comparison: given, from the recipe or script, or found by a first run.

The first run is one of the baseline, with a seed that the comparison does not use. The target is then 90 % of the way
from the untrained model's score to the best score of that run.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from orchestra.cli import summary
from orchestra.cli.loop_runs import Loop
from orchestra.cli.train_arguments import read_target
from orchestra.errors import ConfigError, Problem, nearest
from orchestra.formatting import rough_duration
from orchestra.runs.budget import Target, lower_is_better

if TYPE_CHECKING:
    from orchestra.cli.race import Race
    from orchestra.recipes.recipe import Recipe

_WAY = 0.9  # of the way from the first score of a run to its best
_FIRST = "first-run"


def choose(recipe: Recipe, text: str | None) -> Target:
    """Return the target, with NaN as value if a first run has to find it, or raise a `ConfigError`.

    The untrained model is scored first: a target that `evaluate` does not return would never be reached.
    """
    from orchestra.engine.scoring import figures

    said = text or recipe.target
    goal = read_target(said) if said else None
    scores = figures(recipe.evaluate, recipe.model(), recipe.evaluation_data())
    if goal is None:
        return Target(_first_of(scores), math.nan)
    if goal.metric not in scores:
        message = f"is not a score of this recipe; {nearest(goal.metric, scores)}"
        raise ConfigError([Problem("target", goal.metric, message)])
    if goal.metric == "accuracy" and goal.value > 1:
        raise ConfigError([Problem("target", f"{goal.value:g}", "is not an accuracy between 0 and 1, such as 0.95")])
    return goal


def of_a_loop(text: str | None) -> Target:
    """Return the given target; without one, a first run has to find its name as well."""
    return Target("", math.nan) if text is None else read_target(text)


def _first_of(scores: Iterable[str]) -> str:
    names = [*scores]
    return "accuracy" if "accuracy" in names else names[0] if names else ""


def is_open(target: Target) -> bool:
    """Return whether a first run has to find its value."""
    return math.isnan(target.value)


def settle(race: Race, *, quiet: bool) -> Race:
    """Return the same race with a target that has a value."""
    from orchestra.report.verdict import baseline_of, goal
    from orchestra.runs.facts import scores_of

    if not is_open(race.target):
        return race
    first, seed, folder = baseline_of(race.strategies), race.seeds, race.out / _FIRST
    mark = f"[first run] {first} · seed {seed}"
    began = time.monotonic()
    try:
        outcome = dataclasses.replace(race, out=folder).run_one(first, seed, mark, quiet=quiet, first=True)
        scores = [] if outcome.failed else scores_of(outcome.run)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    metric = race.target.metric or _first_of(name for scored in scores for name in scored.metrics)
    values = [v for scored in scores if (v := scored.metrics.get(metric)) is not None and math.isfinite(v)]
    target = Target(metric, _reachable(values, lower=lower_is_better(metric)))
    if is_open(target):
        why = outcome.failed or f"its {metric or 'score'} did not improve"
        message = f"none was given, and a first run of {first} found none: {why}. Give one: --target accuracy=0.9"
        raise ConfigError([Problem("target", None, message)])
    took, best = time.monotonic() - began, (min if lower_is_better(metric) else max)(values)
    if len(values) == 1:
        how = f"within 10 % of the only score, {best:.4g}"
    else:
        how = f"{100 * _WAY:g} % of the way from the first score, {values[0]:.4g}, to the best, {best:.4g}"
    found = f"target {goal(target)}, as none was given: {how}, of a first run of {first} with seed {seed}"
    if not quiet:
        trained = outcome.facts.seconds if isinstance(race.recipe, Loop) and outcome.facts is not None else took
        share = f", of which it trained {trained:.2g} s: the rest starts its processes" if trained < took / 2 else ""
        summary.say(f"{mark}: {rough_duration(took)}{share}\n{found}.")
    return dataclasses.replace(race, target=target, took=took, chosen_target=found)


def _reachable(values: list[float], *, lower: bool) -> float:
    """Return 90 % of the way from the first score to the best, in three digits; NaN if they are equal.

    >>> _reachable([0.1, 0.8, 0.9], lower=False), _reachable([2.3, 0.3], lower=True), _reachable([0.9], lower=False)
    (0.82, 0.5, 0.81)
    """
    if not values:
        return math.nan
    best = (min if lower else max)(values)
    if len(values) == 1:  # only the last score: that of the untrained model is unknown
        return _rounded(best / _WAY if lower else best * _WAY)
    return _rounded(values[0] + _WAY * (best - values[0])) if best != values[0] else math.nan


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
