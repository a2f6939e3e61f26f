# SPDX-License-Identifier: Apache-2.0
"""Intervals and tests against closed forms, tables and repeated draws."""

from __future__ import annotations

import math
import random

import pytest

from orchestra.report.statistics import difference, holm, median_interval, ratio, t_quantile, t_within


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0, 2.5, 40.0])
def test_students_distribution_in_closed_form(t: float) -> None:
    assert t_within(t, 1) == pytest.approx(2 / math.pi * math.atan(t))
    assert t_within(t, 2) == pytest.approx(t / math.sqrt(2 + t * t))
    assert t_within(t, 400) == pytest.approx(math.erf(t / math.sqrt(2)), abs=2e-3)


@pytest.mark.parametrize("nu", [1, 2, 3, 4, 5, 8])
def test_students_distribution_is_the_integral_of_its_density(nu: int) -> None:
    factor = math.gamma((nu + 1) / 2) / math.sqrt(nu * math.pi) / math.gamma(nu / 2)
    steps = 20_000
    middles = [(i + 0.5) * 1.7 / steps for i in range(steps)]
    area = sum(factor * (1 + x * x / nu) ** (-(nu + 1) / 2) for x in middles) * 1.7 / steps
    assert t_within(1.7, nu) == pytest.approx(2 * area, abs=1e-8)


@pytest.mark.parametrize(("nu", "t"), [(1, 12.706), (2, 4.303), (4, 2.776), (9, 2.262), (30, 2.042)])
def test_quantiles_are_those_of_the_tables(nu: int, t: float) -> None:
    assert t_quantile(0.95, nu) == pytest.approx(t, abs=5e-4)


def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    dice = random.Random(1)
    held = 0
    for _ in range(2000):
        a = [dice.gauss(3.0, 1.0) for _ in range(5)]
        b = [dice.gauss(1.0, 1.0) for _ in range(5)]
        e = difference(a, b)
        assert e.low is not None
        assert e.high is not None
        held += e.low <= 2.0 <= e.high
    assert 0.935 < held / 2000 < 0.965


def test_twice_as_fast_and_twice_as_slow_cancel() -> None:
    e = ratio([2.0, 1.0, 3.0], [1.0, 2.0, 3.0])
    assert e.value == pytest.approx(1.0)
    assert e.includes(1.0)
    assert e.p == pytest.approx(1.0)


def test_ratios_turned_around_are_one_over() -> None:
    a, b = [3.0, 5.0, 4.0], [1.0, 2.0, 2.5]
    there, back = ratio(a, b), ratio(b, a)
    assert there.value * back.value == pytest.approx(1.0)
    assert there.low is not None
    assert back.high is not None
    assert there.low * back.high == pytest.approx(1.0)
    assert there.p == back.p


def test_one_pair_has_no_interval() -> None:
    e = ratio([2.0], [1.0])
    assert (e.value, e.low, e.high, e.p, e.n) == (2.0, None, None, None, 1)
    assert not e.includes(1.0)


@pytest.mark.parametrize("gap", [0.0, 1.0, 0.1])  # of a tenth not even the computed differences are equal
def test_pairs_that_are_all_alike_say_nothing_of_chance(gap: float) -> None:
    a = [1.0, 20.0, 300.3]
    e = difference([x + gap for x in a], a)
    assert e.value == pytest.approx(gap)
    assert (e.low, e.high, e.p, e.n) == (None, None, None, 3)


def test_two_pairs_have_an_interval_and_no_test() -> None:
    e = difference([2.0, 2.1], [1.0, 1.0])
    assert e.includes(1.05)
    assert e.p is None
    assert difference([2.0, 2.1, 2.2], [1.0, 1.0, 1.0]).p is not None


def test_pairs_are_not_known_better_than_they_were_measured() -> None:
    """However many agree: they may all be wrong by the same."""
    for n in (3, 30):
        e = ratio([2.0] * n, [1.0] * n, blur=0.1)
        assert e.blurred
        assert e.low == pytest.approx(2.0 * math.exp(-0.1 * t_quantile(0.95, n - 1)))
        assert e.p == pytest.approx(1 - t_within(math.log(2.0) / 0.1, n - 1))
    assert ratio([2.0, 2.01, 1.99], [1.0] * 3, blur=0.1).low == pytest.approx(2.0 * math.exp(-0.4303), abs=1e-3)
    spread = ratio([2.0, 1.0, 4.0], [1.0, 1.0, 1.0], blur=0.1)
    assert spread == ratio([2.0, 1.0, 4.0], [1.0, 1.0, 1.0])
    assert not spread.blurred


def test_an_interval_wider_than_numbers_reach_is_no_error() -> None:
    assert ratio([1e300, 1e-300], [1e-300, 1e300]).includes(1.0)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_the_median_of_few_runs_is_told_with_least_and_most() -> None:
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert median_interval([float(i) for i in range(6)]) == (0.0, 5.0)
    # Of nine values the second and the eighth: 2 (1 + 9) / 2**9 is less than 5 %.
    assert median_interval([float(i) for i in range(9)]) == (1.0, 7.0)


def test_ratios_beyond_all_reason_are_numbers_still() -> None:
    e = ratio([1e60, 1.0], [1e-300, 1.0])
    assert e.high is not None
    assert math.isfinite(e.high)
