# SPDX-License-Identifier: Apache-2.0
"""How two nodes find each other again when the connection between them broke.

    every node keeps a door open for the whole run, through which only those with the run's token come
    a connection broke:     the node that comes later calls at the other's door, again and again
                            the other knocks at its door as well, to see whether the process is still there
    nobody listens there:   the process is gone
    no answer at all:       the machine, or the way to it; given up after `grace` seconds
    there is an answer:     both say how many messages they have, and go on from there

Whoever computes answers when it next looks. All that waits here waits in threads, which end with the waiting.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from orchestra.transports.addresses import Address
from orchestra.transports.meeting import hear, say
from orchestra.transports.token import Token

_PROOF = 5.0  # seconds for a proof and an introduction
_KNOCK = 1.0  # seconds until a knock counts as not heard
_AGAIN = 0.2  # seconds between two
_AT_THE_DOOR = 16  # strangers at once


class Arrival(NamedTuple):
    """A new connection to a node."""

    node: int
    sock: socket.socket
    heard: int  # messages it has
    told: int | None  # how many it was told are here; None if that is still to be said


class Reunion:
    """A node's open door, and its search for those that it lost."""

    def __init__(
        self, rank: int, token: Token, door: socket.socket, doors: Mapping[int, Address], grace: float
    ) -> None:
        self.door, self.grace = door, grace
        self._rank, self._token, self._doors = rank, token, doors
        self._arrivals: SimpleQueue[Arrival] = SimpleQueue()
        self._room = threading.Semaphore(_AT_THE_DOOR)
        self._answers: dict[int, bool] = {}  # whether somebody listens at a node's door
        self._searches: dict[int, int] = {}  # how often a node was sought
        self._over = False

    def answers(self, node: int) -> bool | None:
        """Whether somebody listens at the door of a node that is sought; None if that is not known yet."""
        return self._answers.get(node)

    def arrivals(self) -> Iterator[Arrival]:
        """Those who came."""
        while True:
            try:
                yield self._arrivals.get_nowait()
            except Empty:
                return

    def reply(self, came: Arrival, taken: int) -> None:
        """Say how many messages are here."""
        if came.told is None:
            say(came.sock, {"rank": self._rank, "taken": taken})

    def seek(self, node: int, taken: int) -> None:
        """Look for a node whose connection broke after so many messages."""
        self._answers.pop(node, None)
        self._searches[node] = search = self._searches.get(node, 0) + 1
        threading.Thread(target=self._seek, args=(node, taken, search), name=f"seek {node}", daemon=True).start()

    def open(self) -> None:
        """Somebody is at the door."""
        with contextlib.suppress(OSError):
            sock, _ = self.door.accept()
            if self._room.acquire(blocking=False):
                threading.Thread(target=self._admit, args=(sock,), name="doorman", daemon=True).start()
            else:
                sock.close()

    def close(self) -> None:
        """Nobody is sought any more."""
        self._over = True
        self.door.close()
        for came in self.arrivals():
            came.sock.close()

    def _admit(self, sock: socket.socket) -> None:
        limit = threading.Timer(_PROOF, _cut, (sock,))
        limit.start()
        try:
            sock.settimeout(_PROOF)
            sock = self._token.secure(sock, server=True)
            node, taken = _read(hear(sock))
            if node not in self._doors or self._over:
                raise ValueError(f"there is no node {node}")
            self._arrivals.put(Arrival(node, sock, taken, None))
        except (OSError, ValueError):
            sock.close()  # nobody of ours
        finally:
            limit.cancel()
            self._room.release()

    def _seek(self, node: int, taken: int, search: int) -> None:
        until = time.monotonic() + self.grace
        while not self._over and search == self._searches[node]:
            try:
                sock = socket.create_connection(self._doors[node], timeout=_KNOCK)
            except ConnectionRefusedError:
                self._answers[node] = False
                return
            except OSError:
                if time.monotonic() > until:
                    return
                time.sleep(_AGAIN)
                continue
            self._answers[node] = True
            if self._rank < node:  # it calls, now that it is known to be there
                sock.close()
                return
            if self._call(node, sock, taken):
                return
            time.sleep(_AGAIN)

    def _call(self, node: int, sock: socket.socket, taken: int) -> bool:
        """Introduce oneself, for as long as it takes: the other may be in the middle of a long step."""
        try:
            sock.settimeout(None)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock = self._token.secure(sock, server=False)
            say(sock, {"rank": self._rank, "taken": taken})
            answered, heard = _read(hear(sock))
            if answered != node:
                raise ValueError(f"node {answered} at the door of node {node}")
        except (OSError, ValueError):
            sock.close()
            return False
        self._arrivals.put(Arrival(node, sock, heard, taken))
        return True


def _read(said: dict[str, Any]) -> tuple[int, int]:
    node, taken = said.get("rank"), said.get("taken")
    if not isinstance(node, int) or not isinstance(taken, int):
        raise ValueError("no introduction")
    return node, taken


def _cut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
