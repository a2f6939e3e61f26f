# SPDX-License-Identifier: Apache-2.0
"""Which cases of a test run for every change: all of them in virtual time, where they are cheap, few in processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import pytest

from orchestra import Local, Simulated


def few(cases: Sequence[Any], chosen: Sequence[Any]) -> list[Any]:
    """Mark all but the chosen cases `nightly`: for tests that take seconds with each case."""
    assert all(case in cases for case in chosen), chosen
    marked = [pytest.param(*(c if isinstance(c, tuple) else [c]), marks=pytest.mark.nightly) for c in cases]
    return [case if case in chosen else later for case, later in zip(cases, marked, strict=True)]


def in_both_worlds(
    names: str,
    *values: Iterable[Any],
    real: Callable[..., bool],
    local: Local,
    simulated: Simulated,
    possible: Callable[..., bool] = lambda *case: True,
) -> pytest.MarkDecorator:
    """Every combination of the values in virtual time, those that are `real` in processes, all there in nightly.

    The last argument of the test is its cluster.
    """
    cases = []
    for case in filter(lambda case: possible(*case), product(*values)):
        name = "-".join(getattr(value, "__name__", None) or str(value) for value in case)
        cases.append(pytest.param(*case, simulated, id=f"{name}-simulated"))
        marks = [] if real(*case) else [pytest.mark.nightly]
        cases.append(pytest.param(*case, local, id=f"{name}-local", marks=marks))
    return pytest.mark.parametrize(f"{names}, cluster".lstrip(", "), cases)
