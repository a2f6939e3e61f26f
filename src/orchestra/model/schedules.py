# SPDX-License-Identifier: Apache-2.0
"""Schedules: factors on the learning rate as functions of the epochs done, of which a warm-up is one.

Goyal et al. "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017. https://arxiv.org/abs/1706.02677

    k ← samples of a step of all workers / reference batch      linear scaling: k times the batch, k times the rate
    γ(e) = η (1 + (k − 1) e/E)   for e < E,   k η afterwards     gradual warm-up over E epochs
    γ(e) = η                     for e < E,   k η afterwards     constant warm-up
    γ(e) = k η                                                  none (E = 0)

η is the optimizer's own learning rate, the one that was found with the reference batch.

    schedule=Warmup(factor=8)                                           k = 8, reached after 5 epochs
    schedule=Warmup(reference=256, then=StepDecay(at=(30, 60, 80)))     k from batch and workers; as in the paper
    --schedule "warmup(epochs=2, reference=16, how=constant, then=polynomial(epochs=20, power=2))"

    warmup(epochs=5, factor=1, reference=None, start=1, how=gradual, then=constant)     k = factor · samples / reference
    stepdecay(at=(30, 60, 80), by=0.1)          polynomial(epochs=90, power=2)          constant

A schedule depends on the samples dealt to the workers, so batch and workers do not shift it, and a resumed run
continues at the same point. A sample counts when its mini-batch begins, even if the gradient is skipped, cancelled or
late. Servers use the mean over the workers, which send their progress with every push; a worker that has finished
counts with its last value. For workers in lockstep this equals the log, bit for bit.

Linear scaling assumes that all workers' gradients make one step (all-reduce, a synchronous server). If each is applied
by itself, as in local steps or by an asynchronous server, set `factor`.

Remark 1 of the paper, momentum correction (v ← v γ/γ_before whenever γ changes), is for momenta that contain the rate:
v ← m v + γ g. torch's SGD keeps it outside, v ← m v + g and x ← x − γ v, which is the corrected form already. Any
function of epochs is a schedule; those of this module can also be named on the command line.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from orchestra.core.strategy import option


class Curve(ABC):
    """A schedule with a name and options. Subclasses are frozen, keyword-only dataclasses."""

    @abstractmethod
    def __call__(self, epochs: float) -> float:
        """Return the factor on the learning rate after that many epochs."""

    def for_global_batch(self, samples: int) -> Curve:
        """Return the schedule for a run whose workers together use `samples` samples in a step."""
        return self


@dataclass(frozen=True, kw_only=True)
class Constant(Curve):
    """The optimizer's own learning rate throughout."""

    def __call__(self, epochs: float) -> float:
        """Return 1."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class StepDecay(Curve):
    """Smaller by a factor at each of a few epochs."""

    at: tuple[float, ...] = option((30, 60, 80), "the epochs at which the rate decreases")
    by: float = option(0.1, "the factor each time", least=0)

    def __call__(self, epochs: float) -> float:
        """Return `by` to the power of the number of epochs in `at` that are past."""
        return self.by ** sum(epochs >= e for e in self.at)


@dataclass(frozen=True, kw_only=True)
class Polynomial(Curve):
    """(1 − e/epochs)^power: zero at the end. LARS uses power 2, LAMB power 1."""

    epochs: float = option(90.0, "where it reaches zero: the length of the run", least=1e-9)
    power: float = option(2.0, "1 is a straight line", least=0)

    def __call__(self, epochs: float) -> float:
        """Return the polynomial; zero after its end."""
        return math.pow(max(0.0, 1 - epochs / self.epochs), self.power)


@dataclass(frozen=True, kw_only=True)
class Warmup(Curve):
    """From a small learning rate to k times the optimizer's; multiplied with another schedule."""

    epochs: float = option(5.0, "E: epochs of warm-up; 0 is none", least=0)
    factor: float = option(1.0, "k: factor on the learning rate after the warm-up", least=0)
    reference: int | None = option(None, "batch to which k is proportional: k = factor · batch · workers / it", least=1)
    start: float = option(1.0, "the factor at the beginning", least=0)
    how: Literal["gradual", "constant"] = option("gradual", "in between: a straight line, or `start` to its end")
    then: Callable[[float], float] = field(
        default_factory=Constant, metadata={"about": "another schedule, by epochs of the whole run"}
    )

    def __call__(self, epochs: float) -> float:
        """Return the factor of the warm-up times that of the other schedule."""
        if self.reference is not None:
            raise ValueError("the factor of a reference batch depends on the run: call for_global_batch(samples) first")
        k, past = self.factor, epochs / self.epochs if self.epochs else 1.0
        if past < 1:
            k = self.start if self.how == "constant" else self.start + (k - self.start) * past
        return k * self.then(epochs)

    def for_global_batch(self, samples: int) -> Warmup:
        """Return the schedule with the factor for steps of `samples` samples, relative to the reference batch."""
        k = self.factor if self.reference is None else self.factor * samples / self.reference
        return replace(self, factor=k, reference=None, then=for_global_batch(self.then, samples))


CURVES = (Constant, Polynomial, StepDecay, Warmup)


def for_global_batch(schedule: Callable[[float], float] | None, samples: int) -> Any:
    """Return any schedule as it is for a run with `samples` samples in a step of all workers."""
    return schedule.for_global_batch(samples) if isinstance(schedule, Curve) else schedule
