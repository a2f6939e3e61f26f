# SPDX-License-Identifier: Apache-2.0
"""The results of runs and the ranking of strategies: one rule for the terminal and for the page."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from orchestra.runs.budget import Target, lower_is_better
from orchestra.runs.events import Scored


@dataclass(frozen=True)
class Achieved:
    """The time to the target and the scores of one run."""

    seconds: float | None = None  # to the target
    since: float = 0.0  # last time at which the target was missed: the true time lies between
    best: float | None = None
    final: float | None = None  # NaN if the final model has non-finite values


def achieved(scores: Sequence[Scored], target: Target) -> Achieved:
    """Return when the target was reached, and the best and the final score."""
    trained = [s for s in scores if s.number]  # without the initial model
    values = [value for s in trained if (value := s.metrics.get(target.metric)) is not None and math.isfinite(value)]
    first = next((i for i, s in enumerate(scores) if target.reached(s.metrics)), None)
    return Achieved(
        seconds=None if first is None else scores[first].t,
        since=scores[first - 1].t if first else 0.0,
        best=(min if lower_is_better(target.metric) else max)(values, default=None),
        final=trained[-1].metrics.get(target.metric) if trained else None,
    )


@dataclass(frozen=True)
class RunResult:
    """The result of one run, with its strategy, condition and seed."""

    strategy: str
    condition: str
    seed: int
    seconds: float | None  # to the target
    since: float  # last time at which the target was missed
    best: float | None
    final: float | None
    speed: float | None = None  # samples a second
    failed: bool = False
    unlearned: str | None = None  # a message if the run did not learn, with the likely reason


def times_of(marks: Sequence[RunResult]) -> list[float]:
    """Return the seconds to the target of the runs that reached it."""
    return [mark.seconds for mark in marks if mark.seconds is not None]


def unlearned_of(marks: Sequence[RunResult]) -> str | None:
    """Return how many runs of one strategy did not learn, and the likely reason; None if all learned.

    >>> lost = RunResult("ps", "", 0, None, 0.0, 0.1, 0.1, unlearned="did not learn (rate too large?)")
    >>> unlearned_of([lost, RunResult("ps", "", 1, 3.0, 2.9, 0.9, 0.9)])
    'did not learn in 1 of 2 runs (rate too large?)'
    """
    found = [mark.unlearned for mark in marks if mark.unlearned is not None]
    if not found:
        return None
    words, _, suspect = Counter(found).most_common(1)[0][0].partition(" (")
    some = f" in {len(found)} of {len(marks)} runs" if len(found) < len(marks) else ""
    return f"{words}{some} ({suspect}"


def always(marks: Sequence[RunResult]) -> bool:
    """Return whether every one of these runs reached the target: only then is there a time to compare."""
    return len(times_of(marks)) == len(marks)


Standing = tuple[bool, bool, int, float, float, str]


def standing(marks: Sequence[RunResult], target: Target | None) -> Standing:
    """Return a sort key that ranks a strategy, from all its runs.

    Strategies that always reached the target come first, by median time; then the others, those with failed runs last,
    by how often they reached it and by their best score. Ties are broken by name, so that the order is the same
    everywhere.
    """
    sign = 1 if target is None or lower_is_better(target.metric) else -1
    times = times_of(marks)
    near = min((sign * mark.best for mark in marks if mark.best is not None), default=math.inf)
    median = statistics.median(times) if times else math.inf
    failed = any(mark.failed for mark in marks)
    return not always(marks), failed, -len(times), median, near, marks[0].strategy
