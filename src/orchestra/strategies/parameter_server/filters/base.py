# SPDX-License-Identifier: Apache-2.0
"""What a filter is; and none, which lets everything pass: S bytes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from orchestra.core.node import Node
from orchestra.strategies.parameter_server.consistency.base import ServerState

Sieved = tuple[Tensor, Tensor]
"""A vector as its receiver is to have it, and which of its entries have to be sent for that."""


class Filter:
    """What of a vector is worth sending. None: all of it, as it is."""

    def init(self, node: Node, s: ServerState) -> None:
        """Make room for what has to be remembered."""

    def push(self, node: Node, s: ServerState, server: int, g: Tensor) -> Sieved | None:
        """On a worker: of its gradient on a server's range. What does not pass counts as `ABSENT`, a zero."""
        return None

    def answer(self, node: Node, s: ServerState, worker: int) -> Sieved | None:
        """On a server: of x, to a worker. What does not pass stays what that worker has."""
        return None


@dataclass(frozen=True, kw_only=True)
class Everything(Filter):
    """No filter."""
