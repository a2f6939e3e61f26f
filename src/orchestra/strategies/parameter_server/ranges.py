# SPDX-License-Identifier: Apache-2.0
"""Which server owns what: what strategies whose model lies on servers have in common."""

from __future__ import annotations

from collections.abc import Iterator

from orchestra.core.node import Node
from orchestra.errors import Problem


def owners(node: Node) -> list[tuple[int, slice]]:
    """Every server with the range of a worker's x that it owns."""
    return list(zip(node.comm.servers.members, node.placement, strict=True))


def too_many(servers: int, workers: int) -> Iterator[Problem]:
    """So many servers would mostly be idle: usually a slip."""
    if servers > 4 * workers:
        yield Problem("strategy.servers", servers, f"is too many for {workers} workers: at most {4 * workers}")
