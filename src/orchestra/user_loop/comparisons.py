# SPDX-License-Identifier: Apache-2.0
"""Comparisons between the workers of a loop: their first gradients, and their learning rates.

    each worker, before a step    to worker 0: the checksum of its first gradient, and every 10 steps its rates
    worker 0, on each message     two first gradients are equal: it warns that the workers read the same samples
                                  the rates of one step differ: it ends the run, if the workers are in lockstep

No worker waits for these messages, and they do not count as the strategy's traffic.
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
    """The messages of one worker to worker 0."""

    def __init__(self, say: Callable[[dict[str, Any]], None]) -> None:
        self._say, self._first = say, True
        self._step, self._rates = 0, list[float]()  # in force in the last step
        self._clip = math.inf  # the largest norm of the gradient in it

    def before_step(self, step: int, gradients: Sequence[Tensor], rates: list[float], clip: float) -> None:
        """Send the checksum of the first gradient, and the learning rates of this step if they must be equal.

        `gradients` is empty if the samples are known to differ between workers.
        """
        if self._first and (found := _checksum(gradients)) is not None:
            self._first = False
            self._say({"kind": "gradient", "checksum": found})
        self._rates, self._clip = rates[:ENTRIES], clip
        if self._rates and step % _EVERY == 0:
            self._tell_rates(step)

    def at_end(self, step: int) -> None:
        """Send the learning rates of the last step."""
        if self._rates and step != self._step:
            self._tell_rates(step)

    def _tell_rates(self, step: int) -> None:
        self._step = step
        self._say({"kind": "rates", "step": step, "by_group": self._rates, "clip": self._clip})


class WorkerComparisons:
    """The comparisons at worker 0."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._gradients: dict[int, int] = {}  # the first worker that sent each checksum
        self._same: tuple[int, int] | None = None
        # By step and worker, until all have sent theirs: the largest norm of the gradient, and the rates.
        self._rates: dict[int, dict[int, tuple[float, list[float]]]] = {}

    def gradient(self, worker: int, checksum: int) -> str | None:
        """Return a warning, once, if another worker has sent the same checksum."""
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
        """Return an error if another worker had other learning rates, or another clip, in the same step."""
        found = self._rates.setdefault(step, {})
        found[worker] = clip, values
        other = next(iter(found))  # all that were received for this step so far agree
        theirs, rates = found[other]
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
        if len(found) == self._workers:
            del self._rates[step]
        return None


@torch.no_grad()
def _checksum(gradients: Sequence[Tensor]) -> int | None:
    """Return a checksum of all bits; None for gradients that are all zero, or sparse."""
    found, anything = 0, False
    for g in gradients:
        if g.layout is not torch.strided:
            return None
        anything = anything or bool(g.any())
        found = checksum(g, found)
    return found if anything else None
