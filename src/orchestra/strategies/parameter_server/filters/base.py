# SPDX-License-Identifier: Apache-2.0
"""The interface of a filter; and `Everything`, which passes all entries: S bytes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from orchestra.core.node import Node
from orchestra.strategies.parameter_server.consistency.base import ServerState

Sieved = tuple[Tensor, Tensor]
"""A vector as the receiver is to see it, and a mask of the entries to send."""


class Filter:
    """A rule that chooses the entries to send; the methods return None to send the vector unchanged."""

    def init(self, node: Node, s: ServerState) -> None:
        """Initialise the filter's part of the state."""

    def push(self, node: Node, s: ServerState, server: int, g: Tensor) -> Sieved | None:
        """Filter a worker's gradient on a server's range. Entries that do not pass count as `ABSENT`, a zero."""
        return None

    def answer(self, node: Node, s: ServerState, worker: int) -> Sieved | None:
        """Filter a server's x for a worker. Entries that do not pass stay as that worker has them."""
        return None


@dataclass(frozen=True, kw_only=True)
class Everything(Filter):
    """No filter."""
