# SPDX-License-Identifier: Apache-2.0
"""Significance of differences between measurements: paired intervals, tests, and Holm's correction.

Runs with the same seed see the same samples from the same start, so they are compared pair by pair. Times are compared
as ratios, whose logarithms are averaged, so that twice as fast and twice as slow cancel.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_ENOUGH = 3  # pairs needed for a p-value
_ROUNDING = 1e-9  # relative; smaller differences count as equal


@dataclass(frozen=True)
class Estimate:
    """A figure with its interval. A single pair has no interval, nor have pairs that are all alike."""

    value: float
    low: float | None
    high: float | None
    p: float | None  # of no difference, two-sided
    n: int  # pairs
    blurred: bool = False  # the pairs differ by less than the measurement error, which then gives the interval

    def includes(self, nothing: float) -> bool:
        """Return whether the interval contains `nothing`, the value that means no difference."""
        return self.low is not None and self.high is not None and self.low <= nothing <= self.high


def ratio(a: Sequence[float], b: Sequence[float], confidence: float = 0.95, blur: float = 0.0) -> Estimate:
    """Return how many times larger `a` is than `b`: the geometric mean of the paired ratios, with Student's interval.

    `blur` is the standard measurement error of the mean logarithm, as in `difference`.

    >>> e = ratio([2.0, 4.0, 8.0], [1.0, 2.0, 4.0])
    >>> round(e.value, 12), e.n
    (2.0, 3)
    """
    logs = difference([math.log(x) for x in a], [math.log(y) for y in b], confidence, blur)
    low, high = (None if x is None else _exp(x) for x in (logs.low, logs.high))
    return Estimate(_exp(logs.value), low, high, logs.p, logs.n, logs.blurred)


def _exp(x: float) -> float:
    return math.exp(min(x, 700.0))  # finite even for the end of a very wide interval


def difference(a: Sequence[float], b: Sequence[float], confidence: float = 0.95, blur: float = 0.0) -> Estimate:
    """Return how much larger `a` is than `b`: the mean of the paired differences, with Student's interval.

    `blur` is the standard deviation of a measurement error that all pairs share, so that more pairs do not reduce it.
    """
    gaps = [x - y for x, y in zip(a, b, strict=True)]
    n, mean = len(gaps), statistics.fmean(gaps)
    if n < 2:
        return Estimate(mean, None, None, None, n)
    spread = statistics.stdev(gaps) / math.sqrt(n)
    error = max(spread, blur)
    if error <= _ROUNDING * max(map(abs, (*a, *b))):  # all alike: the spread says nothing about chance
        return Estimate(mean, None, None, None, n)
    reach = t_quantile(confidence, n - 1) * error
    p = 1 - t_within(abs(mean) / error, n - 1) if n >= _ENOUGH else None
    return Estimate(mean, mean - reach, mean + reach, p, n, blurred=blur > spread)


def t_within(t: float, nu: int) -> float:
    """Return P(|T| ≤ t) for Student's T with ν degrees of freedom (closed form: Abramowitz and Stegun 26.7.3-4).

    >>> round(t_within(1.0, 1), 12), round(t_within(2**0.5, 2), 12)
    (0.5, 0.707106781187)
    """
    theta = math.atan2(t, math.sqrt(nu))
    cosine = math.cos(theta)
    odd = nu % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(odd, nu - 1, 2):
        total += term
        term *= cosine * cosine * (k + 1) / (k + 2)
    within = math.sin(theta) * total
    return 2 / math.pi * (theta + within) if odd else within


def t_quantile(confidence: float, nu: int) -> float:
    """Return the t with P(|T| ≤ t) = confidence.

    >>> [round(t_quantile(0.95, nu), 3) for nu in (1, 2, 4, 30)]
    [12.706, 4.303, 2.776, 2.042]
    """
    low, high = 0.0, 1.0
    while t_within(high, nu) < confidence:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if t_within(middle, nu) < confidence else (low, middle)
    return high


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of a median by order statistics; of less than six values the minimum and maximum."""
    ordered, n, cut = sorted(values), len(values), 0
    while n >= 6 and 2 * sum(math.comb(n, i) for i in range(cut + 2)) / 2**n <= 0.05:
        cut += 1
    return ordered[cut], ordered[n - 1 - cut]


def holm(ps: Sequence[float]) -> list[float]:
    """Return p-values corrected for several tests made at once (Holm 1979).

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(ps)), key=lambda i: ps[i])
    found, worst = [0.0] * len(ps), 0.0
    for place, i in enumerate(order):
        worst = max(worst, min(1.0, (len(ps) - place) * ps[i]))
        found[i] = worst
    return found
