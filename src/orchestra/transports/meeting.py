# SPDX-License-Identifier: Apache-2.0
"""How the nodes of a run on many machines find each other.

    node 0 listens where everybody knows, the others where they say; node 0 tells everybody where that is
    node k connects to every node before it; both prove that they have the run's token
    both say who they are and what they are about to do; the first difference is named, and ends it
    when everybody is there, nobody listens any more

A stranger's connection is dropped when it fails the proof, or after a few seconds; it holds up nobody.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from queue import Empty, Queue
from typing import Any

from orchestra.errors import ClusterError
from orchestra.transports.token import Token, exactly

Address = tuple[str, int]
_LENGTH = struct.Struct("<I")
_LONGEST = 1 << 16  # bytes of an introduction
_PROOF = 5.0  # seconds for a proof and an introduction
_STRANGERS = 64  # that may be at the door at once
_AGAIN = 0.1  # seconds between two attempts to connect


class Meeting:
    """A node that waits for the others."""

    def __init__(
        self, rank: int, token: Token, about: Mapping[str, Any], *, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self._rank, self._token = rank, token
        self._about = dict(about)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._door = socket.create_server((host, port), family=family, backlog=_STRANGERS)
        self.address: Address = self._door.getsockname()[:2]
        self._doors: dict[int, Address] = {rank: self.address}
        self._arrived: Queue[tuple[int, socket.socket] | Exception] = Queue()
        self._room = threading.Semaphore(_STRANGERS)

    def welcome(self, size: int, *, patience: float) -> dict[int, socket.socket]:
        """As node 0: wait for everybody, and tell them where the others are."""
        found = self.gather([self.address] * size, patience=patience)
        doors = [self._doors[node] for node in range(size)]
        for sock in found.values():
            say(sock, {"rank": self._rank, "doors": doors})
        return found

    def join(self, host: Address, *, patience: float) -> dict[int, socket.socket]:
        """As any other node: go to node 0, hear where the others are, and find them."""
        until = time.monotonic() + patience
        first = self._call(0, host, until)
        try:
            first.settimeout(max(_PROOF, until - time.monotonic()))  # it waits for everybody
            doors = [(str(name), int(port)) for name, port in hear(first)["doors"]]
        except (OSError, KeyError, TypeError, ValueError) as error:
            first.close()
            why = "it gave up waiting for the others" if isinstance(error, OSError) else error
            raise ClusterError(f"node 0 at {host[0]}:{host[1]} did not say where the others are: {why}") from None
        return self.gather(doors, patience=patience, known={0: first})

    def gather(
        self, addresses: Sequence[Address], *, patience: float, known: Mapping[int, socket.socket] | None = None
    ) -> dict[int, socket.socket]:
        """A connection to every other node, beside those there are."""
        until = time.monotonic() + patience
        found = dict(known or {})
        doorman = threading.Thread(target=self._open, name="doorman", daemon=True)
        doorman.start()
        try:
            for node, address in enumerate(addresses[: self._rank]):
                if node not in found:
                    found[node] = self._call(node, address, until)
            while len(found) < len(addresses) - 1:
                missing = [node for node in range(len(addresses)) if node not in (*found, self._rank)]
                node, sock = self._next(until, missing)
                if node not in missing:
                    sock.close()
                    raise ClusterError(f"two processes call themselves node {node}: give each its own rank")
                found[node] = sock
        except BaseException:
            for sock in found.values():
                sock.close()
            raise
        finally:
            with contextlib.suppress(OSError):
                self._door.shutdown(socket.SHUT_RDWR)  # wakes the doorman
            self._door.close()
            doorman.join(1.0)
            while not self._arrived.empty():  # too late, or twice
                came = self._arrived.get()
                if not isinstance(came, Exception):
                    came[1].close()
        return found

    def _next(self, until: float, missing: Sequence[int]) -> tuple[int, socket.socket]:
        try:
            came = self._arrived.get(timeout=max(0.0, until - time.monotonic()))
        except Empty:
            names = ", ".join(map(str, missing))
            raise ClusterError(
                f"node {self._rank} waited in vain for node {names} to come: were they started?"
            ) from None
        if isinstance(came, Exception):
            raise came
        return came

    # At the door.

    def _open(self) -> None:
        while True:
            try:
                sock, _ = self._door.accept()
            except OSError:
                return
            if self._room.acquire(blocking=False):
                threading.Thread(target=self._admit, args=(sock,), daemon=True).start()
            else:
                sock.close()

    def _admit(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(_PROOF)
            sock = self._token.secure(sock, server=True)
            theirs = hear(sock)
            say(sock, self._introduction())
            self._compare(theirs)
            host, port = theirs["door"]
            self._doors[theirs["rank"]] = (str(host), int(port))
            self._arrived.put((theirs["rank"], sock))
        except ClusterError as error:
            sock.close()
            self._arrived.put(error)
        except (OSError, ValueError, KeyError, TypeError):
            sock.close()  # nobody of ours
        finally:
            self._room.release()

    # On the way to somebody else's.

    def _call(self, node: int, address: Address, until: float) -> socket.socket:
        while True:
            try:
                sock = socket.create_connection(address, timeout=_PROOF)
                break
            except OSError as error:
                if time.monotonic() > until:
                    raise self._shut_out(node, address, error) from None
                time.sleep(_AGAIN)
        try:
            sock = self._token.secure(sock, server=False)
            say(sock, self._introduction())
            theirs = hear(sock)
            self._compare(theirs)
            if theirs["rank"] != node:
                raise ClusterError(f"node {theirs['rank']} answered at the address of node {node}")
        except (OSError, ValueError) as error:
            sock.close()
            raise self._shut_out(node, address, error) from None
        except ClusterError:
            sock.close()
            raise
        return sock

    def _introduction(self) -> dict[str, Any]:
        return {"rank": self._rank, "about": self._about, "door": self.address}

    def _shut_out(self, node: int, address: Address, error: Exception) -> ClusterError:
        where = f"{address[0]}:{address[1]}"
        return ClusterError(f"node {self._rank} cannot join node {node} at {where}: {error}. Has it the same token?")

    def _compare(self, theirs: Mapping[str, Any]) -> None:
        about = theirs.get("about")
        difference = first_difference(self._about, about if isinstance(about, dict) else {})
        if difference is not None:
            key, mine, other = difference
            raise ClusterError(
                f"node {self._rank} and node {theirs.get('rank')} do not do the same: {key} is {mine!r} here and "
                f"{other!r} there. Start all of them with the same command, code and data."
            )


def first_difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first thing that two descriptions say differently.

    >>> first_difference({"seed": 1, "batch": 8}, {"seed": 1, "batch": 9})
    ('batch', 8, 9)
    """
    for key in [*mine, *(key for key in theirs if key not in mine)]:
        if mine.get(key) != theirs.get(key):
            return key, mine.get(key), theirs.get(key)
    return None


def say(sock: socket.socket, what: Mapping[str, Any]) -> None:
    """Say something, before there are messages."""
    text = json.dumps(what).encode()
    sock.sendall(_LENGTH.pack(len(text)) + text)


def hear(sock: socket.socket) -> dict[str, Any]:
    """What the other end says."""
    (length,) = _LENGTH.unpack(exactly(sock, _LENGTH.size))
    if length > _LONGEST:
        raise ValueError(f"an introduction of {length:,} bytes")
    said = json.loads(exactly(sock, length))
    if not isinstance(said, dict) or not isinstance(said.get("rank"), int):
        raise ValueError("no introduction")
    return said


def interface_to(host: Address) -> str:
    """The address by which this machine is seen from there; nothing is sent to find it."""
    family, _, _, _, where = socket.getaddrinfo(*host, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])
