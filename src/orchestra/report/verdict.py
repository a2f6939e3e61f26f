# SPDX-License-Identifier: Apache-2.0
"""The verdict of a comparison: one sentence with its interval, and its caveats."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from orchestra.formatting import listed, plural
from orchestra.report.results import RunResult, always, standing, times_of, unlearned_of
from orchestra.report.statistics import Estimate, difference, holm, ratio
from orchestra.runs.budget import Target, lower_is_better

CHANCE = 0.05  # p-values below this count as a difference
USELESS = 10  # ratio of an interval's ends above which it says nothing
SLIGHT = 1.1  # a smaller speed-up that may be chance counts as a tie


@dataclass(frozen=True)
class Against:
    """A strategy compared with the baseline, seed by seed under one condition."""

    strategy: str
    baseline: str
    speed: Estimate | None  # how many times as fast to the target
    p: float | None  # of being as fast as the baseline, corrected for the number of strategies


@dataclass(frozen=True)
class Verdict:
    """The sentence, and its caveats."""

    sentence: str
    doubts: tuple[str, ...]
    baseline: str
    tied: tuple[str, ...] = ()  # strategies that share the first place, if several do


def judge(
    marks: Sequence[RunResult], target: Target | None, metric: str | None, unit: str = "s", baseline: str | None = None
) -> Verdict:
    """Compare all strategies with the baseline: by time to the target, else by the last score, else by speed."""
    names = list(dict.fromkeys(mark.strategy for mark in marks))
    groups = list(dict.fromkeys(mark.condition for mark in marks))
    baseline = baseline_of(names, baseline)
    if all(mark.final is None and mark.best is None for mark in marks):
        return Verdict(_by_speed(marks, names, baseline, len(groups)), (), baseline)
    lost = _unlearned(marks, names)
    if target is None:
        advice = ("Give --target SCORE=VALUE to compare times.",) if len(names) > 1 else ()
        return Verdict(_by_score(marks, names, baseline, metric, len(groups)), (*lost, *advice), baseline)
    race = _Standings(marks, names, baseline, target, unit)
    if len(groups) > 1:
        return Verdict(race.over(groups), (*lost, *race.caveats()), baseline)
    doubts = (*race.doubts(), *lost, *race.caveats())
    return Verdict(race.sentence(), doubts, baseline, race.tied if len(race.tied) > 1 else ())


def _unlearned(marks: Sequence[RunResult], names: Sequence[str]) -> list[str]:
    """Return a sentence for each strategy that did not learn in some or all runs."""
    found = {name: unlearned_of([mark for mark in marks if mark.strategy == name]) for name in names}
    return [f"{name} {words}." for name, words in found.items() if words is not None]


def baseline_of(names: Sequence[str], wanted: str | None = None) -> str:
    """Return the baseline of a comparison: the wanted strategy if it took part, else all-reduce, else the first."""
    return next((name for name in names if name == wanted), "allreduce" if "allreduce" in names else names[0])


def goal(target: Target) -> str:
    """Return a target in words."""
    return f"{target.metric} {'≤' if lower_is_better(target.metric) else '≥'} {target.value:g}"


def interval(e: Estimate, digits: str = ".2f") -> str:
    """Return an interval in words, or why there is none."""
    if e.n == 1:
        return "one pair of runs: too little for an interval"
    pairs = f"{e.n} pairs of runs with equal seeds"
    if e.low is None:
        return f"{pairs}, all alike"
    if is_useless(e) and digits == ".2f":
        why = "snapshots are too far apart" if e.blurred else "too few"
        return f"{e.n} pairs of runs: {why} for an interval that says anything"
    agree = " that differ by less than the time between snapshots" if e.blurred else ""
    return f"95 % interval {e.low:{digits}} to {e.high:{digits}}, {pairs}{agree}"


def is_useless(speed: Estimate) -> bool:
    """Return whether an interval of ratios is so wide that it says nothing."""
    return speed.low is not None and speed.high is not None and speed.high > USELESS * speed.low


def pairs(
    marks: Iterable[RunResult], a: str, b: str, figure: Callable[[RunResult], float | None]
) -> tuple[list[float], list[float]]:
    """Return a figure of two strategies, paired by condition and seed, where both have it."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for mark in marks:
        if (value := figure(mark)) is not None:
            found.setdefault((mark.condition, mark.seed), {})[mark.strategy] = value
    both = [values for values in found.values() if a in values and b in values]
    return [values[a] for values in both], [values[b] for values in both]


def _seconds(mark: RunResult) -> float | None:
    return mark.seconds if mark.seconds and mark.seconds > 0 else None  # reached at once: there is no ratio


def _width(mark: RunResult) -> float | None:
    """Return the interval between the two snapshots around the target, as a share of the time to the target."""
    seconds = _seconds(mark)
    return None if seconds is None else min(1.0, max(0.0, 1 - mark.since / seconds))


def lead(marks: Sequence[RunResult], a: str, b: str) -> Estimate | None:
    """Return how many times as fast as `b` strategy `a` reached the target; None unless both always did."""
    if not always([mark for mark in marks if mark.strategy in (a, b)]):
        return None
    own, other = pairs(marks, a, b, _seconds)
    if not own:
        return None
    # A measured time is that of a snapshot; the true time is uniform since the previous one (σ = width/√12). Seeds
    # share their snapshots and so this error, which therefore does not shrink with their number.
    widths, others = pairs(marks, a, b, _width)
    return ratio(other, own, blur=math.hypot(*widths, *others) / math.sqrt(12 * len(own)))


def against_baseline(marks: Sequence[RunResult], baseline: str | None = None) -> list[Against]:
    """Return how many times as fast as the baseline each strategy was, with Holm's correction for their number."""
    names = list(dict.fromkeys(mark.strategy for mark in marks))
    baseline = baseline_of(names, baseline)
    speeds = {name: lead(marks, name, baseline) if name != baseline else None for name in names}
    ps = {name: e.p for name, e in speeds.items() if e is not None and e.p is not None}
    corrected = dict(zip(ps, holm([*ps.values()]), strict=True))
    return [Against(name, baseline, speeds[name], corrected.get(name)) for name in names]


def ranked(marks: Sequence[RunResult], target: Target | None) -> list[tuple[float, str]]:
    """Return the strategies that always reached the target under one condition, by their median time."""
    names = dict.fromkeys(mark.strategy for mark in marks)
    own = [[mark for mark in marks if mark.strategy == name] for name in names]
    order = sorted(filter(always, own), key=lambda found: standing(found, target))
    return [(statistics.median(times_of(found)), found[0].strategy) for found in order]


def firsts(marks: Sequence[RunResult], target: Target | None) -> list[str]:
    """Return the strategies that may have reached the target first under one condition.

    They are several where the first one's time lies between the same two snapshots.
    """
    order = ranked(marks, target)
    since = {name: statistics.median(m.since for m in marks if m.strategy == name) for _, name in order}
    return [name for time, name in order if time == order[0][0] or since[name] < order[0][0]]


def tied(marks: Sequence[RunResult], target: Target | None) -> list[str]:
    """Return the strategy that reached the target first under one condition, and those tied with it.

    A strategy is tied with the first if the snapshots do not show which was faster, or if the first is less than 10 %
    faster and the interval of that ratio contains 1.
    """
    order, close = [name for _, name in ranked(marks, target)], firsts(marks, target)
    leads = {name: lead(marks, order[0], name) for name in order[1:]}
    alike = [name for name, e in leads.items() if e is not None and e.includes(1.0) and e.value < SLIGHT]
    return [name for name in order if name in close or name in alike]


@dataclass(frozen=True)
class _Standings:
    marks: Sequence[RunResult]
    names: Sequence[str]
    baseline: str
    target: Target
    unit: str

    @cached_property
    def against(self) -> dict[str, Against]:
        return {found.strategy: found for found in against_baseline(self.marks, self.baseline)}

    @cached_property
    def tied(self) -> tuple[str, ...]:
        """The strategies that share the first place."""
        return tuple(tied(self.marks, self.target))

    def of(self, name: str) -> list[RunResult]:
        """Return the runs of a strategy."""
        return [mark for mark in self.marks if mark.strategy == name]

    def sentence(self) -> str:
        """Return the sentence for a single condition."""
        order = ranked(self.marks, self.target)
        if not order:
            return self._none_did()
        if len(self.tied) > 1:
            return self._tie(dict((name, time) for time, name in order))
        time, first = order[0]
        runs = len(self.of(first))
        of = f", the median of {runs} runs" if runs > 1 else ""
        said = f"{first} reached {goal(self.target)} in {time:.3g} {self.unit}{of}"
        if len(self.names) == 1:
            return f"{said}; there is nothing to compare it with."
        rival = _rival([name for _, name in order], self.baseline)
        return f"{said}{'; no other did in every run' if rival is None else self._beside(first, rival)}."

    def _tie(self, times: dict[str, float]) -> str:
        """Return the sentence for a tie, with the differences between the tied strategies."""
        runs, first = len(self.of(self.tied[0])), self.tied[0]
        of = f", medians of {runs} runs" if runs > 1 else ""
        seconds = listed([f"{times[name]:.3g}" for name in self.tied])
        said = f"{listed(self.tied)} are tied: they reached {goal(self.target)} in {seconds} {self.unit}{of}"
        rival = self.baseline if self.baseline in self.tied[1:] else self.tied[1]
        close = rival in firsts(self.marks, self.target)
        less = f"less than one snapshot of the model before {rival}" if close else f"before {rival}"
        e = lead(self.marks, first, rival)
        much = "" if e is None else f", {_times(e, rival)}"
        than = None if self.baseline in self.tied else lead(self.marks, first, self.baseline)
        base = "" if self.baseline in self.tied or than is not None else self._beside(first, self.baseline)
        ahead = "" if than is None else f", and {_times(than, self.baseline, self.against[first].p)}"
        return f"{said}{base}; {first} was {less}{much}{ahead}."

    def _beside(self, first: str, rival: str) -> str:
        e, hits, runs = lead(self.marks, first, rival), len(times_of(self.of(rival))), len(self.of(rival))
        if e is not None:
            return f", {_times(e, rival, self.against[rival if first == self.baseline else first].p)}"
        if hits == runs:
            return f", before {rival}"
        return f"; {rival} did in {hits} of {runs} runs" if hits else f"; {rival} did not"

    def _none_did(self) -> str:
        sign = 1 if lower_is_better(self.target.metric) else -1
        near = min((m for m in self.marks if m.best is not None), key=lambda m: sign * (m.best or 0), default=None)
        if near is None:
            return f"No run was scored for {self.target.metric}: there is nothing to compare."
        if all(mark.unlearned for mark in self.marks):
            return f"No strategy reached {goal(self.target)}, and none learned anything."
        hits = {name: len(times_of(self.of(name))) for name in self.names}
        most = max(self.names, key=lambda name: hits[name] / len(self.of(name)))
        text = f"No strategy reached {goal(self.target)} in every run"
        if hits[most]:
            return f"{text}; {most} did in {hits[most]} of {len(self.of(most))}."
        return f"{text}; {near.strategy} came closest with {near.best:.4g}."

    def over(self, groups: Sequence[str]) -> str:
        """Return the sentence for several conditions: how often each strategy was first (times do not average)."""
        within = ([m for m in self.marks if m.condition == group] for group in groups)
        found = [names for marks in within if (names := firsts(marks, self.target))]
        if not found:
            return self._none_did()
        alone = Counter(names[0] for names in found if len(names) == 1)
        ties, never = len(found) - alone.total(), len(groups) - len(found)
        rest = f", several at once under {ties}" * bool(ties) + f", none in every run under {never}" * bool(never)
        if not alone:
            return f"No strategy alone reached {goal(self.target)} first under any of {len(groups)} conditions{rest}."
        order = sorted(alone.items(), key=lambda item: (-item[1], item[0] == self.baseline, item[0]))
        (best, count), *others = order
        rest = "".join(f", {name} under {times}" for name, times in others) + rest
        text = f"{best} reached {goal(self.target)} first under {count} of {len(groups)} conditions"
        return f"{text}{rest}{self._range(best, groups)}."

    def _range(self, best: str, groups: Sequence[str]) -> str:
        """Return the range over the conditions of the lead over the baseline, in words."""
        within = ([m for m in self.marks if m.condition == group] for group in groups)
        found = [e.value for marks in within if best != self.baseline and (e := lead(marks, best, self.baseline))]
        if not found:
            return ""
        ends = " to ".join(dict.fromkeys((f"{min(found):.2f}", f"{max(found):.2f}")))
        where = "all of them" if len(found) == len(groups) else f"the {len(found)} where both always did"
        return f"; under {where} it was {ends} times as fast as {self.baseline}"

    def doubts(self) -> list[str]:
        """Return a caveat if the lead over the second strategy may be chance."""
        order = [name for _, name in ranked(self.marks, self.target)]
        if len(order) < 2 or order[1] in self.tied or self.baseline in order[:2]:
            return []
        e = lead(self.marks, order[0], order[1])
        return [f"Its lead over {order[1]} could be chance ({interval(e)})."] if e and e.includes(1.0) else []

    def caveats(self) -> list[str]:
        """Return caveats that hold for one condition and for several."""
        missed = sorted(name for name in self.names if not always(self.of(name)))
        some = 0 < len(missed) < len(self.names)  # if all missed it, the sentence says that
        reached = [
            f"{sum(m.seconds is not None for m in self.of(name))} of {plural(len(self.of(name)), 'run')} of {name}"
            for name in missed
        ]
        found = [f"The target was reached in only {listed(reached)}."] if some else []
        if len({m.seed for m in self.marks}) == 1:
            found.append("One seed only: small differences may be chance. Use more seeds to find out.")
        return found


def _rival(order: Sequence[str], baseline: str) -> str | None:
    """Return the strategy to compare the first with: the baseline, or the second if the first is the baseline."""
    return baseline if order[0] != baseline else order[1] if len(order) > 1 else None


def _times(e: Estimate, other: str, p: float | None = None) -> str:
    """Return a ratio in words; `p`, if given, is corrected for the number of strategies, the interval is not."""
    unsure = ""
    if not is_useless(e) and (e.includes(1.0) if p is None else p >= CHANCE):
        unsure = ", which may be chance" + ("" if e.includes(1.0) else " where so many are compared")
    return f"{e.value:.2f} times as fast as {other} ({interval(e)}{unsure})"


def _by_speed(marks: Sequence[RunResult], names: Sequence[str], baseline: str, conditions: int) -> str:
    """Return the sentence for runs without scores, such as simulations of timing only."""
    ends = {name: [m.speed for m in marks if m.strategy == name and m.speed] for name in names}
    means = {name: statistics.fmean(found) for name, found in ends.items() if found}
    if not means:
        return f"{plural(len(marks), 'run')}; nothing was scored, so there is nothing to compare."
    order = sorted(means, key=lambda name: -means[name])
    said = f"Nothing was scored; {order[0]} went through {means[order[0]]:,.0f} samples a second"
    if conditions > 1:
        return f"{said}, on average over {conditions} conditions."
    rival = _rival(order, baseline)
    own, others = pairs(marks, order[0], rival or "", lambda m: m.speed or None)
    return f"{said}, {_times(ratio(own, others), rival)}." if rival and own else f"{said}."


def _by_score(
    marks: Sequence[RunResult], names: Sequence[str], baseline: str, metric: str | None, conditions: int
) -> str:
    """Return the sentence for runs without a target, which compares the final scores."""
    assert metric is not None
    sign = 1 if lower_is_better(metric) else -1
    ends = {name: [m.final for m in marks if m.strategy == name and m.final is not None] for name in names}
    means = {name: statistics.fmean(found) for name, found in ends.items() if found}
    order = sorted(means, key=lambda name: sign * means[name])
    said = f"{order[0]} ended with {metric} {means[order[0]]:.4g}"
    if len(names) == 1:
        return f"{said}."
    if conditions > 1:
        return f"{said}, the best on average over {conditions} conditions."
    rival = _rival(order, baseline)
    own, others = pairs(marks, order[0], rival or "", lambda m: m.final)
    if not own:
        return f"{said}, the best."
    e = difference(own, others)
    beside = f"{e.value:+.2g} beside {rival} ({interval(e, '+.2g')}"
    return (
        f"{said}, which is no clear lead: {beside}, which may be chance)."
        if e.includes(0.0)
        else (f"{said}, the best: {beside}).")
    )
