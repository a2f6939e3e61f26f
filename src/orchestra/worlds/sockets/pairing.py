# SPDX-License-Identifier: Apache-2.0
"""What each pair of connected nodes sets up before the run.

Two nodes of one machine share memory. Two nodes of different machines tell each other an address and a secret, by
which they can reconnect.
"""

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
from orchestra.worlds.sockets.reconnect import PeerAddress, Reconnector
from orchestra.worlds.sockets.rendezvous import receive_json, send_json
from orchestra.worlds.sockets.shm_ring import RingWriter, enter, machine

Connections = Mapping[int, socket.socket]


@dataclass
class Pairing:
    """How a node reaches the others, beside its connections."""

    reconnector: Reconnector | None = None  # for nodes of other machines
    remote: frozenset[int] = frozenset()  # nodes of other machines
    rings_out: dict[int, RingWriter] = field(default_factory=dict)  # memory from which nodes of this machine read
    rings_in: dict[int, mmap.mmap] = field(default_factory=dict)  # memory into which nodes of this machine write
    pids: dict[int, int] = field(default_factory=dict)  # of the latter nodes' processes


def arrange(
    rank: int, connections: Connections, token: Token, *, longest: int, grace: float, patience: float
) -> Pairing:
    """Set up memory with every node of this machine and addresses with the others; bodies have `longest` bytes."""
    for sock in connections.values():
        sock.settimeout(patience)
    here = machine()
    machines = _exchange(rank, connections, lambda node: {"machine": here})
    near = [node for node, answer in machines.items() if answer.get("machine") == here]
    remote = frozenset(connections) - frozenset(near)
    listening = _listen([connections[node] for node in remote]) if remote and grace > 0 else None
    rings_out = {node: ring for node in near if (ring := RingWriter.make(longest)) is not None}
    try:
        return _agree(rank, connections, token, grace, remote, listening, rings_out)
    except BaseException:
        for ring in rings_out.values():
            ring.close()
        if listening is not None:
            listening.close()
        raise


def _agree(
    rank: int, connections: Connections, token: Token, grace: float, remote: frozenset[int],
    listening: socket.socket | None, rings_out: dict[int, RingWriter],
) -> Pairing:  # fmt: skip
    """Offer memory to the nodes of this machine, an address to the others."""
    near = frozenset(connections) - remote
    pair_secrets = {node: secrets.token_hex(16) for node in remote}

    def offer(node: int) -> dict[str, Any]:
        if node in near:
            return {"ring": rings_out[node].invitation() if node in rings_out else {}}
        if listening is None:
            return {"address": None}
        host, port = plain(connections[node].getsockname()[0]), listening.getsockname()[1]
        return {"address": {"host": host, "port": port, "secret": pair_secrets[node]}}

    offers = _exchange(rank, connections, offer)
    rings_in = {node: memory for node in near if (memory := enter(offers[node].get("ring", {}))) is not None}
    mapped = _exchange(rank, connections, lambda node: {"mapped": node in rings_in})
    for node in [node for node in rings_out if not mapped[node].get("mapped")]:
        rings_out.pop(node).close()
    reconnector = None
    if listening is not None:
        found = {node: address for node in remote if (address := _read(offers[node].get("address"))) is not None}
        reconnector = Reconnector(rank, token, listening, found, pair_secrets, grace)
    pids = {node: int(offers[node]["ring"]["process"]) for node in rings_in}
    return Pairing(reconnector, remote, rings_out, rings_in, pids)


def _read(address: Any) -> PeerAddress | None:
    match address:
        case {"host": str(host), "port": int(port), "secret": str(secret)}:
            return PeerAddress((host, port), secret)
    return None  # the other node does not reconnect


def _exchange(rank: int, connections: Connections, what: Callable[[int], dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Send something to each node, then receive what each sends: both fit into the kernel's buffers."""
    found: dict[int, dict[str, Any]] = {}
    node = rank
    try:
        for node, sock in connections.items():
            send_json(sock, {"rank": rank, **what(node)})
        for node, sock in connections.items():
            found[node] = receive_json(sock)
    except (OSError, ValueError) as error:
        raise ClusterError(f"node {rank} could not set up its connection to node {node}: {error}") from None
    return found


def _listen(connections: list[socket.socket]) -> socket.socket:
    """Listen at the address by which the other machines reach this one."""
    addresses = {plain(sock.getsockname()[0]) for sock in connections}
    where = addresses.pop() if len(addresses) == 1 else EVERYWHERE
    try:
        return listen(where)
    except OSError as error:
        raise ClusterError(f"this machine cannot listen at {where or 'its addresses'} for others: {error}") from None
