# SPDX-License-Identifier: Apache-2.0
"""How two nodes replace a connection that broke.

    every node listens for the whole run; only holders of the run's token are admitted
    when a connection breaks:    the node of the higher rank connects to the other again and again
                                 the other node only probes, to see whether the process still exists
    connection refused:          the process has ended
    no answer:                   its machine or the network is down; given up after `grace` seconds
    connected:                   both say how many frames they have received, and go on from there

A process that computes accepts the new connection when it next looks. Everything here that waits does so in a thread,
which ends with the wait.
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
from orchestra.worlds.sockets.auth import Token, Unauthenticated
from orchestra.worlds.sockets.rendezvous import receive_json, send_json

_HANDSHAKE = 5.0  # seconds for the proof of the token and an introduction
_PROBE = 1.0  # seconds until a probe counts as unanswered, and between two probes
_AGAIN = 0.2  # seconds between two attempts
_UNAUTHENTICATED = 16  # connections at once
_KEEPALIVE = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3))


class PeerAddress(NamedTuple):
    """Where another node listens, and the secret by which it recognizes this node."""

    address: Address
    secret: str


class NewConnection(NamedTuple):
    """A new connection to a node."""

    node: int
    sock: socket.socket
    received: int  # frames that the other node has received
    acknowledged: int | None  # frames received here, as far as the other node was told; None if it is still to be told
    attempt: int  # the other node's number of this attempt, if that node connected


class Reconnector:
    """One node's listening socket, and its attempts to reconnect. `secrets`: what each other node must say."""

    def __init__(
        self,
        rank: int,
        token: Token,
        listening: socket.socket,
        addresses: Mapping[int, PeerAddress],
        secrets: Mapping[int, str],
        grace: float,
    ) -> None:
        self.listening, self.grace, self.nodes = listening, grace, frozenset(addresses)
        self._rank, self._token = rank, token
        self._addresses, self._secrets = addresses, secrets
        self._new: SimpleQueue[NewConnection] = SimpleQueue()
        self._unauthenticated = Unauthenticated(_UNAUTHENTICATED)
        self._searches: dict[int, int] = {}  # how often `start` was called for a node
        self._attempts: dict[int, int] = {}  # how often this node introduced itself to a node
        self._active: set[int] = set()  # nodes to which this node reconnects now
        self._ended: set[int] = set()  # nodes whose address refuses connections
        self._answered: dict[int, float] = {}  # when a node's address last answered; infinity during a handshake
        self._handshakes: dict[int, socket.socket] = {}
        self._closed = False

    # What is known of the nodes to which this node reconnects.

    def has_ended(self, node: int) -> bool:
        """Whether a node's address refuses connections."""
        return node in self._ended

    def silent_for(self, node: int) -> float:
        """Return the seconds since a node's address last answered."""
        return time.monotonic() - self._answered.get(node, time.monotonic())

    def new_connections(self) -> Iterator[NewConnection]:
        """Yield the connections made since the last call."""
        while True:
            try:
                yield self._new.get_nowait()
            except Empty:
                return

    def reply(self, new: NewConnection, received: int) -> None:
        """Tell the other node how many frames were received here, unless it knows."""
        if new.acknowledged is None:
            new.sock.settimeout(_PROBE)
            send_json(new.sock, {"rank": self._rank, "received": received})

    # Connecting.

    def start(self, node: int, received: int) -> None:
        """Begin to reconnect to a node, from which `received` frames have come."""
        self._searches[node] = search = self._searches.get(node, 0) + 1
        self._active.add(node)
        self._ended.discard(node)
        self._answered[node] = time.monotonic()
        name = f"reconnect to {node}"
        threading.Thread(target=self._search, args=(node, received, search), name=name, daemon=True).start()

    def stop(self, node: int) -> None:
        """End the attempts to reconnect to a node."""
        self._active.discard(node)

    def _is_active(self, node: int, search: int) -> bool:
        return not self._closed and node in self._active and search == self._searches[node]

    def _search(self, node: int, received: int, search: int) -> None:
        while self._is_active(node, search):
            try:
                sock = connect(self._addresses[node].address, timeout=_PROBE)
            except ConnectionRefusedError:
                self._ended.add(node)
                return
            except OSError:
                time.sleep(_AGAIN)
                continue
            self._answered[node] = time.monotonic()
            if self._rank < node:  # the other node connects; this one probes again, since it may end meanwhile
                sock.close()
                time.sleep(_PROBE)
            elif self._introduce(node, sock, received):
                return
            else:
                time.sleep(_AGAIN)

    def _introduce(self, node: int, sock: socket.socket, received: int) -> bool:
        """Introduce this node and wait for the answer, however long: the other may be in the middle of a step."""
        self._attempts[node] = attempt = self._attempts.get(node, 0) + 1
        self._answered[node] = float("inf")
        try:
            self._handshakes[node] = sock.dup()  # TLS takes over the first
            if self._closed:
                raise ConnectionAbortedError("this node is closing")
            sock.settimeout(None)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE:
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            sock = self._token.secure(sock, server=False)
            secret = self._addresses[node].secret
            send_json(sock, {"rank": self._rank, "received": received, "secret": secret, "attempt": attempt})
            answered, theirs = _numbers(receive_json(sock), "rank", "received")
            if answered != node:
                raise ValueError(f"node {answered} answered at the address of node {node}")
        except (OSError, ValueError):
            sock.close()
            return False
        finally:
            self._answered[node] = time.monotonic()
            if (handle := self._handshakes.pop(node, None)) is not None:
                handle.close()
        self._add(NewConnection(node, sock, theirs, received, 0))
        return True

    def _add(self, new: NewConnection) -> None:
        """Queue a new connection; close it if this node is closing."""
        self._new.put(new)
        if self._closed:
            self._close_new()

    def _close_new(self) -> None:
        for new in self.new_connections():
            new.sock.close()

    # Listening.

    def accept(self) -> None:
        """Accept a connection and authenticate it in a thread."""
        with contextlib.suppress(OSError, RuntimeError):
            self._unauthenticated.receive(self.listening, self._admit)

    def _admit(self, sock: socket.socket, handle: socket.socket) -> None:
        until = time.monotonic() + _HANDSHAKE
        try:
            sock = self._token.secure(sock, server=True, until=until)
            said = receive_json(sock, until)
            node, received, attempt = _numbers(said, "rank", "received", "attempt")
            if node not in self._secrets or said.get("secret") != self._secrets[node]:
                raise ValueError(f"node {node} is not of this run")
            self._add(NewConnection(node, sock, received, None, attempt))
        except (OSError, ValueError):
            sock.close()  # it is not a node of this run
        finally:
            self._unauthenticated.remove(handle)

    def close(self) -> None:
        """Stop listening and reconnecting."""
        self._closed = True
        self.listening.close()
        for handle in [*self._handshakes.values()]:
            with contextlib.suppress(OSError):
                handle.shutdown(socket.SHUT_RDWR)
        self._unauthenticated.drop(1 << 30)
        self._close_new()


def _numbers(said: dict[str, Any], *names: str) -> tuple[int, ...]:
    found = tuple(said.get(name) for name in names)
    if not all(type(value) is int for value in found):
        raise ValueError("not an introduction")
    return found  # type: ignore[return-value]
