# SPDX-License-Identifier: Apache-2.0
"""How two nodes find each other again when the connection between them broke.

    every node keeps a door open for the whole run, through which only those with the run's token come
    a connection broke:     the node that comes later calls at the other's door, again and again
                            the other knocks at its door, to see whether the process is still there
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

from orchestra.worlds.sockets.addresses import Address, connect
from orchestra.worlds.sockets.auth import Token
from orchestra.worlds.sockets.rendezvous import Unauthenticated, hear, say

_PROOF = 5.0  # seconds for a proof and an introduction
_KNOCK = 1.0  # seconds until a knock counts as not heard, and between two
_AGAIN = 0.2  # seconds between two calls
_STRANGERS = 16  # at the door at once
_KEEPALIVE = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3))


class Invitation(NamedTuple):
    """Where another node's door is, and what it wants to hear from this one."""

    door: Address
    word: str


class Arrival(NamedTuple):
    """A new connection to a node."""

    node: int
    sock: socket.socket
    heard: int  # messages it has
    told: int | None  # how many it was told are here; None if that is still to be said
    call: int  # its number, if it called


class Reconnector:
    """A node's open door, and its search for those that it lost. `words`: what it wants to hear from each."""

    def __init__(
        self,
        rank: int,
        token: Token,
        door: socket.socket,
        invitations: Mapping[int, Invitation],
        words: Mapping[int, str],
        grace: float,
    ) -> None:
        self.door, self.grace, self.nodes = door, grace, frozenset(invitations)
        self._rank, self._token = rank, token
        self._invitations, self._words = invitations, words
        self._arrivals: SimpleQueue[Arrival] = SimpleQueue()
        self._unproven = Unauthenticated(_STRANGERS)
        self._searches: dict[int, int] = {}  # how often a node was sought
        self._called: dict[int, int] = {}  # how often it was called
        self._sought: set[int] = set()
        self._gone: set[int] = set()
        self._answered: dict[int, float] = {}  # when somebody last did at a node's door; infinity while they speak
        self._calls: dict[int, socket.socket] = {}  # under way
        self._over = False

    # What is known of those that are sought.

    def is_gone(self, node: int) -> bool:
        """Whether nobody listens at a node's door."""
        return node in self._gone

    def silent_for(self, node: int) -> float:
        """Seconds since there was an answer at all."""
        return time.monotonic() - self._answered.get(node, time.monotonic())

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
            came.sock.settimeout(_KNOCK)
            say(came.sock, {"rank": self._rank, "taken": taken})

    # The search.

    def seek(self, node: int, taken: int) -> None:
        """Look for a node whose connection broke after so many messages."""
        self._searches[node] = search = self._searches.get(node, 0) + 1
        self._sought.add(node)
        self._gone.discard(node)
        self._answered[node] = time.monotonic()
        threading.Thread(target=self._seek, args=(node, taken, search), name=f"seek {node}", daemon=True).start()

    def found(self, node: int) -> None:
        """It need not be sought any more."""
        self._sought.discard(node)

    def _seeks(self, node: int, search: int) -> bool:
        return not self._over and node in self._sought and search == self._searches[node]

    def _seek(self, node: int, taken: int, search: int) -> None:
        while self._seeks(node, search):
            try:
                sock = connect(self._invitations[node].door, timeout=_KNOCK)
            except ConnectionRefusedError:
                self._gone.add(node)
                return
            except OSError:
                time.sleep(_AGAIN)
                continue
            self._answered[node] = time.monotonic()
            if self._rank < node:  # it calls, now that it is known to be there; meanwhile it may die
                sock.close()
                time.sleep(_KNOCK)
            elif self._call(node, sock, taken):
                return
            else:
                time.sleep(_AGAIN)

    def _call(self, node: int, sock: socket.socket, taken: int) -> bool:
        """Introduce oneself, for as long as it takes: the other may be in the middle of a long step."""
        self._called[node] = call = self._called.get(node, 0) + 1
        self._answered[node] = float("inf")
        try:
            self._calls[node] = sock.dup()  # TLS takes over the first
            if self._over:
                raise ConnectionAbortedError("nobody is sought any more")
            sock.settimeout(None)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE:
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            sock = self._token.secure(sock, server=False)
            word = self._invitations[node].word
            say(sock, {"rank": self._rank, "taken": taken, "word": word, "call": call})
            answered, heard = _numbers(hear(sock), "rank", "taken")
            if answered != node:
                raise ValueError(f"node {answered} at the door of node {node}")
        except (OSError, ValueError):
            sock.close()
            return False
        finally:
            self._answered[node] = time.monotonic()
            if (handle := self._calls.pop(node, None)) is not None:
                handle.close()
        self._arrive(Arrival(node, sock, heard, taken, 0))
        return True

    def _arrive(self, came: Arrival) -> None:
        """Somebody is there; too late, if nobody looks any more."""
        self._arrivals.put(came)
        if self._over:
            self._turn_away()

    def _turn_away(self) -> None:
        for came in self.arrivals():
            came.sock.close()

    # The door.

    def open(self) -> None:
        """Somebody is at the door."""
        with contextlib.suppress(OSError, RuntimeError):
            self._unproven.receive(self.door, self._admit)

    def _admit(self, sock: socket.socket, handle: socket.socket) -> None:
        until = time.monotonic() + _PROOF
        try:
            sock = self._token.secure(sock, server=True, until=until)
            said = hear(sock, until)
            node, taken, call = _numbers(said, "rank", "taken", "call")
            if node not in self._words or said.get("word") != self._words[node]:
                raise ValueError(f"node {node} is not of this run")
            self._arrive(Arrival(node, sock, taken, None, call))
        except (OSError, ValueError):
            sock.close()  # nobody of ours
        finally:
            self._unproven.leave(handle)

    def close(self) -> None:
        """Nobody is sought any more."""
        self._over = True
        self.door.close()
        for handle in [*self._calls.values()]:
            with contextlib.suppress(OSError):
                handle.shutdown(socket.SHUT_RDWR)
        self._unproven.make_room(1 << 30)
        self._turn_away()


def _numbers(said: dict[str, Any], *names: str) -> tuple[int, ...]:
    found = tuple(said.get(name) for name in names)
    if not all(type(value) is int for value in found):
        raise ValueError("no introduction")
    return found  # type: ignore[return-value]
