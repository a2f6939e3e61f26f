# SPDX-License-Identifier: Apache-2.0
"""A node's connections to all other nodes: reading and writing them, and replacing the ones that break.

A node that waits sends heartbeats. A connection that breaks, or a machine that is silent, does not end the run yet:
the two nodes reconnect and go on with the first frame that is missing.
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
from orchestra.worlds.sockets.reconnect import NewConnection, Reconnector

AHEAD = 8  # messages of one sender that are received before this node asks for them
_HEARTBEAT = 0.5  # seconds between two heartbeats of a node that waits
_SILENT = 3.0  # seconds without an answer of the other machine's kernel after which the connection counts as broken
_WARN_AFTER = 1.0  # seconds after which a warning says that a connection is being replaced
_DAMAGED = 3  # frames of a connection that may be damaged on their way
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
        pairing: Pairing,
    ) -> None:
        self.lost: dict[int, WorkerLost] = {}  # the errors of connections that are given up, by node
        self.ahead = AHEAD
        self.patience = patience  # seconds
        self._rank, self._workers, self._run = rank, workers, run
        self._accept, self._reconnected = accept, reconnected
        self._largest = largest  # bytes
        self._summed = summed  # bodies have checksums: without TLS, nothing else would notice damage
        self._reconnector, self._selector = pairing.reconnector, selectors.DefaultSelector()
        reconnecting = self._reconnector.nodes if self._reconnector is not None else frozenset()
        self.peers = {
            node: Connection(
                node,
                sock,
                node in pairing.remote,
                node in reconnecting,
                pairing.rings_out.get(node),
                pairing.rings_in.get(node),
                pairing.pids.get(node),
            )
            for node, sock in connections.items()
        }
        self._last_heartbeat = 0.0
        for peer in self.peers.values():
            self.watch(peer)
        if self._reconnector is not None:
            self._selector.register(self._reconnector.listening, selectors.EVENT_READ, None)

    # Sending and receiving.

    def post(self, peer: Connection, kind: int, body: memoryview, x: Tensor, op: Send | None) -> None:
        """Send a frame, or as much of it as the kernel takes now."""
        if peer.lost is not None:
            raise peer.lost.with_traceback(None)  # which may have been raised before
        if peer.far_ahead and not peer.reading:
            self.read(peer)
        idle = not peer.outgoing
        peer.post(self._rank, self._run, kind, body, x, op, summed=self._summed)
        if peer.broken_at is not None or peer.send_error is not None:
            peer.outgoing.clear()  # the frame is kept, and sent once the nodes are connected again
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
            peer.outgoing.clear()
            peer.send_error = error

    def read(self, peer: Connection) -> None:
        """Read what has arrived, as far as there is space for it."""
        self._read(peer)
        self._settle(peer)

    def _read(self, peer: Connection) -> None:
        peer.reading = True
        try:
            for frame, body in peer.read(self._run, largest=self._largest, ahead=self.ahead, summed=self._summed):
                self._accept(peer, frame, body)
                if peer.owes_acknowledgement:
                    peer.post_heartbeat(self._rank, self._run)
                    self._write(peer)
        except _BLOCKED:
            pass
        except (OSError, wire.BadFrame) as error:
            self._on_broken(peer, error)
        finally:
            peer.reading = False

    def _settle(self, peer: Connection) -> None:
        """Handle an earlier error of sending, after reading what still arrived: it may explain the error."""
        if peer.send_error is None or peer.reading:
            return
        error = peer.send_error
        self._read(peer)
        self._on_broken(peer, error)

    # Waiting.

    def pump(self, seconds: float) -> None:
        """Wait until a connection can be read or written, for at most `seconds`; then read and write."""
        for key, events in self._selector.select(seconds):
            peer: Connection | None = key.data
            if peer is None:
                assert self._reconnector is not None
                self._reconnector.accept()
                continue
            if events & selectors.EVENT_WRITE:
                self._write(peer)
            if events & selectors.EVENT_READ:
                self._read(peer)
            self._settle(peer)
            self.watch(peer)
        if self._reconnector is not None:
            self._replace_broken(self._reconnector)

    def watch(self, peer: Connection) -> None:
        """Register with the selector what this node could do now with a connection."""
        wanted = 0
        if peer.lost is None and peer.broken_at is None:
            wanted |= selectors.EVENT_READ if peer.unread < self.ahead else 0
            wanted |= selectors.EVENT_WRITE if peer.outgoing else 0
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
        """Raise if a connection is given up and all that it delivered has been read."""
        if peer.lost is not None and not peer.unread:
            raise peer.lost.with_traceback(None)  # which may have been raised before

    def names(self, nodes: Sequence[int]) -> str:
        """Return the names of nodes for messages, such as `worker 0, server 1`."""
        return ", ".join(name_of(node, self._workers) for node in nodes) or "no node"

    # Broken connections.

    def send_heartbeats(self, began: float) -> None:
        """While this node waits, send heartbeats to other machines and check that their kernels answer."""
        now = time.perf_counter()
        if now - max(began, self._last_heartbeat) < _HEARTBEAT:
            return
        self._last_heartbeat = now
        for peer in self.peers.values():
            if not peer.remote or peer.lost is not None or peer.broken_at is not None:
                continue
            peer.post_heartbeat(self._rank, self._run)
            self._write(peer)
            self._settle(peer)
            if now - began > _SILENT and peer.silence() > _SILENT:
                self._on_broken(peer, TimeoutError(f"its machine did not answer for {_SILENT:g} s"))
            self.watch(peer)

    def _on_broken(self, peer: Connection, error: Exception) -> None:
        """Replace a connection that broke, or give it up: always if the other node had said that it closes it."""
        if peer.lost is not None or peer.broken_at is not None:
            return
        cause = f"its connection to {self.names([self._rank])} broke: {error}"
        replaceable = not isinstance(error, wire.BadFrame)
        if isinstance(error, wire.Damaged):
            peer.damaged += 1
            replaceable = peer.damaged <= _DAMAGED
        if self._reconnector is None or not peer.reconnects or peer.closing or not replaceable:
            self._give_up(peer, WorkerLost(self.names([peer.rank]), cause))
        else:
            self._start_reconnecting(peer, cause)

    def _start_reconnecting(self, peer: Connection, cause: str) -> None:
        assert self._reconnector is not None
        self._unwatch(peer)
        peer.mark_broken(time.perf_counter(), cause)
        self._reconnector.start(peer.rank, peer.received)

    def _give_up(self, peer: Connection, error: WorkerLost) -> None:
        """Close a connection for good; `error` is raised only once this node needs the connection."""
        self._unwatch(peer)
        peer.lost, peer.broken_at = error, None
        if not peer.closing:
            self.lost[peer.rank] = error
        peer.disconnect()

    @property
    def reconnecting(self) -> bool:
        """Whether any connection is being replaced."""
        return any(peer.broken_at is not None for peer in self.peers.values())

    def _replace_broken(self, reconnector: Reconnector) -> None:
        """Go on over new connections, and give up those that take too long."""
        for new in reconnector.new_connections():
            self._resume(reconnector, self.peers[new.node], new)
        for peer in self.peers.values():
            if peer.broken_at is None:
                continue
            seconds = time.perf_counter() - peer.broken_at
            if (error := self._why_give_up(reconnector, peer, seconds)) is not None:
                self._give_up(peer, error)
            elif seconds > _WARN_AFTER and not peer.reported:
                peer.reported = True
                _warn(
                    f"lost the connection to {self.names([peer.rank])} at {_clock(seconds)}: {peer.cause}. "
                    f"Reconnecting, until its machine has not answered for {reconnector.grace:g} s."
                )

    def _why_give_up(self, reconnector: Reconnector, peer: Connection, seconds: float) -> WorkerLost | None:
        """Return the error if reconnecting to a node should end."""
        name, fate = self.names([peer.rank]), f"has been unreachable since {_clock(seconds)}"
        if reconnector.has_ended(peer.rank):
            return WorkerLost(name, peer.cause)
        if reconnector.silent_for(peer.rank) > reconnector.grace:
            advice = (
                f"Its machine did not answer for {reconnector.grace:g} s: are the machine and the network up? Where "
                "machines may be unreachable for longer, set --grace, or Attached(grace=...), to more seconds."
            )
            return WorkerLost(name, peer.cause, fate=fate, advice=advice)
        if seconds > self.patience:
            advice = (
                f"Its machine answers, but its process did not reconnect within {self.patience:g} s. If a step may "
                "take longer, set Attached(patience=...) to more seconds."
            )
            return WorkerLost(name, peer.cause, fate=fate, advice=advice)
        return None

    def _resume(self, reconnector: Reconnector, peer: Connection, new: NewConnection) -> None:
        """Go on over a new connection, unless it belongs to an earlier attempt or is broken already."""
        outdated = new.acknowledged is None and new.attempt < peer.attempts
        if peer.lost is not None or outdated or new.acknowledged not in (None, peer.received):
            new.sock.close()
            return
        if peer.broken_at is None:  # the other end noticed first
            self._start_reconnecting(peer, "the other end reconnected")
        peer.attempts = max(peer.attempts, new.attempt)
        broken_at = peer.broken_at or 0.0
        try:
            reconnector.reply(new, peer.received)
            peer.resume(new.sock, new.received)
        except OSError:
            new.sock.close()  # the other end will try again
            return
        except wire.BadFrame as error:
            new.sock.close()
            cause = f"its connection could not be resumed: {error}"
            self._give_up(peer, WorkerLost(self.names([peer.rank]), cause))
            return
        reconnector.stop(peer.rank)
        self._write(peer)
        self.read(peer)  # what arrived with the introduction is not seen by the selector
        self.watch(peer)
        if peer.broken_at is None:
            seconds = time.perf_counter() - broken_at
            _warn(f"reconnected to {self.names([peer.rank])} after {seconds:.1f} s: {peer.cause}")
            self._reconnected(peer.rank, seconds, peer.cause)

    def close(self, until: float) -> None:
        """Close all connections by `until`, even if other nodes do not read what was sent."""
        for peer in self.peers.values():
            if peer.lost is None and peer.broken_at is None:
                _close_when_read(peer.sock, until)
            peer.close_rings()
        if self._reconnector is not None:
            self._reconnector.close()
        self._selector.close()


def _warn(text: str) -> None:
    sys.stderr.write(f"warning: {text}\n")


def _clock(seconds: float) -> str:
    """Return the time of day so many seconds ago."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))


def _close_when_read(sock: socket.socket, until: float) -> None:
    """Close a connection once the other end has read everything.

    If bytes were unread here, closing would reset the connection, and frames sent last would be lost.
    """
    with suppress(OSError), closing(sock):
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(max(0.01, until - time.monotonic()))
        while time.monotonic() < until and sock.recv(1 << 16):
            pass
