# SPDX-License-Identifier: Apache-2.0
"""The bytes that a run must send, computed from its size: a strategy's formula as a function, beside its docstring.

Reports and tests compare what was measured with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestra.core.vectors import ranges, ranges_of_layers

if TYPE_CHECKING:
    from orchestra.core.strategy import Layout, Strategy


@dataclass(frozen=True, kw_only=True)
class ExpectedTraffic:
    """Bytes sent by each worker and by each server; None where they depend on timing."""

    workers: list[int]
    servers: list[int] | None = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class RunSize:
    """The size of a run, on which its bytes depend besides the strategy."""

    workers: int
    steps: int  # of each worker
    layers: tuple[int, ...]  # numbers in each
    item: int = 4  # bytes of a number
    momenta: Mapping[str, str] = field(default_factory=dict)  # of the optimizer: the kind of each, by name
    of: Callable[[Strategy[Any], RunSize], ExpectedTraffic | None] = lambda strategy, run: None  # a part's bytes

    @property
    def numbers(self) -> int:
        """The number of elements of the model."""
        return sum(self.layers)

    @property
    def model(self) -> int:
        """The bytes of the model: S in the formulas."""
        return self.item * self.numbers

    def average(self, numbers: int | None = None, item: int | None = None) -> list[int]:
        """Return the bytes that each worker sends for one all-reduce: 2 (N−1)/N · S on average over the workers.

        A worker sends all but its own range to the owners of the ranges, and its own range to the others.
        """
        numbers, item = self.numbers if numbers is None else numbers, item or self.item
        own = [item * (part.stop - part.start) for part in ranges(numbers, self.workers)]
        return [item * numbers - mine + (self.workers - 1) * mine for mine in own]

    def ranges(self, layout: Layout) -> list[int]:
        """Return the bytes of each server's range."""
        if layout.placement == "layers":
            parts = ranges_of_layers([size for size in self.layers if size], layout.servers)
        else:
            parts = ranges(self.numbers, layout.servers) if layout.servers else []
        return [self.item * (part.stop - part.start) for part in parts]


TrafficOf = Callable[[Any, RunSize], ExpectedTraffic | None]
