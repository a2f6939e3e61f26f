# SPDX-License-Identifier: Apache-2.0
"""What a strategy should have cost, by the formula on its page, and the bounds it promises."""

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
    """Bytes that a worker sends, on average over the workers."""

    text: str  # with S for the bytes of the model, N for the workers
    bytes: float


def catalogue() -> list[str]:
    """The strategies there are, as they are shown, sorted."""
    return sorted(row.short or row.name for row in rows())


def parsed(text: str) -> Strategy[Any] | None:
    """A strategy from its text; None if it is somebody's own."""
    try:
        return expression.parse(text)
    except ConfigError:
        return None


def sent(
    strategy: Strategy[Any] | None, workers: int, steps: int, parameters: int, abandoned: float = 0.0
) -> Formula | None:
    """What each of so many workers sends in so many steps, some of them given up; None where nothing tells."""
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
    """The figure that a strategy keeps within a bound, and the bound."""
    match strategy:
        case ParameterServer(consistency=SSP(staleness=s)):
            return "gap", s
    return None
