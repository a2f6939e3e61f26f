# SPDX-License-Identifier: Apache-2.0
"""How far a difference between measurements can be trusted: paired intervals, tests, and Holm's correction.

Runs with the same seed see the same samples from the same start, so they are compared pair by pair. Times are compared
as ratios, whose logarithms are averaged: twice as fast and twice as slow then cancel, as they should.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_ENOUGH = 3  # pairs from which on their spread says how likely chance is
_ROUNDING = 1e-9  # of a figure: what differs by less is the same


@dataclass(frozen=True)
class Estimate:
    """A figure with its interval. There is none of a single pair, nor of pairs that are all alike."""

    value: float
    low: float | None
    high: float | None
    p: float | None  # of no difference, two-sided
    n: int  # pairs
    blurred: bool = False  # the pairs agree more closely than they were measured: the interval is that of measuring

    def includes(self, nothing: float) -> bool:
        """Whether the interval holds the value that stands for no difference."""
        return self.low is not None and self.high is not None and self.low <= nothing <= self.high


def ratio(a: Sequence[float], b: Sequence[float], confidence: float = 0.95, blur: float = 0.0) -> Estimate:
    """How many times larger `a` is than `b`, pair by pair: the geometric mean of the ratios, and Student's interval.

    Every ratio is known to no more than a `blur`, as in `difference` of logarithms.

    >>> e = ratio([2.0, 4.0, 8.0], [1.0, 2.0, 4.0])
    >>> round(e.value, 12), e.n
    (2.0, 3)
    """
    logs = difference([math.log(x) for x in a], [math.log(y) for y in b], confidence, blur)
    low, high = (None if x is None else _exp(x) for x in (logs.low, logs.high))
    return Estimate(_exp(logs.value), low, high, logs.p, logs.n, logs.blurred)


def _exp(x: float) -> float:
    return math.exp(min(x, 700.0))  # of a ratio that nobody measured: large, but still a number


def difference(a: Sequence[float], b: Sequence[float], confidence: float = 0.95, blur: float = 0.0) -> Estimate:
    """How much larger `a` is than `b`, pair by pair: the mean, and Student's interval.

    Measuring may err by a standard deviation of `blur`, in all pairs alike: more of them do not make up for it.
    """
    gaps = [x - y for x, y in zip(a, b, strict=True)]
    n, mean = len(gaps), statistics.fmean(gaps)
    if n < 2:
        return Estimate(mean, None, None, None, n)
    spread = statistics.stdev(gaps) / math.sqrt(n)
    error = max(spread, blur)
    if error <= _ROUNDING * max(map(abs, (*a, *b))):  # all alike: no measure of how far chance may carry them
        return Estimate(mean, None, None, None, n)
    reach = t_quantile(confidence, n - 1) * error
    p = 1 - t_within(abs(mean) / error, n - 1) if n >= _ENOUGH else None
    return Estimate(mean, mean - reach, mean + reach, p, n, blurred=blur > spread)


def t_within(t: float, nu: int) -> float:
    """P(|T| ≤ t) for Student's T with ν degrees of freedom, in closed form (Abramowitz and Stegun 26.7.3, 26.7.4).

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
    """The t with P(|T| ≤ t) = confidence.

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
    """The 95 % interval of a median by order of size; from less than six values that is least and most."""
    ordered, n, cut = sorted(values), len(values), 0
    while n >= 6 and 2 * sum(math.comb(n, i) for i in range(cut + 2)) / 2**n <= 0.05:
        cut += 1
    return ordered[cut], ordered[n - 1 - cut]


def holm(ps: Sequence[float]) -> list[float]:
    """The p-values of several tests made at once (Holm 1979): the smallest counts as often as there are tests.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(ps)), key=lambda i: ps[i])
    found, worst = [0.0] * len(ps), 0.0
    for place, i in enumerate(order):
        worst = max(worst, min(1.0, (len(ps) - place) * ps[i]))
        found[i] = worst
    return found
