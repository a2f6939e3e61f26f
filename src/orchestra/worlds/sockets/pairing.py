# SPDX-License-Identifier: Apache-2.0
"""What two connected nodes arrange before the run: memory for both if they share a machine, a door if they do not."""

from __future__ import annotations

import mmap
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestra.errors import ClusterError
from orchestra.worlds.sockets.addresses import EVERYWHERE, listen, plain
from orchestra.worlds.sockets.auth import Token
from orchestra.worlds.sockets.reconnect import Invitation, Reconnector
from orchestra.worlds.sockets.rendezvous import hear, say
from orchestra.worlds.sockets.shm_ring import RingWriter, enter, machine

Connections = Mapping[int, socket.socket]


@dataclass
class Pairing:
    """By what a node reaches the others beside its connections."""

    reunion: Reconnector | None = None  # how to find those of other machines again
    apart: frozenset[int] = frozenset()  # nodes of other machines
    outlets: dict[int, RingWriter] = field(default_factory=dict)  # memory in which nodes of this machine find messages
    inlets: dict[int, mmap.mmap] = field(default_factory=dict)  # and in which theirs are found
    pids: dict[int, int] = field(default_factory=dict)  # of the latter


def arrange(
    rank: int, connections: Connections, token: Token, *, longest: int, grace: float, patience: float
) -> Pairing:
    """Everybody tells everybody where it is, and what it offers; messages have at most `longest` bytes."""
    for sock in connections.values():
        sock.settimeout(patience)
    home = machine()
    machines = _tell(rank, connections, lambda node: {"machine": home})
    near = [node for node, said in machines.items() if said.get("machine") == home]
    apart = frozenset(connections) - frozenset(near)
    door = _open_door([connections[node] for node in apart]) if apart and grace > 0 else None
    outlets = {node: outlet for node in near if (outlet := RingWriter.make(longest)) is not None}
    try:
        return _agree(rank, connections, token, grace, apart, door, outlets)
    except BaseException:
        for outlet in outlets.values():
            outlet.close()
        if door is not None:
            door.close()
        raise


def _agree(
    rank: int, connections: Connections, token: Token, grace: float, apart: frozenset[int],
    door: socket.socket | None, outlets: dict[int, RingWriter],
) -> Pairing:  # fmt: skip
    """Offer those of this machine memory, the others a door."""
    near = frozenset(connections) - apart
    words = {node: secrets.token_hex(16) for node in apart}

    def offer(node: int) -> dict[str, Any]:
        if node in near:
            return {"ring": outlets[node].invitation() if node in outlets else {}}
        own = plain(connections[node].getsockname()[0])
        return {"door": None if door is None else {"host": own, "port": door.getsockname()[1], "word": words[node]}}

    offers = _tell(rank, connections, offer)
    inlets = {node: memory for node in near if (memory := enter(offers[node].get("ring", {}))) is not None}
    seen = _tell(rank, connections, lambda node: {"seen": node in inlets})
    for node in [node for node in outlets if not seen[node].get("seen")]:
        outlets.pop(node).close()
    reunion = None
    if door is not None:
        invitations = {node: found for node in apart if (found := _read(offers[node].get("door"))) is not None}
        reunion = Reconnector(rank, token, door, invitations, words, grace)
    pids = {node: int(offers[node]["ring"]["process"]) for node in inlets}
    return Pairing(reunion, apart, outlets, inlets, pids)


def _read(door: Any) -> Invitation | None:
    match door:
        case {"host": str(host), "port": int(port), "word": str(word)}:
            return Invitation((host, port), word)
    return None  # it does not want to be found again


def _tell(rank: int, connections: Connections, what: Callable[[int], dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Say something to each, then hear what each says: short enough to fit into what lies between them."""
    found: dict[int, dict[str, Any]] = {}
    node = rank
    try:
        for node, sock in connections.items():
            say(sock, {"rank": rank, **what(node)})
        for node, sock in connections.items():
            found[node] = hear(sock)
    except (OSError, ValueError) as error:
        raise ClusterError(f"node {rank} could not come to an arrangement with node {node}: {error}") from None
    return found


def _open_door(connections: list[socket.socket]) -> socket.socket:
    """Listen where the other machines reach this one."""
    addresses = {plain(sock.getsockname()[0]) for sock in connections}
    where = addresses.pop() if len(addresses) == 1 else EVERYWHERE
    try:
        return listen(where)
    except OSError as error:
        raise ClusterError(f"this machine cannot listen at {where or 'its addresses'} for others: {error}") from None
