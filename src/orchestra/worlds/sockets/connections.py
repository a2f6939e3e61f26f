# SPDX-License-Identifier: Apache-2.0
"""A node's connections to all the others, and what becomes of them.

Who waits gives a sign of life now and then. A connection that breaks, or a machine that is silent, is no end yet: the
two nodes find each other again and go on with the first message that is missing.
"""

from __future__ import annotations

import selectors
import socket
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress

from torch import Tensor

from orchestra.core.ops import Send
from orchestra.errors import WorkerLost
from orchestra.runs.status import name_of
from orchestra.worlds.sockets import wire
from orchestra.worlds.sockets.connection import Connection
from orchestra.worlds.sockets.pairing import Pairing
from orchestra.worlds.sockets.reconnect import Arrival, Reconnector

AHEAD = 8  # messages of one sender that are taken in before they are asked for
_BEAT = 0.5  # seconds between two signs of life of a node that waits
_SILENT = 3.0  # seconds without one from the other machine's kernel, after which the connection is taken to be broken
_SOON = 1.0  # seconds after which people are told that somebody is sought
_DAMAGED = 3  # messages of a connection that may come otherwise than they were sent
_BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Connections:
    """One node's connections.

    `accept` is called with every message that is complete; `reconnected` when a broken connection was replaced: with
    the node, the seconds it took, and what had broken the connection.
    """

    def __init__(
        self,
        rank: int,
        workers: int,
        run: int,
        connections: dict[int, socket.socket],
        accept: Callable[[Connection, wire.Frame, Tensor], None],
        reconnected: Callable[[int, float, str], None],
        *,
        largest: int,
        patience: float,
        summed: bool,
        arranged: Pairing,
    ) -> None:
        self.lost: dict[int, WorkerLost] = {}  # nodes whose connection broke, and what to say of it
        self.ahead = AHEAD
        self.patience = patience  # seconds
        self._rank, self._workers, self._run = rank, workers, run
        self._accept, self._reconnected = accept, reconnected
        self._largest = largest  # bytes
        self._summed = summed  # bodies are checked here, since nothing below does
        self._reunion, self._selector = arranged.reunion, selectors.DefaultSelector()
        keeps = arranged.reunion.nodes if arranged.reunion is not None else frozenset()
        self.peers = {
            node: Connection(
                node,
                sock,
                node in arranged.apart,
                node in keeps,
                arranged.outlets.get(node),
                arranged.inlets.get(node),
                arranged.pids.get(node),
            )
            for node, sock in connections.items()
        }
        self._beaten = 0.0  # when this node last gave a sign of life
        for peer in self.peers.values():
            self.watch(peer)
        if self._reunion is not None:
            self._selector.register(self._reunion.door, selectors.EVENT_READ, None)

    # Out and in.

    def post(self, peer: Connection, kind: int, body: memoryview, x: Tensor, op: Send | None) -> None:
        """Have a message sent."""
        if peer.lost is not None:
            raise peer.lost.with_traceback(None)  # which may have been raised before
        if peer.ahead and not peer.reading:
            self.read(peer)
        idle = not peer.out
        peer.post(self._rank, self._run, kind, body, x, op, summed=self._summed)
        if peer.parted is not None or peer.failing is not None:
            peer.out.clear()  # it is kept, and goes out when they have found each other
        elif idle:
            self._write(peer)
        self._settle(peer)
        self.watch(peer)

    def _write(self, peer: Connection) -> None:
        try:
            peer.write()
        except _BLOCKED:
            pass
        except OSError as error:
            peer.out.clear()
            peer.failing = error

    def read(self, peer: Connection) -> None:
        """Take in what has come, as far as there is room for it."""
        self._take(peer)
        self._settle(peer)

    def _take(self, peer: Connection) -> None:
        peer.reading = True
        try:
            for frame, body in peer.read(self._run, largest=self._largest, ahead=self.ahead, summed=self._summed):
                self._accept(peer, frame, body)
                if peer.owes:
                    peer.beat(self._rank, self._run)
                    self._write(peer)
        except _BLOCKED:
            pass
        except (OSError, wire.BadFrame) as error:
            self._lose(peer, error)
        finally:
            peer.reading = False

    def _settle(self, peer: Connection) -> None:
        """A connection over which nothing can be sent is lost, once its last words are heard: they may say why."""
        if peer.failing is None or peer.reading:
            return
        error = peer.failing
        self._take(peer)
        self._lose(peer, error)

    # Waiting.

    def pump(self, seconds: float) -> None:
        """Read and write what can be, once there is something; or give up after some time."""
        for key, events in self._selector.select(seconds):
            peer: Connection | None = key.data
            if peer is None:
                assert self._reunion is not None
                self._reunion.open()
                continue
            if events & selectors.EVENT_WRITE:
                self._write(peer)
            if events & selectors.EVENT_READ:
                self._take(peer)
            self._settle(peer)
            self.watch(peer)
        if self._reunion is not None:
            self._reunite(self._reunion)

    def watch(self, peer: Connection) -> None:
        """Have the selector look at what this node could do with a connection."""
        wanted = 0
        if peer.lost is None and peer.parted is None:
            wanted |= selectors.EVENT_READ if peer.kept < self.ahead else 0
            wanted |= selectors.EVENT_WRITE if peer.out else 0
        if wanted == peer.watched:
            return
        if not wanted:
            self._unwatch(peer)
        elif not peer.watched:
            self._selector.register(peer.sock, wanted, peer)
        else:
            self._selector.modify(peer.sock, wanted, peer)
        peer.watched = wanted

    def _unwatch(self, peer: Connection) -> None:
        if peer.watched:
            self._selector.unregister(peer.sock)
            peer.watched = 0

    def require(self, peer: Connection) -> None:
        """Raise if nothing more can come from a node, and nothing lies here."""
        if peer.lost is not None and not peer.kept:
            raise peer.lost.with_traceback(None)  # which may have been raised before

    def names(self, nodes: Sequence[int]) -> str:
        """As people call them."""
        return ", ".join(name_of(node, self._workers) for node in nodes) or "nobody"

    # Broken connections.

    def give_signs(self, began: float) -> None:
        """Who has waited for a while shows that it is there, and looks whether the others' machines are."""
        now = time.perf_counter()
        if now - max(began, self._beaten) < _BEAT:
            return
        self._beaten = now
        for peer in self.peers.values():
            if not peer.apart or peer.lost is not None or peer.parted is not None:
                continue
            peer.beat(self._rank, self._run)
            self._write(peer)
            self._settle(peer)
            if now - began > _SILENT and peer.silence() > _SILENT:
                self._lose(peer, TimeoutError(f"nothing was heard from its machine for {_SILENT:g} s"))
            self.watch(peer)

    def _lose(self, peer: Connection, error: Exception) -> None:
        """Nothing more can come or go over this connection. Whoever left of its own accord is not sought."""
        if peer.lost is not None or peer.parted is not None:
            return
        why = f"its connection to {self.names([self._rank])} broke: {error}"
        mendable = not isinstance(error, wire.BadFrame)
        if isinstance(error, wire.Damaged):
            peer.damaged += 1
            mendable = peer.damaged <= _DAMAGED
        if self._reunion is None or not peer.keeps or peer.gone or not mendable:
            self._give_up(peer, WorkerLost(self.names([peer.rank]), why))
        else:
            self._part(peer, why)

    def _part(self, peer: Connection, why: str) -> None:
        assert self._reunion is not None
        self._unwatch(peer)
        peer.part(time.perf_counter(), why)
        self._reunion.seek(peer.rank, peer.taken)

    def _give_up(self, peer: Connection, error: WorkerLost) -> None:
        """Of consequence only if somebody still needs it."""
        self._unwatch(peer)
        peer.lost, peer.parted = error, None
        if not peer.gone:
            self.lost[peer.rank] = error
        peer.hang_up()

    @property
    def seeks(self) -> bool:
        """Whether anybody is out of reach."""
        return any(peer.parted is not None for peer in self.peers.values())

    def _reunite(self, reunion: Reconnector) -> None:
        """Go on with those who were found, and without those who will not be."""
        for came in reunion.arrivals():
            self._take_up(reunion, self.peers[came.node], came)
        for peer in self.peers.values():
            if peer.parted is None:
                continue
            sought = time.perf_counter() - peer.parted
            if (error := self._end_of_patience(reunion, peer, sought)) is not None:
                self._give_up(peer, error)
            elif sought > _SOON and not peer.missed:
                peer.missed = True
                _warn(
                    f"{self.names([peer.rank])} is looked for since {_clock(sought)}: {peer.why}. It is given up when "
                    f"its machine has not answered for {reunion.grace:g} s."
                )

    def _end_of_patience(self, reunion: Reconnector, peer: Connection, sought: float) -> WorkerLost | None:
        """What ends the search for a node, if anything does."""
        name, fate = self.names([peer.rank]), f"is out of reach since {_clock(sought)}"
        if reunion.is_gone(peer.rank):
            return WorkerLost(name, peer.why)
        if reunion.silent_for(peer.rank) > reunion.grace:
            advice = (
                f"It was looked for for {reunion.grace:g} s: are its machine and the network up? Where machines may be "
                "away for longer, give --grace, or Attached(grace=...), more seconds."
            )
            return WorkerLost(name, peer.why, fate=fate, advice=advice)
        if sought > self.patience:
            advice = (
                f"Its machine answers, but it did not come back within {self.patience:g} s. If a step may take longer, "
                "give Attached(patience=...) more seconds."
            )
            return WorkerLost(name, peer.why, fate=fate, advice=advice)
        return None

    def _take_up(self, reunion: Reconnector, peer: Connection, came: Arrival) -> None:
        """Go on over a new connection, unless it is of an earlier search, or broken already."""
        late = came.told is None and came.call < peer.calls
        if peer.lost is not None or late or came.told not in (None, peer.taken):
            came.sock.close()
            return
        if peer.parted is None:  # the other end noticed first
            self._part(peer, "it called again")
        peer.calls = max(peer.calls, came.call)
        parted = peer.parted or 0.0
        try:
            reunion.reply(came, peer.taken)
            peer.resume(came.sock, came.heard)
        except OSError:
            came.sock.close()  # it will call again
            return
        except wire.BadFrame as error:
            came.sock.close()
            why = f"its connection could not be taken up again: {error}"
            self._give_up(peer, WorkerLost(self.names([peer.rank]), why))
            return
        reunion.found(peer.rank)
        self._write(peer)
        self.read(peer)  # what came with the introduction is not seen by the selector
        self.watch(peer)
        if peer.parted is None:
            seconds = time.perf_counter() - parted
            _warn(f"{self.names([peer.rank])} was found after {seconds:.1f} s and is connected again: {peer.why}")
            self._reconnected(peer.rank, seconds, peer.why)

    def close(self, until: float) -> None:
        """Hang up; by then even if somebody does not listen."""
        for peer in self.peers.values():
            if peer.lost is None and peer.parted is None:
                _hang_up(peer.sock, until)
            peer.close()
        if self._reunion is not None:
            self._reunion.close()
        self._selector.close()


def _warn(text: str) -> None:
    sys.stderr.write(f"warning: {text}\n")


def _clock(seconds: float) -> str:
    """The time of day so long ago."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))


def _hang_up(sock: socket.socket, until: float) -> None:
    """Close a connection once the other end has read everything.

    Closed with something unread here, it would be reset, and what was sent last lost on the way.
    """
    with suppress(OSError), closing(sock):
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(max(0.01, until - time.monotonic()))
        while time.monotonic() < until and sock.recv(1 << 16):
            pass
