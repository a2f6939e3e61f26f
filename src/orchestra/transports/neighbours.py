# SPDX-License-Identifier: Apache-2.0
"""What two connected nodes arrange before the run: memory for both if they share a machine, a door if they do not."""

from __future__ import annotations

import mmap
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestra.errors import ClusterError
from orchestra.transports.meeting import hear, say
from orchestra.transports.reunion import Reunion
from orchestra.transports.ring import Outlet, enter, machine
from orchestra.transports.token import Token

Connections = Mapping[int, socket.socket]


@dataclass
class Arrangement:
    """By what a node reaches the others beside its connections."""

    reunion: Reunion | None = None  # how to find those of other machines again
    apart: frozenset[int] = frozenset()  # nodes of other machines
    outlets: dict[int, Outlet] = field(default_factory=dict)  # memory in which nodes of this machine find messages
    inlets: dict[int, mmap.mmap] = field(default_factory=dict)  # and in which theirs are found


def arrange(rank: int, connections: Connections, token: Token, *, longest: int, grace: float) -> Arrangement:
    """Everybody tells everybody where it is, and what it offers; messages have at most `longest` bytes."""
    home = machine()
    machines = _tell(rank, connections, lambda node: {"machine": home})
    near = [node for node, said in machines.items() if said.get("machine") == home]
    apart = frozenset(connections) - frozenset(near)
    outlets = {node: Outlet.make(longest) for node in near}
    door = _open_door([connections[node] for node in apart]) if apart and grace > 0 else None

    def offer(node: int) -> dict[str, Any]:
        if node in outlets:
            return {"ring": outlets[node].invitation()}
        own = connections[node].getsockname()[0]
        return {"door": None if door is None else [own, door.getsockname()[1]]}

    offers = _tell(rank, connections, offer)
    inlets = {node: memory for node in near if (memory := enter(offers[node].get("ring", {}))) is not None}
    seen = _tell(rank, connections, lambda node: {"seen": node in inlets})
    for node in [node for node in near if not seen[node].get("seen")]:
        outlets.pop(node).close()
    reunion = None
    if door is not None:
        doors = {node: (str(offers[node]["door"][0]), int(offers[node]["door"][1])) for node in apart}
        reunion = Reunion(rank, token, door, doors, grace)
    return Arrangement(reunion, apart, outlets, inlets)


def _tell(rank: int, connections: Connections, what: Callable[[int], dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Say something to each, then hear what each says: short enough to fit into what lies between them."""
    try:
        for node, sock in connections.items():
            say(sock, {"rank": rank, **what(node)})
        return {node: hear(sock) for node, sock in connections.items()}
    except (OSError, ValueError) as error:
        raise ClusterError(f"node {rank} could not come to an arrangement with the others: {error}") from None


def _open_door(connections: list[socket.socket]) -> socket.socket:
    """Listen where the other machines reach this one."""
    addresses = {sock.getsockname()[0] for sock in connections}
    family = connections[0].family
    everywhere = "::" if family == socket.AF_INET6 else "0.0.0.0"
    return socket.create_server((addresses.pop() if len(addresses) == 1 else everywhere, 0), family=family)
