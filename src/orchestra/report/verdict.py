# SPDX-License-Identifier: Apache-2.0
"""What was learned, in one sentence with its interval, and how far it can be trusted."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from orchestra.budget import Target, lower_is_better
from orchestra.statistics import Estimate, difference, holm, ratio
from orchestra.words import plural

USELESS = 10  # times that the ends of an interval may be apart


@dataclass(frozen=True)
class Mark:
    """What one run achieved."""

    strategy: str
    condition: str
    seed: int
    seconds: float | None  # to the target
    since: float  # the target was missed at this time yet
    best: float | None
    final: float | None
    speed: float | None = None  # samples a second


@dataclass(frozen=True)
class Against:
    """A strategy beside the baseline, seed by seed under every condition given."""

    strategy: str
    baseline: str
    speed: Estimate | None  # how many times as fast to the target
    p: float | None  # of being as fast as the baseline, corrected for the number of strategies


@dataclass(frozen=True)
class Verdict:
    """The sentence, and what to keep in mind."""

    sentence: str
    doubts: tuple[str, ...]
    against: tuple[Against, ...]


def judge(marks: Sequence[Mark], target: Target | None, metric: str | None, unit: str = "s") -> Verdict:
    """Compare all strategies with the baseline: by time to the target, else by the last score, else by speed."""
    names = list(dict.fromkeys(mark.strategy for mark in marks))
    baseline = baseline_of(names)
    if all(mark.final is None and mark.best is None for mark in marks):
        return Verdict(_by_speed(marks, names, baseline), (), ())
    if target is None:
        return Verdict(*_by_score(marks, names, baseline, metric), ())
    against = against_baseline(marks)
    groups = list(dict.fromkeys(mark.condition for mark in marks))
    race = _Race(marks, names, baseline, target, unit, {a.strategy: a.speed for a in against})
    if len(groups) > 1:
        return Verdict(race.over(groups), (), tuple(against))
    return Verdict(race.sentence(), tuple(race.doubts()), tuple(against))


def baseline_of(names: Sequence[str]) -> str:
    """What the others are compared with: all-reduce, or the first."""
    return "allreduce" if "allreduce" in names else names[0]


def goal(target: Target) -> str:
    """A target in words."""
    return f"{target.metric} {'≤' if lower_is_better(target.metric) else '≥'} {target.value:g}"


def interval(e: Estimate, digits: str = ".2f") -> str:
    """An interval in words, or why there is none."""
    if e.low is None:
        return "one pair of runs: too little for an interval"
    if is_useless(e) and digits == ".2f":
        return f"{e.n} pairs of runs: too few for an interval that says anything"
    return f"95 % interval {e.low:{digits}} to {e.high:{digits}}, {e.n} pairs of runs with equal seeds"


def is_useless(speed: Estimate) -> bool:
    """Whether an interval of ratios is so wide that it says nothing."""
    return speed.low is not None and speed.high is not None and speed.high > USELESS * speed.low


def pairs(
    marks: Iterable[Mark], a: str, b: str, figure: Callable[[Mark], float | None]
) -> tuple[list[float], list[float]]:
    """A figure of two strategies, where both have it under the same condition with the same seed."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for mark in marks:
        if (value := figure(mark)) is not None:
            found.setdefault((mark.condition, mark.seed), {})[mark.strategy] = value
    both = [values for values in found.values() if a in values and b in values]
    return [values[a] for values in both], [values[b] for values in both]


def _seconds(mark: Mark) -> float | None:
    return mark.seconds or None  # reached at once: there is no ratio


def against_baseline(marks: Sequence[Mark]) -> list[Against]:
    """How many times as fast as the baseline each strategy was, with Holm's correction for their number."""
    names = list(dict.fromkeys(mark.strategy for mark in marks))
    baseline = baseline_of(names)
    speeds: dict[str, Estimate | None] = {}
    for name in names:
        own, base = pairs(marks, name, baseline, _seconds)
        speeds[name] = ratio(base, own) if own and name != baseline else None
    tested = [name for name in names if (e := speeds[name]) is not None and e.p is not None]
    corrected = dict(zip(tested, holm([e.p for n in tested if (e := speeds[n]) and e.p is not None]), strict=True))
    return [Against(name, baseline, speeds[name], corrected.get(name)) for name in names]


@dataclass(frozen=True)
class _Race:
    marks: Sequence[Mark]
    names: Sequence[str]
    baseline: str
    target: Target
    unit: str
    speeds: dict[str, Estimate | None]

    def ranked(self, condition: str | None = None) -> list[tuple[float, str]]:
        """Strategies that always reached the target, by their median time."""
        found = []
        for name in self.names:
            own = [m for m in self.marks if m.strategy == name and condition in (None, m.condition)]
            times = [m.seconds for m in own if m.seconds is not None]
            if own and len(times) == len(own):
                found.append((statistics.median(times), name))
        return sorted(found)

    def sentence(self) -> str:
        """Under one condition."""
        ranked = self.ranked()
        if not ranked:
            return self._nobody()
        time, first = ranked[0]
        runs = sum(m.strategy == first for m in self.marks)
        of = f", the median of {runs} runs" if runs > 1 else ""
        said = f"{first} reached {goal(self.target)} in {time:.3g} {self.unit}{of}"
        if len(self.names) == 1:
            return f"{said}; there is nothing to compare it with."
        if first != self.baseline:
            return f"{said}{self._faster(first)}."
        if len(ranked) == 1:
            return f"{said}; nobody else did in every run."
        second = ranked[1][1]
        own, other = pairs(self.marks, first, second, _seconds)
        return f"{said}, {_times(ratio(other, own), second) if own else f'before {second}'}."

    def _faster(self, first: str) -> str:
        e = self.speeds[first]
        return f"; {self.baseline} did not" if e is None else f", {_times(e, self.baseline)}"

    def _nobody(self) -> str:
        sign = 1 if lower_is_better(self.target.metric) else -1
        near = min((m for m in self.marks if m.best is not None), key=lambda m: sign * (m.best or 0), default=None)
        if near is None:
            return f"No run was scored for {self.target.metric}: there is nothing to compare."
        text = f"No strategy reached {goal(self.target)} in every run"
        return f"{text}; {near.strategy} came closest with {near.best:.4g}."

    def over(self, groups: Sequence[str]) -> str:
        """Under several conditions."""
        firsts = [ranked[0][1] for group in groups if (ranked := self.ranked(group))]
        if not firsts:
            return self._nobody()
        best = max(dict.fromkeys(firsts), key=firsts.count)
        others = {name: firsts.count(name) for name in dict.fromkeys(firsts) if name != best}
        rest = "".join(f", {name} under {count}" for name, count in others.items())
        e = self.speeds[best]
        ahead = f"; over all of them it was {_times(e, self.baseline)}" if e is not None else ""
        text = f"{best} reached {goal(self.target)} first under {firsts.count(best)} of {len(groups)} conditions"
        return f"{text}{rest}{ahead}."

    def doubts(self) -> list[str]:
        """Where a lead is no larger than what chance or the spacing of snapshots explains."""
        ranked, found = self.ranked(), []
        order = [name for _, name in ranked]
        missed = [name for name in self.names if name not in order]
        for rival in [name for i, name in enumerate(order) if i == 1 or (i > 1 and name == self.baseline)]:
            since = statistics.median(m.since for m in self.marks if m.strategy == rival)
            own, other = pairs(self.marks, order[0], rival, _seconds)
            lead = ratio(other, own) if own else None
            if ranked[0][0] > since:
                found.append(f"Its lead over {rival} is less than one snapshot of the model: a tie.")
            elif rival != self.baseline and lead is not None and lead.n > 1 and not lead.excludes(1.0):
                found.append(f"Its lead over {rival} could be chance ({interval(lead)}).")
        if missed:
            found.append(f"Not reached in every run, if in any: {', '.join(missed)}.")
        if len({m.seed for m in self.marks}) == 1:
            found.append("One seed only: small differences may be chance. Three or more would tell.")
        return found


def _times(e: Estimate, other: str) -> str:
    unsure = ", which may be chance" if e.n > 1 and not e.excludes(1.0) and not is_useless(e) else ""
    return f"{e.value:.2f} times as fast as {other} ({interval(e)}{unsure})"


def _by_speed(marks: Sequence[Mark], names: Sequence[str], baseline: str) -> str:
    """Where nothing was scored, as in a rehearsal of timing only."""
    ends = {name: [m.speed for m in marks if m.strategy == name and m.speed] for name in names}
    means = {name: statistics.fmean(found) for name, found in ends.items() if found}
    if not means:
        return f"{plural(len(marks), 'run')}; nothing was scored, so there is nothing to compare."
    best = max(means, key=lambda name: means[name])
    said = f"Nothing was scored; {best} went through {means[best]:,.0f} samples a second"
    other = baseline if best != baseline else max((n for n in means if n != best), key=means.__getitem__, default=best)
    own, others = pairs(marks, best, other, lambda m: m.speed or None)
    if other == best or not own:
        return f"{said}."
    return f"{said}, {_times(ratio(own, others), other)}."


def _by_score(
    marks: Sequence[Mark], names: Sequence[str], baseline: str, metric: str | None
) -> tuple[str, tuple[str, ...]]:
    """Without a target there is no time to compare, only how good the models were in the end."""
    advice = ("Give --target SCORE=VALUE to compare times.",)
    ends = {name: [m.final for m in marks if m.strategy == name and m.final is not None] for name in names}
    means = {name: statistics.fmean(found) for name, found in ends.items() if found}
    assert metric is not None
    best = (min if lower_is_better(metric) else max)(means, key=lambda name: means[name])
    said = f"{best} ended with {metric} {means[best]:.4g}"
    if len(names) == 1:
        return f"{said}.", advice
    other = baseline if best != baseline else next(name for name in means if name != best) if len(means) > 1 else best
    own, others = pairs(marks, best, other, lambda m: m.final)
    if not own or other == best:
        return f"{said}, the best.", advice
    e = difference(own, others)
    unsure = ", which may be chance" if e.n > 1 and not e.excludes(0.0) else ""
    return f"{said}, the best: {e.value:+.2g} beside {other} ({interval(e, '+.2g')}{unsure}).", advice
