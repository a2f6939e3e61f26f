# SPDX-License-Identifier: Apache-2.0
"""What runs achieved, and how strategies rank by it: one rule for the terminal and for the page."""

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
    """What the scores of one run come to."""

    seconds: float | None = None  # to the target
    since: float = 0.0  # the target was missed at this time yet: the truth lies between
    best: float | None = None
    final: float | None = None  # also where that is no number: the model is none, then


def achieved(scores: Sequence[Scored], target: Target) -> Achieved:
    """When the target was reached, and how good the model was."""
    trained = [s for s in scores if s.number]  # not the initial model: its score is no result
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
    """What one run achieved, and which one that was."""

    strategy: str
    condition: str
    seed: int
    seconds: float | None  # to the target
    since: float  # the target was missed at this time yet
    best: float | None
    final: float | None
    speed: float | None = None  # samples a second
    failed: bool = False
    unlearned: str | None = None  # that it did not learn, and what may be the reason


def times_of(marks: Sequence[RunResult]) -> list[float]:
    """Seconds to the target, of the runs that reached it."""
    return [mark.seconds for mark in marks if mark.seconds is not None]


def unlearned_of(marks: Sequence[RunResult]) -> str | None:
    """That runs of one strategy did not learn, how many of them, and what may be the reason; None if all learned.

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
    """Whether every one of these runs reached the target: only then is there a time to compare."""
    return len(times_of(marks)) == len(marks)


Standing = tuple[bool, bool, int, float, float, str]


def standing(marks: Sequence[RunResult], target: Target | None) -> Standing:
    """A key to rank by, from all runs of one strategy.

    By median time; then those that did not always reach the target, by how often they did and how near they came; those
    with failures last. Names come last, so that the same runs are told in the same order everywhere.
    """
    sign = 1 if target is None or lower_is_better(target.metric) else -1
    times = times_of(marks)
    near = min((sign * mark.best for mark in marks if mark.best is not None), default=math.inf)
    median = statistics.median(times) if times else math.inf
    failed = any(mark.failed for mark in marks)
    return not always(marks), failed, -len(times), median, near, marks[0].strategy
