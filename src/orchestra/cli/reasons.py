# SPDX-License-Identifier: Apache-2.0
"""Why one strategy reached the target before another, in words.

The time to the target is the samples needed divided by the samples a second. The first is what the strategy does to
learning, the second what it does to the workers' time.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from orchestra.cli.table import StrategyRow, Table
from orchestra.formatting import listed
from orchestra.report.until import Until
from orchestra.report.verdict import tied

_ALIKE = 1.05  # a ratio that counts as equal
_SHARE = 0.05  # of the time: a smaller one is not reported
_FEWER = 1.25  # times fewer bytes that are reported
_KINDS = {
    "compute": "computing",
    "communicate": "sending and receiving",
    "wait": "waiting for others",
    "idle": "idle after their last step",
}


def why(table: Table, first: StrategyRow) -> list[str]:
    """Return why the first strategy was faster than the baseline, and than the best one of the other kind."""
    others = [row for row in table.ranked if row.strategy != first.strategy and row.done]
    base = next((row for row in others if row.strategy == table.baseline), others[0] if others else None)
    kind = _is_synchronous(first)
    other = next((row for row in others if _is_synchronous(row) is not kind), None)
    if base is not None and _is_synchronous(base) is not kind:
        other = None  # the baseline is of the other kind
    equal = tied(table.marks, table.target)
    found = [
        text
        for rival in (base, other)
        if rival is not None
        for text in _beside(table, first, rival, tie={first.strategy, rival.strategy} <= {*equal})
    ]
    return [*dict.fromkeys(found)]


def _is_synchronous(row: StrategyRow) -> bool:
    """Return whether its workers wait for each other."""
    from orchestra.engine import expression

    return expression.parse(row.strategy).layout.updates.synchronous


def _beside(table: Table, first: StrategyRow, rival: StrategyRow, *, tie: bool) -> Iterator[str]:
    name = rival.strategy
    mine, theirs = _pairs(first, rival)
    if not mine:
        return
    rate = _mean(mine, "rate") / _mean(theirs, "rate")
    need = _mean(mine, "samples") / _mean(theirs, "samples")
    reason = _reason(rate, need)
    if not rival.times:
        said = f"In these runs {first.strategy} went through {_as_many(rate)} samples a second as {name}."
        if need < 1:
            said += (
                f" It reached the target with {need:.0%} of the samples that {name} used in a whole run without "
                "reaching it."
            )
    elif tie:  # what is equally fast need not be alike
        passed = f"until the target {first.strategy} went through {_as_many(rate)} samples a second as {name}"
        said = f"In these runs, {passed}, and needed {_as_many(need)} samples."
    elif reason is not None:
        which = "In these runs" if rival.always else "In runs that reached the target"
        said = f"{which} {first.strategy} was faster than {name} because {reason}."
    else:
        return
    yield f"{said} {_times(mine, name, theirs)}"
    each = [row.traffic * row.workers / (row.mean("samples") or 1) for row in (first, rival)]
    if each[0] and each[1] > _FEWER * each[0] and _mean(theirs, "communicate") > _SHARE:
        fewer = f"{each[1] / each[0]:.1f} times fewer bytes than {name}"
        yield f"For each sample {first.strategy} sends and receives {fewer}."
    yield from (_staleness(table, row) for row in (first, rival) if row.mean("staleness_mean"))


def _pairs(first: StrategyRow, rival: StrategyRow) -> tuple[list[Until], list[Until]]:
    """Return pairs of runs with equal seeds that both reached the target; if the rival never did, of all its runs."""
    theirs = {o.seed: o.until for o in rival.outcomes if o.until and (o.seconds is not None or not rival.times)}
    mine = {o.seed: o.until for o in first.outcomes if o.until and o.seconds is not None and o.seed in theirs}
    return [*mine.values()], [theirs[seed] for seed in mine]


def _mean(found: Sequence[Until], figure: str) -> float:
    return statistics.fmean(getattr(one, figure) for one in found)


def _as_many(ratio: float) -> str:
    return "about as many" if 1 / _ALIKE < ratio < _ALIKE else f"{ratio:.2g} times as many"


def _reason(rate: float, need: float) -> str | None:
    """Return which of the two made it faster; None if it was not, as can happen with one seed."""
    if need >= rate:
        return None
    passed, needed = f"went through {_as_many(rate)} samples a second", f"needed {_as_many(need)} samples"
    quick, frugal = rate >= _ALIKE, need <= 1 / _ALIKE
    if quick:
        but = "and" if frugal else "though it" if need >= _ALIKE else "and"
        return f"until the target it {passed}, {but} {needed}"
    if frugal:
        but = "and" if rate > 1 / _ALIKE else "though it"
        return f"it {needed} until the target, {but} {passed}"
    return None


def _times(mine: Sequence[Until], name: str, theirs: Sequence[Until]) -> str:
    """Return how the workers spent the time until the target."""
    shares = [(text, _mean(mine, kind), _mean(theirs, kind)) for kind, text in _KINDS.items()]
    words = [f"{a:.0%} {text} ({b:.0%})" for text, a, b in shares if max(a, b) >= _SHARE]
    words[0] = f"{words[0][:-1]} with {name})"
    return f"Of the time until then its workers spent {listed(words)}."


def _staleness(table: Table, row: StrategyRow) -> str:
    stale, found = row.mean("staleness_mean"), table.settings.get(row.strategy)
    tuned = "" if found is None else f"; tuning chose {found} for it"
    return f"Gradients of {row.strategy} were {stale:.1f} updates old on average when they were used{tuned}."
