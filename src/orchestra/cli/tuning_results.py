# SPDX-License-Identifier: Apache-2.0
"""The results of tries, and their order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestra.cli.candidates import Setting

if TYPE_CHECKING:
    from orchestra.cli.table import Outcome


@dataclass(frozen=True)
class TuningResult:
    """The result of a try."""

    seconds: float | None = None  # to the target
    curve: tuple[tuple[float, float], ...] = ()  # time and score, as long as that is a number
    failed: str | None = None
    steps: int = 0  # of the fastest worker
    collapsed: bool = False  # it reached the target, and then lost more than half of what it had gained

    def best_until(self, time: float, sign: int) -> float:
        """Return the best score up to some time, with a sign so that smaller is better; infinite without any."""
        return min((sign * score for t, score in self.curve if t <= time), default=math.inf)


def rank(found: Mapping[Setting, TuningResult], sign: int, *, whole: bool = False) -> list[Setting]:
    """Return the settings with a score, the best first; of `whole` runs, which end alike, all scores count."""
    scored = {setting: one for setting, one in found.items() if one.curve and one.failed is None}
    first = math.inf if whole else min((one.curve[-1][0] for one in scored.values()), default=0.0)

    def key(setting: Setting) -> tuple[bool, float, float]:
        one = scored[setting]
        return (one.collapsed, math.inf if one.seconds is None else one.seconds, one.best_until(first, sign))

    return sorted(scored, key=key)


def result_of(outcome: Outcome, metric: str, sign: int) -> TuningResult:
    """Return the result of a run, with a sign so that smaller scores are better."""
    if outcome.failed is not None:
        return TuningResult(failed=outcome.failed)
    curve = _curve(outcome, metric)
    unlearned = outcome.facts is not None and outcome.facts.unlearned is not None  # the last score is no number, say
    lost = unlearned or is_lost([sign * score for _, score in curve])
    steps = (outcome.facts.most_steps if outcome.facts is not None else None) or 0
    return TuningResult(outcome.seconds, curve, steps=steps, collapsed=outcome.seconds is not None and lost)


def is_lost(scores: Sequence[float]) -> bool:
    """Return whether more than half of the gain from the first score to the best, the smallest, is lost at the end."""
    return len(scores) > 1 and scores[-1] - min(scores) > (scores[0] - min(scores)) / 2 > 0


def _curve(outcome: Outcome, metric: str) -> tuple[tuple[float, float], ...]:
    from orchestra.runs.facts import scores_of

    scores = [(s.t, s.metrics.get(metric)) for s in scores_of(outcome.run)]
    return tuple((t, value) for t, value in scores if value is not None and math.isfinite(value))
