# SPDX-License-Identifier: Apache-2.0
"""The workers' samples and shares of time up to a moment of a run, such as that at which the target was reached."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from orchestra.runs.events import Event, Stepped


@dataclass(frozen=True)
class Until:
    """The samples of all workers up to a moment, and how they spent their time: four shares that add up to 1."""

    seconds: float
    samples: float
    compute: float
    communicate: float
    wait: float
    idle: float  # after the last step of a worker

    @property
    def rate(self) -> float:
        """Samples per second of all workers together."""
        return self.samples / self.seconds


def until(events: Iterable[Event], workers: int, seconds: float) -> Until | None:
    """Add up what the first nodes, the workers, did up to a moment; return None if there are no samples or no time.

    A step counts in proportion to the part of it that lies before the moment.
    """
    steps = defaultdict[int, list[Stepped]](list)
    for e in events:
        if isinstance(e, Stepped) and e.node < workers:
            steps[e.node].append(e)
    if not steps or not seconds > 0:
        return None
    spent = [_at(sorted(own, key=attrgetter("t")), seconds) for own in steps.values()]
    samples, compute, communicate, wait, idle = (sum(parts) for parts in zip(*spent, strict=True))
    whole = compute + communicate + wait + idle
    if not samples > 0 or not whole > 0:
        return None
    return Until(seconds, samples, compute / whole, communicate / whole, wait / whole, idle / whole)


_TOTALS = attrgetter("samples", "compute", "communicate", "wait")


def _at(steps: list[Stepped], seconds: float) -> tuple[float, ...]:
    """Return one worker's samples and its seconds of computing, sending, waiting and idling, all at one moment."""
    i = bisect_right(steps, seconds, key=attrgetter("t"))
    before, t = (_TOTALS(steps[i - 1]), steps[i - 1].t) if i else ((0.0,) * 4, 0.0)
    if i == len(steps):
        return *before, seconds - t
    part = (seconds - t) / (steps[i].t - t)
    return *(a + part * (b - a) for a, b in zip(before, _TOTALS(steps[i]), strict=True)), 0.0
