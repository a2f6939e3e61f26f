# SPDX-License-Identifier: Apache-2.0
"""What a strategy should have cost, by the formula on its page, and the bounds it promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchestra.core.strategy import Strategy
from orchestra.engine import expression
from orchestra.errors import ConfigError
from orchestra.strategies import (
    EASGD,
    STRATEGIES,
    AllReduce,
    Downpour,
    Hogwild,
    LocalSGD,
    ParameterServer,
    SlowMo,
    Solo,
    SyncEASGD,
)
from orchestra.strategies.parameter_server.consistency import SSP
from orchestra.strategies.parameter_server.filters.base import Everything


@dataclass(frozen=True)
class Formula:
    """Bytes that a worker sends, on average over the workers."""

    text: str  # with S for the bytes of the model, N for the workers
    bytes: float


def catalogue() -> list[str]:
    """The strategies there are, as they are shown, sorted."""
    return sorted(expression.show(cls()).partition("(")[0] for cls in STRATEGIES)


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
    size = 4 * parameters
    mean = 2 * (workers - 1) * size / workers
    match strategy:
        case Solo() | Hogwild():
            return Formula("0", 0.0)
        case AllReduce(algorithm="native" | "ring"):
            return Formula("2 (N−1)/N · S a step", steps * mean)
        case LocalSGD(tau=tau):
            return Formula("2 (N−1)/N · S every τ steps", -(-steps // tau) * mean)
        case SyncEASGD(tau=tau):
            return Formula("2 (N−1)/N · S every τ steps, once more at the end", (-(-steps // tau) + 1) * mean)
        case Downpour(n_push=n_push):
            return Formula("S every n_push steps", -(-steps // n_push) * size)
        case EASGD(tau=tau):
            return Formula("S every τ steps, once more at the end", (-(-steps // tau) + 1) * size)
        case ParameterServer(colocated=False, filter=Everything()):
            given_up = ", but for gradients given up" if abandoned else ""
            return Formula(f"S a step{given_up}", (steps - abandoned) * size)
        case SlowMo(tau=tau, base=base, buffers=buffers):
            within = sent(base, workers, steps, parameters)
            each = 2 * mean + 4 * (workers - 1) if buffers == "average" else mean
            text = "2 (N−1)/N · S every τ steps, and what the base sends"
            return within and Formula(text, within.bytes + -(-steps // tau) * each)
    return None


def bound(strategy: Strategy[Any] | None) -> tuple[str, int] | None:
    """The figure that a strategy keeps within a bound, and the bound."""
    match strategy:
        case ParameterServer(consistency=SSP(staleness=s)):
            return "gap", s
    return None
