# SPDX-License-Identifier: Apache-2.0
"""The events that core writes, and the interface of the log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(slots=True)  # not frozen: that would make it four times as slow, and there are millions
class Logged:
    """A number that a strategy logged under a name."""

    t: float
    node: int
    step: int
    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Skipped:
    """A gradient that was not finite and therefore not used."""

    t: float
    node: int
    step: int
    in_a_row: int


class Log(Protocol):
    """The log of a node's events."""

    def write(self, event: Any) -> None:
        """Record an event."""
        ...
