# SPDX-License-Identifier: Apache-2.0
"""The choice among strategies that are equally fast: the simplest, else the cheapest.

1. the fewest nodes: servers are machines as well
2. the fewest bytes between all nodes, unless they differ by less than a twentieth
3. the simplest: the fewest options given, then nothing to tune but the rate, then the fewest options in all
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from orchestra.cli.table import StrategyRow, Table
from orchestra.formatting import listed, plural, size
from orchestra.report.verdict import tied

_ALIKE = 1.05  # times as many bytes that count as equally many


def choose(rows: Sequence[StrategyRow]) -> tuple[StrategyRow, str]:
    """Return which of some tied strategies to take, and by which rule."""
    fewest = min(row.workers + row.servers for row in rows)
    small = [row for row in rows if row.workers + row.servers == fewest]
    if len(small) == 1 < len(rows):
        return small[0], f"it needs the fewest nodes, {fewest}"
    least = min(row.total for row in small)
    frugal = [row for row in small if row.total <= _ALIKE * least]
    few = f"of those with {plural(fewest, 'node')} " if len(small) < len(rows) else ""
    if len(frugal) == 1 < len(small):
        return frugal[0], f"{few}it sends the fewest bytes between all nodes, {size(least)}"
    return min(frugal, key=_options), f"{few}it is the simplest, at about as many bytes"


def _options(row: StrategyRow) -> tuple[int, bool, int, str]:
    """Return a sort key: options given, whether one is tuned, options in all; last the name, to break ties."""
    from orchestra.engine import expression
    from orchestra.strategies.catalogue import row_of

    strategy: Any = expression.parse(row.strategy)
    tuned = row_of(strategy).tuned_option is not None
    return row.strategy.count("="), tuned, len(dataclasses.fields(strategy)), row.strategy


def advice(rows: Sequence[StrategyRow]) -> list[str]:
    """Return which of several tied strategies to take, in a sentence; no sentence for one strategy."""
    if len(rows) < 2:
        return []
    first, rule = choose(rows)
    return [f"Of {listed([row.strategy for row in rows])}, which are tied, take {first.strategy}: {rule}."]


def arranged(table: Table) -> tuple[list[StrategyRow], list[StrategyRow]]:
    """Return the strategies that always reached the target, the best first, and those that are tied with it."""
    rows = [row for row in table.ranked if row.always]
    names = tied(table.marks, table.target) if len(rows) > 1 else []
    equal = [row for row in rows if row.strategy in names]
    if len(equal) < 2:
        return rows, []
    first = choose(equal)[0]
    return sorted(rows, key=lambda row: row is not first), sorted(equal, key=lambda row: row is not first)


def recommended(rows: Sequence[StrategyRow], goal: str, unit: str) -> str:
    """Return the sentence of `recommend` on a tie: which strategy to take, by which rule, and how fast all were."""
    first, rule = choose(rows)
    others = listed([row.strategy for row in rows if row is not first])
    times = listed([f"{row.time:.3g}" for row in rows])
    of = f", medians of {len(first.times)} seeds" if len(first.times) > 1 else " (one seed)"
    return f"Take {first.strategy}: it is tied with {others}, and {rule}. They reached {goal} after {times} {unit}{of}."
