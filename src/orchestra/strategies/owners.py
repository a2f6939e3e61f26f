# SPDX-License-Identifier: Apache-2.0
"""Which server owns what: what strategies whose model lies on servers have in common."""

from __future__ import annotations

from collections.abc import Iterator

from orchestra.errors import Problem
from orchestra.node import Node
from orchestra.vectors import ranges


def owners(node: Node) -> list[tuple[int, slice]]:
    """Every server with the range of a worker's x that it owns."""
    servers = node.comm.servers.members
    return list(zip(servers, ranges(node.x.numel(), len(servers)), strict=True))


def too_many(servers: int, workers: int) -> Iterator[Problem]:
    """So many servers would mostly be idle: usually a slip."""
    if servers > 4 * workers:
        yield Problem("strategy.servers", servers, f"is too many for {workers} workers: at most {4 * workers}")
