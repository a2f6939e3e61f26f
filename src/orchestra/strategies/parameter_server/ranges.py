# SPDX-License-Identifier: Apache-2.0
"""The ranges of servers, for all strategies whose model is on servers."""

from __future__ import annotations

from collections.abc import Iterator

from orchestra.core.node import Node
from orchestra.errors import Problem


def owners(node: Node) -> list[tuple[int, slice]]:
    """Return every server with the range of a worker's x that it owns."""
    return list(zip(node.comm.servers.members, node.placement, strict=True))


def too_many(servers: int, workers: int) -> Iterator[Problem]:
    """Yield a problem if most servers would be idle, which is usually a mistake."""
    if servers > 4 * workers:
        yield Problem("strategy.servers", servers, f"is too many for {workers} workers: at most {4 * workers}")
