# SPDX-License-Identifier: Apache-2.0
"""What workers did up to a moment: totals of their steps, in proportion within a step."""

from __future__ import annotations

import pytest

from orchestra.report.until import until
from orchestra.runs.events import Stepped


def step(t: float, node: int, samples: int, compute: float, wait: float) -> Stepped:
    return Stepped(t, node, 1, 0.0, samples, 0.5, 0.1, compute, t - compute - wait, wait, 0, 0)


EVENTS = [
    step(2.0, 0, 10, 1.0, 0.5),
    step(4.0, 0, 20, 2.0, 1.0),
    step(4.0, 1, 10, 4.0, 0.0),
    step(3.0, 2, 99, 3.0, 0.0),  # a server
]


def test_a_step_counts_in_proportion() -> None:
    found = until(EVENTS, 2, 3.0)
    assert found is not None
    assert found.samples == pytest.approx(15 + 7.5)
    assert found.rate == pytest.approx(22.5 / 3)
    assert found.compute == pytest.approx((1.5 + 3) / 6)
    assert found.communicate == pytest.approx(0.75 / 6)
    assert found.wait == pytest.approx(0.75 / 6)
    assert found.idle == 0


def test_a_worker_that_has_made_its_steps_is_idle() -> None:
    found = until(EVENTS, 2, 8.0)
    assert found is not None
    assert found.samples == 30
    assert found.idle == pytest.approx(8 / 16)
    assert found.compute + found.communicate + found.wait + found.idle == pytest.approx(1)


def test_of_no_steps_and_no_time_nothing_can_be_told() -> None:
    assert until([], 2, 3.0) is None
    assert until(EVENTS, 2, 0.0) is None
