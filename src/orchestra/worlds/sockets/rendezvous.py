# SPDX-License-Identifier: Apache-2.0
"""How the nodes of a run on many machines find each other.

    node 0 listens where everybody knows, the others where they reach it from; node 0 tells everybody where that is
    node k connects to every node before it; both prove that they have the run's token
    both say who they are and what they are about to do; the first difference is named, and ends it
    who called says that it was heard
    when everybody is there, this door is shut; `reunion` has another, for those whose connection breaks

A stranger's connection is dropped when it fails the proof, after a few seconds, or when others need its place; it holds
up nobody. Who calls and is not heard calls again, until its patience is over.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from queue import Empty, Queue
from typing import Any

from orchestra.errors import ClusterError
from orchestra.worlds.sockets.addresses import (
    EVERYWHERE,
    Address,
    Reminder,
    Tell,
    accept,
    bare,
    connect,
    is_loopback,
    listen,
    plain,
    show,
)
from orchestra.worlds.sockets.auth import Token, WrongToken, exactly

_LENGTH = struct.Struct("<I")
_OTHER_ORDER = (
    "the order differs: {} is here where {} is there (sort the set that it comes from, or set PYTHONHASHSEED)"
)
_LONGEST = 1 << 16  # bytes of an introduction
_PROOF = 5.0  # seconds for a proof and an introduction, however slowly they come
_STRANGERS = 64  # that may be at the door at once, beside those who belong there
_AGAIN, _MOST = 0.1, 1.0  # seconds between two calls: at first, and at most
_GLANCE = 0.5  # seconds between two looks at whether there is something to say


Admit = Callable[[socket.socket, socket.socket], None]


class Unauthenticated:
    """Callers of whom nobody knows who they are. There is room for some; then the oldest makes way."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._handles: dict[socket.socket, None] = {}  # in the order in which they came
        self._lock = threading.Lock()

    def receive(self, door: socket.socket, admit: Admit) -> None:
        """Somebody calls: a thread of its own sees who it is, and closes the connection if it is nobody of ours.

        `admit` gets a second handle of the connection as well, since TLS takes over the first.
        """
        with contextlib.ExitStack() as failing:
            sock = failing.enter_context(accept(door))
            handle = failing.enter_context(sock.dup())
            self._enter(handle)
            failing.callback(self.leave, handle)
            threading.Thread(target=admit, args=(sock, handle), name="doorman", daemon=True).start()
            failing.pop_all()  # it is the thread's now

    def _enter(self, handle: socket.socket) -> None:
        with self._lock:
            if len(self._handles) >= self._room:
                self._drop_oldest()
            self._handles[handle] = None

    def leave(self, handle: socket.socket) -> None:
        """It is known who that was."""
        with self._lock:
            self._handles.pop(handle, None)
            handle.close()

    def make_room(self, count: int = 1) -> None:
        """Drop the oldest."""
        with self._lock:
            for _ in range(min(count, len(self._handles))):
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        oldest = next(iter(self._handles))
        del self._handles[oldest]
        with contextlib.suppress(OSError), oldest:
            oldest.shutdown(socket.SHUT_RDWR)  # wakes whoever listens to it


class Rendezvous:
    """A node that waits for the others. `host`: where to listen; None: at the address from which it reaches node 0."""

    def __init__(
        self,
        rank: int,
        token: Token,
        about: Mapping[str, Any],
        *,
        host: str | None = "127.0.0.1",
        port: int = 0,
        one_machine: bool = True,
        tell: Tell = lambda text: None,
    ) -> None:
        self._rank, self._token = rank, token
        self._about = dict(about)
        self._one_machine, self._tell = one_machine, tell
        self._door: socket.socket | None = None
        self._is_shut = False
        self._doors: dict[int, Address] = {}
        self._arrived: Queue[tuple[int, socket.socket] | Exception] = Queue()
        if host is not None:
            self._open(host, port)

    def _open(self, host: str, port: int = 0) -> None:
        """Listen; where others are told to come is for those to say who have reached them."""
        # A loopback address is of use to this machine only: node 0 tells the others a better one.
        at = EVERYWHERE if is_loopback(host or "0.0.0.0") and not self._one_machine else host
        try:
            self._door = listen(at, port)
        except OSError as error:
            what, where = f"port {port}" if port else "a port", at or "this machine"
            raise ClusterError(
                f"node {self._rank} cannot listen at {what} of {where}: {os.strerror(error.errno or 0)}. Choose a port "
                "that is free (MASTER_PORT, --port), or end what listens there."
            ) from None
        self.address: Address = (plain(host), self._door.getsockname()[1])
        self._doors[self._rank] = self.address

    def welcome(self, size: int, *, patience: float, known_as: Address | None = None) -> dict[int, socket.socket]:
        """As node 0: wait for everybody, and tell them where the others are."""
        found = self.gather([known_as or self.address] * size, patience=patience)
        doors = [self._doors[node] for node in range(size)]
        with closed_on_failure(found):
            for node, sock in found.items():
                try:
                    say(sock, {"rank": self._rank, "doors": [_reachable(door, sock) for door in doors]})
                except OSError as error:
                    where = show(self._doors[node])
                    raise ClusterError(
                        f"node {node} at {where} was there and left before all had come: {error}. See what it said."
                    ) from None
        return found

    def join(self, host: Address, *, patience: float) -> dict[int, socket.socket]:
        """As any other node: go to node 0, hear where the others are, and find them."""
        until = time.monotonic() + patience
        with contextlib.ExitStack() as failing:
            failing.callback(self.close)
            first = failing.enter_context(self._call(0, (bare(host[0]), host[1]), until))
            try:
                self._await_word(first, until, host)
                first.settimeout(_PROOF)
                doors = [(str(name), int(port)) for name, port in hear(first)["doors"]]
            except (OSError, KeyError, TypeError, ValueError) as error:
                why = "it gave up waiting for the others" if isinstance(error, OSError) else error
                raise ClusterError(f"node 0 at {show(host)} did not say where the others are: {why}") from None
            failing.pop_all()
        return self.gather(doors, patience=patience, known={0: first})

    def _await_word(self, first: socket.socket, until: float, host: Address) -> None:
        """Node 0 waits for everybody; it says for whom, this one that it waits."""
        until, remind = max(until, time.monotonic() + _PROOF), Reminder(self._tell)
        waits = f"node {self._rank} is with node 0 at {show(host)}, which waits for others: it says for whom"
        while not wait([first], timeout=_GLANCE):
            if time.monotonic() > until:
                raise TimeoutError("timed out")
            remind(lambda: waits)

    def gather(
        self, addresses: Sequence[Address], *, patience: float, known: Mapping[int, socket.socket] | None = None
    ) -> dict[int, socket.socket]:
        """A connection to every other node, beside those there are."""
        until = time.monotonic() + patience
        found = dict(known or {})
        self._unproven = Unauthenticated(_STRANGERS + len(addresses))
        doorman = threading.Thread(target=self._attend, args=(self._door,), name="doorman", daemon=True)
        doorman.start()
        with closed_on_failure(found):
            try:
                for node, address in enumerate(addresses[: self._rank]):
                    if node not in found:
                        found[node] = self._call(node, address, until)
                remind = Reminder(self._tell)
                while len(found) < len(addresses) - 1:
                    missing = [node for node in range(len(addresses)) if node not in (*found, self._rank)]
                    node, sock = self._next(until, missing, addresses[self._rank], remind)
                    if node not in missing:
                        sock.close()
                        raise ClusterError(f"two processes call themselves node {node}: give each its own rank")
                    found[node] = sock
            finally:
                self._shut(doorman)
        return found

    def _next(
        self, until: float, missing: Sequence[int], where: Address, remind: Reminder
    ) -> tuple[int, socket.socket]:
        names = ", ".join(map(str, missing))
        while True:
            try:
                came = self._arrived.get(timeout=max(0.0, min(_GLANCE, until - time.monotonic())))
                break
            except Empty:
                if time.monotonic() > until:
                    raise ClusterError(
                        f"node {self._rank} waited in vain for node {names} to come to {show(where)}: were they "
                        "started, and does a firewall let them through?"
                    ) from None
            remind(lambda: f"node {self._rank} waits for node {names} to come to {show(where)}")
        if isinstance(came, Exception):
            raise came
        return came

    # At the door.

    def _attend(self, door: socket.socket) -> None:
        while True:
            try:
                self._unproven.receive(door, self._admit)
            except (OSError, RuntimeError):
                if self._is_shut:
                    return
                self._unproven.make_room()  # too many files are open, or threads there are
                time.sleep(_AGAIN)

    def _admit(self, sock: socket.socket, handle: socket.socket) -> None:
        until = time.monotonic() + _PROOF
        try:
            sock = self._token.secure(sock, server=True, until=until)
            self._unproven.leave(handle)  # it belongs to us, and will not be dropped any more
            theirs = hear(sock, until)
            say(sock, self._introduction())
            self._compare(theirs)
            hear(sock, until)  # it knows that it was let in: else it will call again
            host, port = theirs["door"]
            is_loopback(host)  # refuses what is no address
            self._doors[theirs["rank"]] = (str(host), int(port))
            self._arrived.put((theirs["rank"], sock))
        except ClusterError as error:
            sock.close()
            self._arrived.put(error)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            sock.close()  # nobody of ours
        finally:
            self._unproven.leave(handle)
        if self._is_shut:
            self._turn_away()

    def _shut(self, doorman: threading.Thread) -> None:
        self.close()
        doorman.join(1.0)
        self._unproven.make_room(1 << 30)
        self._turn_away()

    def _turn_away(self) -> None:
        """Those who came too late, or twice."""
        with contextlib.suppress(Empty):
            while True:
                came = self._arrived.get_nowait()
                if not isinstance(came, Exception):
                    came[1].close()

    def close(self) -> None:
        """Listen no more."""
        self._is_shut = True
        if self._door is not None:
            with contextlib.suppress(OSError):
                self._door.shutdown(socket.SHUT_RDWR)  # wakes the doorman
            self._door.close()

    # On the way to somebody else's.

    def _call(self, node: int, address: Address, until: float) -> socket.socket:
        """Call until somebody answers as he should: who was dropped because too many came at once comes again."""
        remind, pause = Reminder(self._tell), _AGAIN
        while True:
            try:
                return self._try(node, address, until)
            except (OSError, ValueError) as error:
                if isinstance(error, WrongToken) or time.monotonic() > until:
                    raise self._shut_out(node, address, error) from None
                why = error
            remind(lambda why=why: f"node {self._rank} calls node {node} at {show(address)}: {why}")  # type: ignore[misc]
            time.sleep(max(0.0, min(pause, until - time.monotonic())))
            pause = min(2 * pause, _MOST)

    def _try(self, node: int, address: Address, until: float) -> socket.socket:
        soon = time.monotonic() + _PROOF
        sock = connect(address, timeout=max(0.1, min(_PROOF, until - time.monotonic())))
        try:
            sock = self._token.secure(sock, server=False, until=soon)
            if not self._doors:
                self._open(sock.getsockname()[0])
            say(sock, self._introduction())
            theirs = hear(sock, soon)
            self._compare(theirs)
            if theirs["rank"] != node:
                raise ClusterError(f"node {theirs['rank']} answered at the address of node {node}, {show(address)}")
            say(sock, {"rank": self._rank})
        except BaseException:
            sock.close()
            raise
        return sock

    def _introduction(self) -> dict[str, Any]:
        return {"rank": self._rank, "about": self._about, "door": self.address}

    def _shut_out(self, node: int, address: Address, error: Exception) -> ClusterError:
        match error:
            case WrongToken():
                advice = "Has it the same token? Compare the two; another version of orchestra may derive other keys."
            case socket.gaierror():
                advice = "Is MASTER_ADDR right, and does this machine know the name? An address will do as well."
            case _:
                advice = "Was it started there, and does a firewall let this machine through?"
        return ClusterError(f"node {self._rank} cannot join node {node} at {show(address)}: {error}. {advice}")

    def _compare(self, theirs: Mapping[str, Any]) -> None:
        about = theirs.get("about")
        difference = first_difference(self._about, about if isinstance(about, dict) else {})
        if difference is not None:
            raise ClusterError(
                f"node {self._rank} and node {theirs.get('rank')} do not do the same: {difference}. Start all of them "
                "with the same command, code and data."
            )


@contextlib.contextmanager
def closed_on_failure(connections: Mapping[int, socket.socket]) -> Iterator[None]:
    """Whoever cannot go on hangs up; the others hear it."""
    try:
        yield
    except BaseException:
        for sock in connections.values():
            sock.close()
        raise


def _reachable(door: Address, sock: socket.socket) -> Address:
    """A door as whoever is at the other end can reach it: who came over the loopback is on this very machine."""
    mine = plain(sock.getsockname()[0])
    is_here = door[0] == EVERYWHERE or (is_loopback(door[0]) and not is_loopback(mine))
    return (mine, door[1]) if is_here else door


def first_difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """The first thing that two descriptions say differently.

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


def say(sock: socket.socket, what: Mapping[str, Any]) -> None:
    """Say something, before there are messages."""
    text = json.dumps(what).encode()
    sock.sendall(_LENGTH.pack(len(text)) + text)


def hear(sock: socket.socket, until: float | None = None) -> dict[str, Any]:
    """What the other end says, before a moment if there is a hurry."""
    (length,) = _LENGTH.unpack(exactly(sock, _LENGTH.size, until))
    if length > _LONGEST:
        raise ValueError(f"an introduction of {length:,} bytes")
    try:
        said = json.loads(exactly(sock, length, until))
    except RecursionError:
        raise ValueError("an introduction within introductions") from None
    if not isinstance(said, dict) or not isinstance(said.get("rank"), int):
        raise ValueError("no introduction")
    return said
