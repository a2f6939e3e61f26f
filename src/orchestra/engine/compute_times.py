# SPDX-License-Identifier: Apache-2.0
"""Distributions of the time that a worker computes on a mini-batch: for simulations, and to slow real runs down.

Every duration is a pure function of (seed, worker, step), so a real run and its simulation have the same compute
times and the same stragglers.

    constant:0.05                every step takes 50 ms
    constant:0.05,0.05,0.1       likewise, but those of worker 2 take 100 ms; further workers take turns
    exponential:0.05,0.02        Δ + Exp: at least 50 ms, 20 ms more on average         (Dutta et al. 2018)
    pareto:0.05,2                at least 50 ms, a tail of index α = 2
    lognormal:0.05,0.3           50 ms on average, multiplied by exp(σZ - σ²/2)
    markov:0.05,5,0.02,0.2       50 ms in good times, 5 times as long in bad ones, which begin with probability 0.02 a
                                 step and end with probability 0.2: slow steps come in a row
    probe.json                   as `orchestra probe` measured it on a machine, at the run's own batch
    ... pause:0.01,2             in addition, with probability 0.01 a step, a pause of 2 s
    ... slow:1x5                 worker 0 takes 5 times as long; on the command line: --straggler 1x5
"""

from __future__ import annotations

import inspect
import math
import re
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from orchestra.data.feed import fold
from orchestra.errors import Problem, nearest
from orchestra.formatting import plural
from orchestra.runs import measurements

_NORMAL = statistics.NormalDist()


def uniform(seed: int, *key: int) -> float:
    """Return a number in (0, 1) that depends only on the seed and the key."""
    return (fold(seed, *key) + 0.5) / 2**63


class ComputeTime(ABC):
    """A distribution of durations."""

    @abstractmethod
    def seconds(self, seed: int, worker: int, step: int) -> float:
        """Return the seconds that this worker's step takes."""

    @abstractmethod
    def mean(self) -> float:
        """Return the mean seconds of a worker that is not slowed."""

    def at(self, batch: int) -> ComputeTime:
        """Return the distribution for mini-batches of this size: the same one, unless it was measured by batch."""
        return self


@dataclass(frozen=True)
class ConstantTime(ComputeTime):
    """The same time for every step."""

    time: float  # seconds

    def seconds(self, seed: int, worker: int, step: int) -> float:
        """Return the constant."""
        return self.time

    def mean(self) -> float:
        """Return the constant."""
        return self.time


@dataclass(frozen=True)
class Exponential(ComputeTime):
    """T = Δ + Exp. The slowest of N takes on average Δ + H_N times the mean of the exponential part."""

    shift: float  # Δ, seconds
    scale: float  # mean of the exponential part, seconds

    def seconds(self, seed: int, worker: int, step: int) -> float:
        """Return Δ - scale · ln U."""
        return self.shift - self.scale * math.log(uniform(seed, worker, step))

    def mean(self) -> float:
        """Return Δ + scale."""
        return self.shift + self.scale


@dataclass(frozen=True)
class Pareto(ComputeTime):
    """T = x_m · U^(-1/α): a heavy tail."""

    scale: float  # x_m, the minimum, seconds
    alpha: float

    def seconds(self, seed: int, worker: int, step: int) -> float:
        """Draw by inversion."""
        return float(self.scale * uniform(seed, worker, step) ** (-1 / self.alpha))

    def mean(self) -> float:
        """Return the mean, infinite for α ≤ 1."""
        return math.inf if self.alpha <= 1 else self.scale * self.alpha / (self.alpha - 1)


@dataclass(frozen=True)
class LogNormal(ComputeTime):
    """T = c · exp(σZ - σ²/2): c on average."""

    average: float  # c, seconds
    sigma: float

    def seconds(self, seed: int, worker: int, step: int) -> float:
        """Draw by inversion."""
        z = _NORMAL.inv_cdf(uniform(seed, worker, step))
        return self.average * math.exp(self.sigma * z - self.sigma**2 / 2)

    def mean(self) -> float:
        """Return c."""
        return self.average


@dataclass(frozen=True)
class Markov(ComputeTime):
    """Good and bad times, each lasting for a while: with independent steps, asynchronous methods look too good."""

    time: float  # seconds, in good times
    factor: float  # in bad ones
    begin: float  # probability per step that bad times begin
    end: float  # that they end
    _past: dict[tuple[int, int], list[bool]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def seconds(self, seed: int, worker: int, step: int) -> float:
        """Follow the chain up to the step; earlier states are cached."""
        bad = self._past.setdefault((seed, worker), [False])
        while len(bad) <= step:
            u = uniform(seed, worker, len(bad))
            bad.append(u >= self.end if bad[-1] else u < self.begin)
        return self.time * (self.factor if bad[step] else 1.0)

    def mean(self) -> float:
        """Return the mean of the stationary distribution."""
        share = self.begin / (self.begin + self.end) if self.begin + self.end else 0.0
        return self.time * (1 + share * (self.factor - 1))


@dataclass(frozen=True)
class RecordedTimes(ComputeTime):
    """Recorded times: one sequence per worker, repeated at its end; further workers reuse the sequences in turn."""

    times: tuple[tuple[float, ...], ...]

    def seconds(self, seed: int, worker: int, step: int) -> float:
        """Return the recorded time."""
        own = self.times[worker % len(self.times)]
        return own[step % len(own)]

    def mean(self) -> float:
        """Return the mean of all recorded times."""
        return statistics.fmean([t for own in self.times for t in own])


@dataclass(frozen=True)
class Drawn(ComputeTime):
    """One of several durations, all equally likely."""

    times: tuple[float, ...]  # seconds

    def seconds(self, seed: int, worker: int, step: int) -> float:
        """Draw one duration."""
        return self.times[int(uniform(seed, worker, step) * len(self.times))]

    def mean(self) -> float:
        """Return the mean of the durations."""
        return statistics.fmean(self.times)


@dataclass(frozen=True)
class Measured(ComputeTime):
    """Times that a probe measured at several batches, interpolated linearly between them."""

    batch: int  # used where no other is given
    times: tuple[tuple[int, tuple[float, ...]], ...]  # seconds of steps by batch, in ascending order

    def at(self, batch: int) -> ComputeTime:
        """Return the durations measured at the closest batch, scaled to this one."""
        closest, own = min(self.times, key=lambda each: abs(math.log(each[0] / batch)))
        middle = statistics.median(own)
        # Fewer samples never take less than their share of the time.
        here = max(self._line(batch), middle * min(1.0, batch / closest))
        return Drawn(own if batch == closest else tuple(t * here / middle for t in own))

    def _line(self, batch: int) -> float:
        """Return the time on the line through the two measured batches around this one, or nearest to it."""
        points = [(size, statistics.median(own)) for size, own in self.times]
        if len(points) == 1:
            return points[0][1] * batch / points[0][0]
        (a, ta), (b, tb) = next((pair for pair in pairwise(points) if batch <= pair[1][0]), (points[-2], points[-1]))
        return ta + (tb - ta) * (batch - a) / (b - a)

    def seconds(self, seed: int, worker: int, step: int) -> float:
        """Draw a time at the batch of the probed workload."""
        return self.at(self.batch).seconds(seed, worker, step)

    def mean(self) -> float:
        """Return the mean at the batch of the probed workload."""
        return self.at(self.batch).mean()


@dataclass(frozen=True)
class Pause(ComputeTime):
    """A base distribution with occasional pauses."""

    base: ComputeTime
    probability: float  # per step
    time: float  # seconds

    def seconds(self, seed: int, worker: int, step: int) -> float:
        """Return the base's time, plus the pause if there is one."""
        pause = self.time if uniform(seed, worker, step, 1) < self.probability else 0.0
        return self.base.seconds(seed, worker, step) + pause

    def mean(self) -> float:
        """Return the mean of the base plus that of the pauses."""
        return self.base.mean() + self.probability * self.time

    def at(self, batch: int) -> ComputeTime:
        """As the base is at that batch."""
        return replace(self, base=self.base.at(batch))


@dataclass(frozen=True)
class Slow(ComputeTime):
    """The first `count` workers take `factor` times as long."""

    base: ComputeTime
    count: int
    factor: float

    def seconds(self, seed: int, worker: int, step: int) -> float:
        """Return the base's time, or a multiple of it for the slow workers."""
        return self.base.seconds(seed, worker, step) * (self.factor if worker < self.count else 1.0)

    def mean(self) -> float:
        """Return the mean of the other workers."""
        return self.base.mean()

    def at(self, batch: int) -> ComputeTime:
        """As the base is at that batch."""
        return replace(self, base=self.base.at(batch))


_KINDS: dict[str, type[ComputeTime]] = {
    "constant": ConstantTime,
    "exponential": Exponential,
    "pareto": Pareto,
    "lognormal": LogNormal,
    "markov": Markov,
}


def parse(text: str) -> ComputeTime:
    """Read `KIND:NUMBERS` or the name of a probe's file, then any of `pause:P,SECONDS` and `slow:COUNTxFACTOR`.

    Words are separated by blanks or semicolons.

    >>> parse("constant:0.05 slow:1x5")
    Slow(base=ConstantTime(time=0.05), count=1, factor=5.0)
    """
    first, *more = re.sub(r",\s+", ",", text.replace(";", " ")).split() or [""]
    compute_time = measured(Path(first)) if first.endswith(".json") else _kind(first)
    for word in more:
        kind, _, numbers = word.partition(":")
        if kind == "pause":
            probability, seconds = _numbers(word, numbers, ["probability", "seconds"])
            compute_time = Pause(compute_time, probability, seconds)
        elif kind == "slow":
            count, factor = _numbers(word, numbers.replace("x", ","), ["count", "factor"])
            if not count.is_integer():
                raise ValueError(f"{word!r}: the number of slow workers must be a whole one")
            compute_time = Slow(compute_time, int(count), factor)
        else:
            raise ValueError(f"{word!r} is neither pause:PROBABILITY,SECONDS nor slow:COUNTxFACTOR")
    return compute_time


def _kind(word: str) -> ComputeTime:
    kind, _, numbers = word.partition(":")
    if not numbers and math.isfinite(_number(word)):
        return ConstantTime(_number(word))
    if kind in ("pause", "slow"):
        raise ValueError(f"{word!r} needs a compute time before it, e.g. constant:0.05 {word}")
    if kind == "constant" and "," in numbers:
        return RecordedTimes(tuple((t,) for t in _numbers(word, numbers, numbers.split(","))))
    if kind not in _KINDS:
        raise ValueError(f"{kind!r} is not a compute time; {nearest(kind, _KINDS)}")
    cls = _KINDS[kind]
    return cls(*_numbers(word, numbers, list(inspect.signature(cls).parameters)))


def measured(path: Path) -> Measured:
    """Return the computing times in a probe's file."""
    found = measurements.read(path)
    return Measured(found.batch, tuple(sorted(found.compute.items())))


def _numbers(word: str, text: str, wanted: Sequence[str]) -> list[float]:
    found = [_number(each) for each in text.split(",")]
    if len(found) != len(wanted) or not all(map(math.isfinite, found)):
        raise ValueError(f"{word!r} needs {plural(len(wanted), 'number')}: {', '.join(wanted)}; times are in seconds")
    return found


def _number(text: str) -> float:
    """Parse a number, or seconds given in another unit; return NaN if the text is neither.

    >>> _number("0.05"), _number("50ms")
    (0.05, 0.05)
    """
    for unit, factor in (("ms", 1e-3), ("us", 1e-6), ("s", 1.0), ("", 1.0)):
        if text.endswith(unit):
            try:
                return float(text.removesuffix(unit)) * factor
            except ValueError:
                return math.nan
    return math.nan


def read(given: ComputeTime | str | None) -> ComputeTime | None:
    """Return compute times that may have been given as text."""
    return parse(given) if isinstance(given, str) else given


_ARGUMENT = "cluster.compute_time"


def problems_of(given: ComputeTime | str) -> Iterator[Problem]:
    """Yield the problems of compute times as they were given."""
    try:
        found = read(given)
    except ValueError as error:
        yield Problem(_ARGUMENT, given, str(error))
        return
    if isinstance(found, ComputeTime):
        yield from _undrawable(found)
    else:
        yield Problem(_ARGUMENT, found, 'must be a distribution such as LogNormal(0.05, 0.3) or "lognormal:0.05,0.3"')


def _undrawable(given: ComputeTime) -> Iterator[Problem]:
    """Yield a problem for every value from which no duration can be drawn."""
    for name, value in vars(given).items():
        if isinstance(value, ComputeTime):
            yield from _undrawable(value)
        elif isinstance(value, int | float) and not (value >= 0 and math.isfinite(value)):
            yield Problem(f"{_ARGUMENT}.{name}", value, "must be a finite number of at least 0")
    if isinstance(given, Slow) and not given.factor > 0:
        yield Problem(f"{_ARGUMENT}.factor", given.factor, "must be above 0: how many times as long slow workers take")
    if isinstance(given, Pareto) and given.alpha < 0.1:
        yield Problem(f"{_ARGUMENT}.alpha", given.alpha, "must be at least 0.1: with less, some steps would never end")
    for name in ("begin", "end", "probability"):
        if getattr(given, name, 0) > 1:
            yield Problem(f"{_ARGUMENT}.{name}", getattr(given, name), "is a probability: at most 1")
    if isinstance(given, RecordedTimes):
        wrong = [t for own in given.times for t in own if not (t >= 0 and math.isfinite(t))]
        if not (given.times and all(given.times)):
            yield Problem(f"{_ARGUMENT}.times", given.times, "needs at least one duration per worker")
        elif wrong:
            yield Problem(f"{_ARGUMENT}.times", wrong[0], "must be finite numbers of at least 0")


Sampler = Callable[[int], float]


def sampler(compute_time: ComputeTime, seed: int, worker: int) -> Sampler:
    """Return a function from the step to one worker's duration."""
    apart = fold(seed, 7)  # independent of all other draws with this seed
    return lambda step: compute_time.seconds(apart, worker, step)
