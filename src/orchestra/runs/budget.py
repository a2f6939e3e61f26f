# SPDX-License-Identifier: Apache-2.0
"""How long to train. Budgets are combined with `|`: `Epochs(3) | Seconds(60)` ends with whichever comes first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from orchestra.errors import Problem


@dataclass(frozen=True)
class _Part:
    def __or__(self, other: _Part | FirstOf) -> FirstOf:
        return FirstOf((self, *parts(other)))


@dataclass(frozen=True)
class Steps(_Part):
    """A number of steps of each worker."""

    count: int


@dataclass(frozen=True)
class Epochs(_Part):
    """A number of passes over the data, by all workers together."""

    count: float


@dataclass(frozen=True)
class Samples(_Part):
    """A number of samples, of all workers together."""

    count: int


@dataclass(frozen=True)
class Seconds(_Part):
    """Seconds of training, by the run's own clock."""

    count: float


@dataclass(frozen=True)
class Target(_Part):
    """A score to reach: `Target("accuracy", 0.9)`. For losses and errors, lower is better."""

    metric: str
    value: float

    def reached(self, metrics: dict[str, float]) -> bool:
        """Return whether these metrics reach the target."""
        got = metrics.get(self.metric)
        return got is not None and (got <= self.value if lower_is_better(self.metric) else got >= self.value)


@dataclass(frozen=True)
class FirstOf:
    """Several budgets, of which the first to run out ends the run."""

    budgets: tuple[_Part, ...]

    def __or__(self, other: _Part | FirstOf) -> FirstOf:
        return FirstOf((*self.budgets, *parts(other)))


Budget = Steps | Epochs | Samples | Seconds | Target | FirstOf

_MOST = 1e15  # steps, epochs, samples or seconds, in texts that may be damaged


def parts(budget: object) -> tuple[_Part, ...]:
    """Return the single budgets that a budget consists of."""
    if isinstance(budget, FirstOf):
        return budget.budgets
    return (budget,) if isinstance(budget, _Part) else ()


def words(texts: Iterable[str]) -> str:
    """Return a budget in words, from the texts that a run keeps of it; texts of another kind stay as they are.

    >>> words(["epochs=4.0", "seconds=1.5"]), words(["steps=1", "target=accuracy:0.9"]), words(["epochs=x"])
    ('4 epochs or 1.5 seconds', '1 step or accuracy=0.9', 'epochs=x')
    """
    return " or ".join(map(_words, texts))


def _words(text: str) -> str:
    kind, _, value = text.partition("=")
    if kind == "target":
        return value.replace(":", "=")
    try:
        count = f"{float(value):.12g}"
    except ValueError:
        return text
    return f"{count} {kind.removesuffix('s') if count == '1' else kind}"


def read(texts: Iterable[str]) -> Iterator[_Part]:
    """Yield the parts of a budget from the texts that a run keeps of it; texts that make no sense are left out.

    >>> [*read(["epochs=4.0", "steps=9", "target=accuracy:0.9", "epochs=x", "seconds=nan"])]
    [Epochs(count=4.0), Steps(count=9), Target(metric='accuracy', value=0.9)]
    """
    for text in texts:
        kind, _, value = text.partition("=")
        metric, _, number = value.rpartition(":") if kind == "target" else ("", "", value)
        try:
            count = float(number)
        except ValueError:
            continue
        if kind == "target":
            yield Target(metric, count)
        elif 0 < count < _MOST:
            match kind:
                case "steps":
                    yield Steps(int(count))
                case "epochs":
                    yield Epochs(count)
                case "samples":
                    yield Samples(int(count))
                case "seconds":
                    yield Seconds(count)


def problems_of(budget: object) -> Iterator[Problem]:
    """Yield what is wrong with a budget."""
    pieces = parts(budget)
    if not pieces:
        yield Problem("budget", budget, "must be Steps, Epochs, Samples, Seconds or Target, joined with |")
    for piece in pieces:
        count = getattr(piece, "count", 1)
        if not isinstance(count, int | float) or isinstance(count, bool) or not math.isfinite(count) or count <= 0:
            yield Problem(f"budget.{type(piece).__name__.lower()}", count, "must be a number above zero")
        elif isinstance(piece, Steps | Samples) and not isinstance(count, int):
            yield Problem(f"budget.{type(piece).__name__.lower()}", count, "must be a whole number")
    if pieces and all(isinstance(piece, Target) for piece in pieces):
        yield Problem("budget", budget, "may never be reached: add an end, such as | Epochs(100)")


def last_step(budget: Budget, steps_per_epoch: int | None, samples_per_step: int) -> int | None:
    """Return the step of each worker at which the budget ends for certain; None if a clock, score or stream decides."""
    ends = []
    for part in parts(budget):
        match part:
            case Steps(count):
                ends.append(count)
            case Epochs(count) if steps_per_epoch is not None:
                ends.append(math.ceil(count * steps_per_epoch - 1e-9))
            case Samples(count):
                ends.append(math.ceil(count / samples_per_step))
    return min(ends) if ends else None


def lower_is_better(metric: str) -> bool:
    """Return whether lower values of a metric are better, judged by its name.

    >>> lower_is_better("mae"), lower_is_better("accuracy")
    (True, False)
    """
    return any(word in metric.lower() for word in ("loss", "error", "mae", "mse", "rmse", "nats", "perplexity"))


def last_epoch(budget: Budget) -> float | None:
    """Return the epoch after which a run ends, if the budget has one."""
    return min((part.count for part in parts(budget) if isinstance(part, Epochs)), default=None)
