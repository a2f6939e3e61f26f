# SPDX-License-Identifier: Apache-2.0
"""Latency and rate of the connections between the processes of a run, measured before it begins.

    in rounds of pairs, so that no process measures two connections at once
    latency    half of the shortest of several round trips of one byte
    rate       of a piece that takes much longer than the latency, in one direction and then in the other

Each process sends its results to process 0, which decides on an order and sends that to all.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from orchestra.errors import ClusterError
from orchestra.worlds.sockets.addresses import ends
from orchestra.worlds.sockets.auth import exactly
from orchestra.worlds.sockets.rendezvous import receive_json, send_json


class LinkSpeed(NamedTuple):
    """What the connection from one process to another can do."""

    latency: float  # seconds, one way
    rate: float  # bytes a second


_TIMES = 8  # round trips
_PIECE = 1 << 16  # bytes
_LARGEST = 1 << 22  # bytes
_LONG_ENOUGH = 0.02  # seconds
_PATIENCE = 60.0  # seconds
_SIZE = struct.Struct("<Q")


def measure(rank: int, connections: Mapping[int, socket.socket]) -> dict[int, LinkSpeed]:
    """Measure the connections to all other processes, all of which must do this at the same time."""
    found = {}
    for pairs in rounds(len(connections) + 1):
        for a, b in pairs:
            if rank in (a, b):
                other = b if rank == a else a
                with _named(rank, other, connections[other]):
                    found[other] = _pair(connections[other], first=rank == a)
    return found


def agree(
    rank: int,
    connections: Mapping[int, socket.socket],
    found: Mapping[int, LinkSpeed],
    decide: Callable[[list[dict[int, LinkSpeed]]], Any],
) -> Any:
    """Send the results to process 0 and return what it decides."""
    if rank:
        with _named(rank, 0, connections[0]):
            send_json(connections[0], {"rank": rank, **_packed(found)})
        return announce(rank, connections)
    everything = [dict(found)]
    for node in range(1, len(connections) + 1):
        with _named(rank, node, connections[node]):
            everything.append(_unpacked(receive_json(connections[node])))
    return announce(rank, connections, decide(everything))


def _packed(found: Mapping[int, LinkSpeed]) -> dict[str, list[float]]:
    links = found.values()
    return {"to": [*found], "latency": [link.latency for link in links], "rate": [link.rate for link in links]}


def _unpacked(said: Mapping[str, Any]) -> dict[int, LinkSpeed]:
    rows = zip(said["to"], said["latency"], said["rate"], strict=True)
    return {int(node): LinkSpeed(float(latency), float(rate)) for node, latency, rate in rows}


def announce(rank: int, connections: Mapping[int, socket.socket], decided: Any = None) -> Any:
    """Return the decision of process 0, which it sends to all: their own measurements may differ."""
    if rank:
        with _named(rank, 0, connections[0]):
            connections[0].settimeout(_PATIENCE)
            return receive_json(connections[0])["decided"]
    for node, sock in connections.items():
        with _named(rank, node, sock):
            send_json(sock, {"rank": 0, "decided": decided})
    return decided


@contextmanager
def _named(rank: int, other: int, sock: socket.socket) -> Iterator[None]:
    """Turn errors into a ClusterError with the names and addresses of both ends."""
    where = "a closed connection"
    try:
        where = ends(sock)
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ClusterError(
            f"process {rank} lost process {other} ({where}) while it measured the connection: {error}. See that "
            "process's own message, and whether the network between them is reliable; --order given measures nothing."
        ) from None


def rounds(size: int) -> Iterator[Sequence[tuple[int, int]]]:
    """Yield rounds of pairs: every pair once, and every process at most once a round (a round-robin tournament).

    >>> list(rounds(4))
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    circle = [*range(size), *([-1] if size % 2 else [])]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if -1 not in pair]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def _pair(sock: socket.socket, *, first: bool) -> LinkSpeed:
    sock.settimeout(_PATIENCE)
    latency = _round_trip(sock, first=first)
    if first:
        rate = _send(sock, latency)
        _receive(sock)
    else:
        _receive(sock)
        rate = _send(sock, latency)
    return LinkSpeed(latency, rate)


def _round_trip(sock: socket.socket, *, first: bool) -> float:
    """Measure the latency, first from one end and then from the other."""
    took = []
    for turn in (first, not first):
        for _ in range(_TIMES):
            if turn:
                began = time.perf_counter()
                sock.sendall(b".")
                exactly(sock, 1)
                took.append(time.perf_counter() - began)
            else:
                exactly(sock, 1)
                sock.sendall(b".")
    return min(took) / 2


def _send(sock: socket.socket, latency: float) -> float:
    """Measure the rate: send longer and longer pieces until one takes long enough."""
    nbytes = _PIECE
    while True:
        piece = bytes(nbytes)
        began = time.perf_counter()
        sock.sendall(_SIZE.pack(nbytes) + piece)
        exactly(sock, 1)  # it has arrived
        took = time.perf_counter() - began - 2 * latency
        if took > max(_LONG_ENOUGH, 4 * latency) or nbytes >= _LARGEST:
            sock.sendall(_SIZE.pack(0))
            return nbytes / max(took, 1e-6)
        nbytes *= 4


def _receive(sock: socket.socket) -> None:
    while nbytes := _SIZE.unpack(exactly(sock, _SIZE.size))[0]:
        if nbytes > _LARGEST:
            raise ConnectionError(f"a piece of {nbytes:,} bytes")
        room = memoryview(bytearray(nbytes))
        while room:
            count = sock.recv_into(room)
            if not count:
                raise ConnectionError("the other end closed the connection")
            room = room[count:]
        sock.sendall(b".")
