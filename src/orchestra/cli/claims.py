# SPDX-License-Identifier: Apache-2.0
"""`--assert`: claims about a comparison, for scripts that must fail when one does not hold.

    slowmo.time < allreduce.time            seconds to the target, the median over the seeds
    localsgd.bytes <= 0.2 * allreduce.bytes bytes that a worker sent and received
    ps.final >= 0.95                        the score in the end, the mean
    ssp.reached == 1                        the share of runs that reached the target

A strategy is named as it was given, or by the beginning of its name where that is only one of them.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestra.errors import ConfigError, Problem, nearest

if TYPE_CHECKING:
    from orchestra.cli.table import StrategyRow, Table

FIGURES: dict[str, Callable[[StrategyRow], float]] = {
    "time": lambda row: row.time if row.always else math.inf,
    "seconds": lambda row: row.seconds if row.done else math.nan,
    "bytes": lambda row: row.traffic if row.done else math.nan,
    "wait": lambda row: row.wait,
    "age": lambda row: _known(row.mean("staleness_mean")),
    "staleness": lambda row: _known(row.mean("staleness_mean")),  # what `age` was called before
    "final": lambda row: row.final,
    "reached": lambda row: len(row.times) / len(row.outcomes),
}
_OPERATORS = {"<=": operator.le, ">=": operator.ge, "==": operator.eq, "<": operator.lt, ">": operator.gt}
_NUMBER = r"\d+(?:\.\d*)?(?:[eE][+-]?\d+)?"


def _known(value: float | None) -> float:
    return math.nan if value is None else value


@dataclass(frozen=True)
class Side:
    """A number, or a figure of a strategy times a number."""

    factor: float
    strategy: str | None = None
    figure: str = ""

    def value(self, table: Table) -> float:
        """Return its number."""
        if self.strategy is None:
            return self.factor
        row = table.row(self.strategy)
        return math.nan if row is None else self.factor * FIGURES[self.figure](row)


@dataclass(frozen=True)
class Claim:
    """One comparison of two sides."""

    text: str
    left: Side
    sign: str
    right: Side

    def holds(self, table: Table) -> bool:
        """Return whether the claim holds. It does not if both sides missed the target: neither is known to be later."""
        left, right = self.left.value(table), self.right.value(table)
        return not (math.isinf(left) and math.isinf(right)) and bool(_OPERATORS[self.sign](left, right))

    def told(self, table: Table) -> str:
        """Return the claim with its numbers."""
        left, right = self.left.value(table), self.right.value(table)
        verdict = "holds" if self.holds(table) else "DOES NOT HOLD"
        if math.isinf(left) and math.isinf(right):
            return f"{self.text}: {verdict} (neither reached the target in every run)"
        return f"{self.text}: {verdict} ({left:.4g} {self.sign} {right:.4g})"


def parse(text: str, strategies: tuple[str, ...]) -> Claim:
    """Read a claim about strategies of the comparison, or raise a `ConfigError`."""
    found = re.fullmatch(r"([^<>=]+)(<=|>=|==|<|>)([^<>=]+)", text.strip())
    # Options in parentheses have equals signs, which are not comparisons.
    if found is None:
        found = re.fullmatch(r"(.+?\.[a-z]+)\s*(<=|>=|==|<|>)\s*(.+)", text.strip())
    if found is None:
        example = "slowmo.time < allreduce.time or localsgd.bytes <= 0.2 * allreduce.bytes"
        message = f"is not a claim: write two sides with <, <=, >, >= or == between them, as in {example}"
        raise ConfigError([Problem("assert", text, message)])
    left, sign, right = found.groups()
    return Claim(text.strip(), _side(left.strip(), text, strategies), sign, _side(right.strip(), text, strategies))


def _side(side: str, text: str, strategies: tuple[str, ...]) -> Side:
    if re.fullmatch(_NUMBER, side):
        return Side(float(side))
    found = re.fullmatch(rf"(?:({_NUMBER})\s*\*\s*)?(.+)\.([a-z]+)", side)
    if found is None:
        raise ConfigError([Problem("assert", text, f"{side!r} is neither a number nor STRATEGY.FIGURE")])
    factor, name, figure = found.groups()
    if figure not in FIGURES:
        raise ConfigError([Problem("assert", text, f"there is no figure {figure!r}; {nearest(figure, FIGURES)}")])
    return Side(float(factor or 1), _strategy(name.strip(), text, strategies), figure)


def _strategy(name: str, text: str, strategies: tuple[str, ...]) -> str:
    """Return the strategy with this name, or the only one whose name begins so."""
    if name in strategies:
        return name
    plain = name.replace(" ", "")
    same = [s for s in strategies if s.replace(" ", "") == plain]
    meant = same or [s for s in strategies if s.partition("(")[0] == plain]
    meant = meant or [s for s in strategies if s.replace(" ", "").startswith(plain)]
    if len(meant) == 1:
        return meant[0]
    known = nearest(name, strategies)
    why = f"{name!r} may be {' or '.join(meant)}" if meant else f"{name!r} does not take part; {known}"
    raise ConfigError([Problem("assert", text, why)])
