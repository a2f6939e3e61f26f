# SPDX-License-Identifier: Apache-2.0
"""How the nodes of a run on many machines connect to each other.

    node 0 listens at an address that all know, the others where they reach it from; node 0 sends all these addresses
    node k connects to every node before it; both ends prove that they have the run's token
    both ends say which node they are and describe their run; the first difference ends the rendezvous
    the node that connected confirms that it was admitted
    when all are connected, the sockets are closed; `reconnect` listens at others for the rest of the run

A connection without the token is closed when it fails the proof, after a few seconds, or when others need its place:
it delays no node. A node whose attempt to connect fails tries again until its patience is over.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from queue import Empty, Queue
from typing import Any

from orchestra.errors import ClusterError
from orchestra.worlds.sockets.addresses import (
    EVERYWHERE,
    Address,
    Notify,
    Reminder,
    bare,
    connect,
    is_loopback,
    listen,
    plain,
    show,
)
from orchestra.worlds.sockets.auth import Token, Unauthenticated, WrongToken, exactly

_LENGTH = struct.Struct("<I")
_OTHER_ORDER = (
    "the order differs: {} is here where {} is there (sort the set that it comes from, or set PYTHONHASHSEED)"
)
_LONGEST = 1 << 16  # bytes of an introduction
_HANDSHAKE = 5.0  # seconds for the proof of the token and an introduction
_UNAUTHENTICATED = 64  # connections at once, beside those of the run's own nodes
_AGAIN, _MOST = 0.1, 1.0  # seconds between two attempts to connect: at first, and at most
_SLICE = 0.5  # seconds between two checks whether a reminder is due


class Rendezvous:
    """One node's part of it. `host`: where to listen; None: at the address from which the node reaches node 0."""

    def __init__(
        self,
        rank: int,
        token: Token,
        about: Mapping[str, Any],
        *,
        host: str | None = "127.0.0.1",
        port: int = 0,
        one_machine: bool = True,
        notify: Notify = lambda text: None,
    ) -> None:
        self._rank, self._token = rank, token
        self._about = dict(about)
        self._one_machine, self._notify = one_machine, notify
        self._listening: socket.socket | None = None
        self._closed = False
        self._addresses: dict[int, Address] = {}
        self._arrived: Queue[tuple[int, socket.socket] | Exception] = Queue()
        if host is not None:
            self._listen(host, port)

    def _listen(self, host: str, port: int = 0) -> None:
        """Listen at an address of this machine."""
        # A loopback address is of use to this machine only: node 0 replaces it by one that the others can reach.
        at = EVERYWHERE if is_loopback(host or "0.0.0.0") and not self._one_machine else host
        try:
            self._listening = listen(at, port)
        except OSError as error:
            what, where = f"port {port}" if port else "a port", at or "this machine"
            raise ClusterError(
                f"node {self._rank} cannot listen at {what} of {where}: {os.strerror(error.errno or 0)}. Choose a port "
                "that is free (MASTER_PORT, --port), or end the process that listens there."
            ) from None
        self.address: Address = (plain(host), self._listening.getsockname()[1])
        self._addresses[self._rank] = self.address

    def host_all(self, size: int, *, patience: float, known_as: Address | None = None) -> dict[int, socket.socket]:
        """As node 0: wait until all nodes have connected, and send each the addresses of the others."""
        found = self.connect_all([known_as or self.address] * size, patience=patience)
        addresses = [self._addresses[node] for node in range(size)]
        with closed_on_failure(found):
            for node, sock in found.items():
                try:
                    reachable = [_reachable(address, sock) for address in addresses]
                    send_json(sock, {"rank": self._rank, "addresses": reachable})
                except OSError as error:
                    where = show(self._addresses[node])
                    raise ClusterError(
                        f"node {node} at {where} left before all nodes had connected: {error}. See its own message."
                    ) from None
        return found

    def join(self, host: Address, *, patience: float) -> dict[int, socket.socket]:
        """As any other node: connect to node 0, which sends the addresses of the others, and then to them."""
        until = time.monotonic() + patience
        with contextlib.ExitStack() as failing:
            failing.callback(self.close)
            first = failing.enter_context(self._connect(0, (bare(host[0]), host[1]), until))
            try:
                self._await_addresses(first, until, host)
                first.settimeout(_HANDSHAKE)
                addresses = [(str(name), int(port)) for name, port in receive_json(first)["addresses"]]
            except (OSError, KeyError, TypeError, ValueError) as error:
                why = "it stopped waiting for them" if isinstance(error, OSError) else error
                raise ClusterError(
                    f"node 0 at {show(host)} did not send the addresses of the other nodes: {why}"
                ) from None
            failing.pop_all()
        return self.connect_all(addresses, patience=patience, known={0: first})

    def _await_addresses(self, first: socket.socket, until: float, host: Address) -> None:
        """Wait until node 0 sends the addresses of the others, which it does once all have connected to it."""
        until, remind = max(until, time.monotonic() + _HANDSHAKE), Reminder(self._notify)
        waits = f"node {self._rank} is connected to node 0 at {show(host)}, which waits for other nodes and names them"
        while not wait([first], timeout=_SLICE):
            if time.monotonic() > until:
                raise TimeoutError("timed out")
            remind(lambda: waits)

    def connect_all(
        self, addresses: Sequence[Address], *, patience: float, known: Mapping[int, socket.socket] | None = None
    ) -> dict[int, socket.socket]:
        """Return a connection to every other node; those in `known` exist already."""
        until = time.monotonic() + patience
        found = dict(known or {})
        self._unauthenticated = Unauthenticated(_UNAUTHENTICATED + len(addresses))
        accepting = threading.Thread(target=self._accept, args=(self._listening,), name="accept", daemon=True)
        accepting.start()
        with closed_on_failure(found):
            try:
                for node, address in enumerate(addresses[: self._rank]):
                    if node not in found:
                        found[node] = self._connect(node, address, until)
                remind = Reminder(self._notify)
                while len(found) < len(addresses) - 1:
                    missing = [node for node in range(len(addresses)) if node not in (*found, self._rank)]
                    node, sock = self._next(until, missing, addresses[self._rank], remind, patience)
                    if node not in missing:
                        sock.close()
                        raise ClusterError(f"two processes claim to be node {node}: give each its own rank")
                    found[node] = sock
            finally:
                self._stop(accepting)
        return found

    def _next(
        self, until: float, missing: Sequence[int], where: Address, remind: Reminder, patience: float
    ) -> tuple[int, socket.socket]:
        """Return the next node that connects."""
        names = ("node " if len(missing) == 1 else "nodes ") + ", ".join(map(str, missing))
        while True:
            try:
                came = self._arrived.get(timeout=max(0.0, min(_SLICE, until - time.monotonic())))
                break
            except Empty:
                if time.monotonic() > until:
                    raise ClusterError(
                        f"{names} did not connect to node {self._rank} at {show(where)} within {patience:g} s: "
                        "was every process started, and does a firewall let it through?"
                    ) from None
            remind(lambda: f"node {self._rank} waits for {names} to connect to {show(where)}")
        if isinstance(came, Exception):
            raise came
        return came

    # Accepting connections.

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                self._unauthenticated.receive(listening, self._admit)
            except (OSError, RuntimeError):
                if self._closed:
                    return
                self._unauthenticated.drop()  # too many files are open, or too many threads run
                time.sleep(_AGAIN)

    def _admit(self, sock: socket.socket, handle: socket.socket) -> None:
        until = time.monotonic() + _HANDSHAKE
        try:
            sock = self._token.secure(sock, server=True, until=until)
            self._unauthenticated.remove(handle)  # it has the token, and will not be dropped
            theirs = receive_json(sock, until)
            send_json(sock, self._introduction())
            self._compare(theirs)
            receive_json(sock, until)  # the other end knows that it was admitted: else it will try again
            host, port = theirs["address"]
            is_loopback(host)  # raises if it is no address
            self._addresses[theirs["rank"]] = (str(host), int(port))
            self._arrived.put((theirs["rank"], sock))
        except ClusterError as error:
            sock.close()
            self._arrived.put(error)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            sock.close()  # it is not a node of this run
        finally:
            self._unauthenticated.remove(handle)
        if self._closed:
            self._close_unused()

    def _stop(self, accepting: threading.Thread) -> None:
        self.close()
        accepting.join(1.0)
        self._unauthenticated.drop(1 << 30)
        self._close_unused()

    def _close_unused(self) -> None:
        """Close connections that came too late, or twice."""
        with contextlib.suppress(Empty):
            while True:
                came = self._arrived.get_nowait()
                if not isinstance(came, Exception):
                    came[1].close()

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        if self._listening is not None:
            with contextlib.suppress(OSError):
                self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._listening.close()

    # Connecting.

    def _connect(self, node: int, address: Address, until: float) -> socket.socket:
        """Try to connect until another node of this run answers; one that was dropped among many tries again."""
        remind, pause = Reminder(self._notify), _AGAIN
        while True:
            try:
                return self._try(node, address, until)
            except (OSError, ValueError) as error:
                if isinstance(error, WrongToken) or time.monotonic() > until:
                    raise self._cannot_connect(node, address, error) from None
                why = error
            remind(lambda why=why: f"node {self._rank} tries to reach node {node} at {show(address)}: {why}")  # type: ignore[misc]
            time.sleep(max(0.0, min(pause, until - time.monotonic())))
            pause = min(2 * pause, _MOST)

    def _try(self, node: int, address: Address, until: float) -> socket.socket:
        soon = time.monotonic() + _HANDSHAKE
        sock = connect(address, timeout=max(0.1, min(_HANDSHAKE, until - time.monotonic())))
        try:
            sock = self._token.secure(sock, server=False, until=soon)
            if not self._addresses:
                self._listen(sock.getsockname()[0])
            send_json(sock, self._introduction())
            theirs = receive_json(sock, soon)
            self._compare(theirs)
            if theirs["rank"] != node:
                raise ClusterError(f"node {theirs['rank']} answered at the address of node {node}, {show(address)}")
            send_json(sock, {"rank": self._rank})
        except BaseException:
            sock.close()
            raise
        return sock

    def _introduction(self) -> dict[str, Any]:
        return {"rank": self._rank, "about": self._about, "address": self.address}

    def _cannot_connect(self, node: int, address: Address, error: Exception) -> ClusterError:
        match error:
            case WrongToken():
                advice = "Compare the two tokens; another version of orchestra may derive other keys from the same one."
            case socket.gaierror():
                advice = "Is MASTER_ADDR right, and can this machine resolve the name? An address works as well."
            case _:
                advice = "Was it started there, and does a firewall let this machine through?"
        return ClusterError(f"node {self._rank} cannot connect to node {node} at {show(address)}: {error}. {advice}")

    def _compare(self, theirs: Mapping[str, Any]) -> None:
        about = theirs.get("about")
        difference = first_difference(self._about, about if isinstance(about, dict) else {})
        if difference is not None:
            raise ClusterError(
                f"node {self._rank} and node {theirs.get('rank')} do not make the same call: {difference}. Start all "
                "of them with the same command, code and data."
            )


@contextlib.contextmanager
def closed_on_failure(connections: Mapping[int, socket.socket]) -> Iterator[None]:
    """Close connections if an error ends the block: the nodes at the other ends notice it."""
    try:
        yield
    except BaseException:
        for sock in connections.values():
            sock.close()
        raise


def _reachable(address: Address, sock: socket.socket) -> Address:
    """Return an address as the other end of a connection reaches it: over the loopback, it is on this machine."""
    mine = plain(sock.getsockname()[0])
    is_here = address[0] == EVERYWHERE or (is_loopback(address[0]) and not is_loopback(mine))
    return (mine, address[1]) if is_here else address


def first_difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Describe the first difference between two descriptions; None if there is none.

    >>> first_difference({"seed": 1, "batch": 8}, {"seed": 1, "batch": 9})
    'batch is 8 here and 9 there'
    >>> first_difference({"sources": {"a.py": "1f", "b.py": "2e"}}, {"sources": {"a.py": "1f"}})
    'sources: b.py is here only'
    """
    for key in [*mine, *(key for key in theirs if key not in mine)]:
        here, there = mine.get(key), theirs.get(key)
        if isinstance(here, dict) and isinstance(there, dict):
            within = first_difference(here, there)
            if within is not None:
                return f"{key}: {within}"
        elif key not in mine or key not in theirs:
            return f"{key} is {'here' if key in mine else 'there'} only"
        elif here != there:
            return f"{key} is {here!r} here and {there!r} there"
    changed = next(((here, there) for here, there in zip(mine, theirs, strict=True) if here != there), None)
    return None if changed is None else _OTHER_ORDER.format(*changed)


def send_json(sock: socket.socket, what: Mapping[str, Any]) -> None:
    """Send an introduction, before there are frames."""
    text = json.dumps(what).encode()
    sock.sendall(_LENGTH.pack(len(text)) + text)


def receive_json(sock: socket.socket, until: float | None = None) -> dict[str, Any]:
    """Receive an introduction; raise if it takes until after a moment of the monotonic clock."""
    (length,) = _LENGTH.unpack(exactly(sock, _LENGTH.size, until))
    if length > _LONGEST:
        raise ValueError(f"an introduction of {length:,} bytes")
    try:
        said = json.loads(exactly(sock, length, until))
    except RecursionError:
        raise ValueError("an introduction nested too deeply") from None
    if not isinstance(said, dict) or not isinstance(said.get("rank"), int):
        raise ValueError("not an introduction")
    return said
