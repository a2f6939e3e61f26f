# SPDX-License-Identifier: Apache-2.0
"""The bytes that a strategy should have sent by its formula in the catalogue, and the bounds that it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchestra.core.strategy import Strategy
from orchestra.core.traffic import RunSize
from orchestra.engine import expression
from orchestra.errors import ConfigError
from orchestra.strategies.catalogue import ParameterServer, expected_traffic, row_of, rows
from orchestra.strategies.parameter_server.consistency import SSP


@dataclass(frozen=True)
class Formula:
    """The bytes that a worker sends, on average over the workers."""

    text: str  # with S for the bytes of the model, N for the workers
    bytes: float


def catalogue() -> list[str]:
    """Return the display names of all strategies, sorted."""
    return sorted(row.short or row.name for row in rows())


def parsed(text: str) -> Strategy[Any] | None:
    """Return a strategy from its text; None if the catalogue does not know it."""
    try:
        return expression.parse(text)
    except ConfigError:
        return None


def sent(
    strategy: Strategy[Any] | None, workers: int, steps: int, parameters: int, abandoned: float = 0.0
) -> Formula | None:
    """Return what each worker sends in these steps, `abandoned` of them without a push; None without a formula."""
    formula = None if strategy is None else row_of(strategy).formula
    if strategy is None or formula is None:
        return None
    expected = expected_traffic(strategy, RunSize(workers=workers, steps=steps, layers=(parameters,)))
    if expected is None:
        return None
    given_up = 4 * parameters * abandoned if strategy.layout.servers else 0.0
    more = ", but for gradients given up" if given_up else ""
    return Formula(formula + more, sum(expected.workers) / workers - given_up)


def bound(strategy: Strategy[Any] | None) -> tuple[str, int] | None:
    """Return the figure that a strategy keeps within a bound, and the bound."""
    match strategy:
        case ParameterServer(consistency=SSP(staleness=s)):
            return "gap", s
    return None
