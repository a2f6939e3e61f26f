# SPDX-License-Identifier: Apache-2.0
"""Counts, sums and histograms of the events that a long run dropped to save room (`event_thinning`)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from orchestra.runs.event_thinning import seconds_of
from orchestra.runs.events import Event, Thinned

_LONGEST = 1000  # bars of durations: 2 to the power of ±60 seconds


@dataclass
class DroppedFigures:
    """Count, sum and histogram of one name that strategies logged."""

    count: int = 0
    sum: float = 0.0
    values: Counter[int] = field(default_factory=Counter)


@dataclass
class Dropped:
    """Summary of all events that a run dropped."""

    kinds: Counter[str] = field(default_factory=Counter)
    said: dict[str, DroppedFigures] = field(default_factory=lambda: defaultdict(DroppedFigures))
    times: dict[int, dict[float, int]] = field(default_factory=dict)  # by node: how many steps took so many seconds

    def count(self, name: str) -> int:
        """Return how often a name was logged."""
        return self.said[name].count if name in self.said else 0

    def sum(self, name: str) -> float:
        """Return the sum of all values logged under a name."""
        return self.said[name].sum if name in self.said else 0.0

    def values(self, name: str) -> Counter[int]:
        """Return how often each whole number was logged under a name."""
        return self.said[name].values if name in self.said else Counter()


def of(events: Iterable[Event]) -> Dropped:
    """Add up the dropped events of all nodes."""
    found = Dropped()
    for e in events:
        if isinstance(e, Thinned):
            found.kinds.update({kind: int(count) for kind, count in e.dropped.items()})
            for name, figures in e.said.items():
                mine = found.said[name]
                mine.count += int(figures["count"])
                mine.sum += figures["sum"]
                mine.values.update({int(value): int(count) for value, count in figures["values"].items()})
            times = found.times.setdefault(e.node, {})
            for bar, count in e.times.items():
                seconds = seconds_of(int(bar))
                times[seconds] = times.get(seconds, 0) + int(count)
    return found


def sound(event: Thinned) -> bool:
    """Return whether an event holds valid numbers; may raise the errors in `reading.NONSENSE`."""
    counts = [*event.dropped.values(), *event.times.values()]
    for figures in event.said.values():
        counts += [figures["count"], *figures["values"].values()]
        if not abs(figures["sum"]) < 1e60 or not all(abs(int(value)) < 1e18 for value in figures["values"]):
            return False
    return all(type(n) is int and 0 <= n < 1e18 for n in counts) and all(abs(int(b)) < _LONGEST for b in event.times)
