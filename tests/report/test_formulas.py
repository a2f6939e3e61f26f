# SPDX-License-Identifier: Apache-2.0
"""The formulas of the report are those of the laws, which runs obey."""

from __future__ import annotations

from typing import Any

import pytest
from tests.laws.examples import EXAMPLES, workers_for

from orchestra.core.strategy import Strategy
from orchestra.core.traffic import RunSize
from orchestra.engine import expression
from orchestra.report import formulas
from orchestra.strategies.catalogue import STRATEGIES, expected_traffic

LAYERS = [37, 5, 12]


CLOSED = [strategy for strategy in EXAMPLES if formulas.sent(strategy, 4, 7, 54) is not None]


@pytest.mark.parametrize("strategy", CLOSED, ids=expression.show)
@pytest.mark.parametrize("wanted", [2, 3, 4])
def test_bytes_are_those_of_the_laws(strategy: Strategy[Any], wanted: int) -> None:
    workers, steps = workers_for(strategy, wanted), 7
    formula = formulas.sent(strategy, workers, steps, sum(LAYERS))
    assert formula is not None
    expected = expected_traffic(strategy, RunSize(workers=workers, steps=steps, layers=tuple(LAYERS)))
    assert expected is not None
    assert formula.bytes == pytest.approx(sum(expected.workers) / workers)


def test_most_strategies_have_a_formula() -> None:
    without = {type(s).__name__ for s in EXAMPLES if formulas.sent(s, 4, 7, 54) is None}
    assert without <= {"AllReduce", "ParameterServer", "SlowMo", "StrategySwitch"}
    plain = [cls() for cls in STRATEGIES if cls.__name__ != "StrategySwitch"]
    assert all(formulas.sent(strategy, 4, 7, 54) is not None for strategy in plain)


def test_unknown_strategies_have_no_formula() -> None:
    assert formulas.parsed("my own(strategy") is None
    assert formulas.sent(None, 2, 2, 2) is None
    assert formulas.bound(None) is None


def test_the_bound_of_ssp() -> None:
    assert formulas.bound(formulas.parsed("ps(consistency=ssp(staleness=5))")) == ("gap", 5)
    assert formulas.bound(formulas.parsed("ps")) is None
