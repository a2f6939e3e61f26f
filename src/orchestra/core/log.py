# SPDX-License-Identifier: Apache-2.0
"""What a node reports, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(slots=True)  # not frozen: that would make it four times as slow, and there are millions
class Logged:
    """A strategy recorded a number under a name."""

    t: float
    node: int
    step: int
    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Skipped:
    """A gradient was not finite and was not used."""

    t: float
    node: int
    step: int
    in_a_row: int


class Log(Protocol):
    """Where a node's events are recorded."""

    def write(self, event: Any) -> None:
        """Record an event."""
        ...
