# SPDX-License-Identifier: Apache-2.0
"""What the workers of a loop compare while they train: their first gradients, and their learning rates.

    each worker, before a step    a note to worker 0: the checksum of its first gradient, now and then its rates
    worker 0, on each note        two first gradients are equal: it warns that the workers read the same samples
                                  the rates of one step differ: it ends the run, if the strategy goes in lockstep

No worker waits for another because of it, and the notes are no part of the strategy's traffic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from orchestra.core.vectors import checksum
from orchestra.worlds.sockets.control_messages import ENTRIES

_EVERY = 10  # steps between two comparisons of the learning rates


class WorkerReport:
    """What one worker tells worker 0."""

    def __init__(self, say: Callable[[dict[str, Any]], None]) -> None:
        self._say, self._first = say, True
        self._step, self._rates = 0, list[float]()  # in force in the last step
        self._clip = math.inf  # the largest norm of the gradient in it

    def before_step(self, step: int, gradients: Sequence[Tensor], rates: list[float], clip: float) -> None:
        """Tell of the gradient, if it is the first, and of the learning rates in this step, if they must be equal.

        Without gradients there is nothing to tell: the samples are known to be this worker's own.
        """
        if self._first and (found := _checksum(gradients)) is not None:
            self._first = False
            self._say({"kind": "gradient", "checksum": found})
        self._rates, self._clip = rates[:ENTRIES], clip
        if self._rates and step % _EVERY == 0:
            self._tell_rates(step)

    def at_end(self, step: int) -> None:
        """Tell of the learning rates of the last step."""
        if self._rates and step != self._step:
            self._tell_rates(step)

    def _tell_rates(self, step: int) -> None:
        self._step = step
        self._say({"kind": "rates", "step": step, "by_group": self._rates, "clip": self._clip})


class WorkerComparisons:
    """What worker 0 has heard."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._gradients: dict[int, int] = {}  # the worker that told of each checksum first
        self._same: tuple[int, int] | None = None
        # By step and worker, until all have told of the step: the largest norm of the gradient, and the rates.
        self._rates: dict[int, dict[int, tuple[float, list[float]]]] = {}

    def gradient(self, worker: int, checksum: int) -> str | None:
        """Give a warning, once, if another worker has told of the same gradient."""
        other = self._gradients.setdefault(checksum, worker)
        if other == worker or self._same is not None:
            return None
        self._same = one, two = min(other, worker), max(other, worker)
        return (
            f"workers {one} and {two} computed the same first gradient, bit for bit: they read the same samples. "
            "Iterate over the loader that orchestra.prepare returns, which gives each worker its share; or, without a "
            "loader, cut the data by orchestra.rank() and orchestra.world_size() first."
        )

    def rates(self, worker: int, step: int, values: list[float], clip: float = math.inf) -> str | None:
        """Give an error if another worker had other learning rates, or another clip, in the same step."""
        told = self._rates.setdefault(step, {})
        told[worker] = clip, values
        other = next(iter(told))  # all that have told of this step so far agree
        theirs, rates = told[other]
        if not math.isclose(theirs, clip, rel_tol=1e-6):
            return (
                f"optimizer.clip_grad_norm_ bounds the gradient by {theirs!r} on worker {other} and by {clip!r} on "
                f"worker {worker} in step {step:,} (inf: it was not called): workers in lockstep must have the same. "
                "Call it with the same value on every worker."
            )
        for group, (a, b) in enumerate(zip(rates, values, strict=False)):
            if not math.isclose(a, b, rel_tol=1e-6) and not (math.isnan(a) and math.isnan(b)):
                which = f" of parameter group {group}" if len(values) > 1 else ""
                return (
                    f"the learning rate{which} is {a!r} on worker {other} and {b!r} on worker {worker} in step "
                    f"{step:,}: workers in lockstep must have the same. Let a scheduler follow what all workers "
                    "have in common: optimizer.orchestra.mean(loss) in place of a worker's own validation loss."
                )
        if len(told) == self._workers:
            del self._rates[step]
        return None


@torch.no_grad()
def _checksum(gradients: Sequence[Tensor]) -> int | None:
    """Of all bits; None where it would tell nothing: of gradients that are all zero, or sparse."""
    found, anything = 0, False
    for g in gradients:
        if g.layout is not torch.strided:
            return None
        anything = anything or bool(g.any())
        found = checksum(g, found)
    return found if anything else None
