# SPDX-License-Identifier: Apache-2.0
"""What the connections between the processes of a run can do, measured before it begins.

    in rounds of pairs, so that nobody is asked twice at once
    latency    half of the shortest of some ways there and back, of one byte
    rate       of a piece that takes long enough to be told from the latency, one way and then the other

Each process tells process 0 what it found, which tells everybody what it makes of it.
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
from orchestra.worlds.sockets.rendezvous import hear, say


class LinkSpeed(NamedTuple):
    """What the connection from one process to another can do."""

    latency: float  # seconds, one way
    rate: float  # bytes a second


_TIMES = 8  # there and back
_PIECE = 1 << 16  # bytes
_LARGEST = 1 << 22  # bytes
_LONG_ENOUGH = 0.02  # seconds
_PATIENCE = 60.0  # seconds
_SIZE = struct.Struct("<Q")


def measure(rank: int, connections: Mapping[int, socket.socket]) -> dict[int, LinkSpeed]:
    """From this process to each of the others; all of them must do this at the same time."""
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
    """Tell process 0 what was found, and hear what it decides."""
    if rank:
        with _named(rank, 0, connections[0]):
            say(connections[0], {"rank": rank, **_packed(found)})
        return announce(rank, connections)
    everything = [dict(found)]
    for node in range(1, len(connections) + 1):
        with _named(rank, node, connections[node]):
            everything.append(_unpacked(hear(connections[node])))
    return announce(rank, connections, decide(everything))


def _packed(found: Mapping[int, LinkSpeed]) -> dict[str, list[float]]:
    links = found.values()
    return {"to": [*found], "latency": [link.latency for link in links], "rate": [link.rate for link in links]}


def _unpacked(said: Mapping[str, Any]) -> dict[int, LinkSpeed]:
    rows = zip(said["to"], said["latency"], said["rate"], strict=True)
    return {int(node): LinkSpeed(float(latency), float(rate)) for node, latency, rate in rows}


def announce(rank: int, connections: Mapping[int, socket.socket], decided: Any = None) -> Any:
    """What process 0 decides, so that nobody goes by what he takes to be so himself."""
    if rank:
        with _named(rank, 0, connections[0]):
            connections[0].settimeout(_PATIENCE)
            return hear(connections[0])["decided"]
    for node, sock in connections.items():
        with _named(rank, node, sock):
            say(sock, {"rank": 0, "decided": decided})
    return decided


@contextmanager
def _named(rank: int, other: int, sock: socket.socket) -> Iterator[None]:
    """Errors with the names and addresses of both ends, which a connection that is gone does not know any more."""
    where = "a connection that is gone"
    try:
        where = ends(sock)
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ClusterError(
            f"process {rank} lost process {other} ({where}) while connections were measured: {error}. See what it "
            "said, and whether the network between them is reliable; --order given measures nothing."
        ) from None


def rounds(size: int) -> Iterator[Sequence[tuple[int, int]]]:
    """Everybody with everybody, once each, at most one at a time: the circle of a tournament.

    >>> list(rounds(4))
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    seats = [*range(size), *([-1] if size % 2 else [])]
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if -1 not in pair]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def _pair(sock: socket.socket, *, first: bool) -> LinkSpeed:
    sock.settimeout(_PATIENCE)
    latency = _there_and_back(sock, first=first)
    if first:
        rate = _send(sock, latency)
        _receive(sock)
    else:
        _receive(sock)
        rate = _send(sock, latency)
    return LinkSpeed(latency, rate)


def _there_and_back(sock: socket.socket, *, first: bool) -> float:
    """Seconds one way; both ends measure, one after the other."""
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
    """Bytes a second: ever longer pieces, until one takes long enough."""
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
                raise ConnectionError("the other end left")
            room = room[count:]
        sock.sendall(b".")
