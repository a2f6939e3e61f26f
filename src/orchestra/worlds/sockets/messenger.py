# SPDX-License-Identifier: Apache-2.0
"""Messages between machines: one connection for each pair of nodes, and no thread beside the node's own.

While a node waits to send or to receive, it reads and writes whatever can be read and written: two nodes that send to
each other at the same time both make progress. A node that computes does neither; its kernel buffers what arrives, and
shows the others that the machine is alive. At most `AHEAD` messages of one sender are received before this node asks
for them.

Control messages, about the run as a whole, use the same connections, in order with the other messages. The messenger
passes them to its listener as soon as it reads them.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orchestra.core.ops import Departed, Done, Handle, Leave, Message, Recv, Send, Sleep, Traffic
from orchestra.engine.checkpoint_protocol import IdleListener
from orchestra.errors import Stalled, WorkerLost
from orchestra.worlds.shared_memory.layout import SLEEPING, WAITING
from orchestra.worlds.sockets import wire
from orchestra.worlds.sockets.connection import Connection
from orchestra.worlds.sockets.connections import AHEAD, Connections
from orchestra.worlds.sockets.listener import Listener, NoListener
from orchestra.worlds.sockets.neighbours import Neighbours, is_at_work
from orchestra.worlds.sockets.pairing import Pairing

_BYE = {"kind": "bye"}  # a node's last message: its connection will close, which is no error
_SLICE = 0.2  # seconds between two checks of the deadline


class Messenger:
    """One node's messages, to and from all other nodes."""

    def __init__(
        self,
        rank: int,
        workers: int,
        run: int,
        connections: dict[int, socket.socket],
        *,
        largest: int,
        patience: float,
        traffic: Traffic,
        summed: bool,
        near: Collection[int] = (),
        pairing: Pairing | None = None,
    ) -> None:
        self._listener: Listener = NoListener()
        self._idle_listener: IdleListener | None = None
        self.largest = largest  # bytes of a message
        self._rank, self._traffic, self._near = rank, traffic, near
        self._connections = Connections(
            rank, workers, run, connections, self._accept, self._reconnected,
            largest=largest, patience=patience, summed=summed, pairing=pairing or Pairing(),
        )  # fmt: skip
        self._peers = self._connections.peers
        self._next_source = 0
        self._neighbours = Neighbours(rank, self._peers, patience, lambda node: self._connections.names([node]))
        self._waiting_since = self._worked = 0.0  # when a wait began; when a process of this machine last worked

    def listen(self, listener: Listener) -> None:
        """From now on, tell a listener what concerns the run as a whole."""
        self._listener = listener

    def listen_idle(self, listener: IdleListener) -> None:
        """From now on, tell a listener when this node is about to sleep because there is no message."""
        self._idle_listener = listener

    def _reconnected(self, node: int, seconds: float, cause: str) -> None:
        self._listener.on_reconnected(node, seconds, cause)

    @property
    def lost(self) -> dict[int, WorkerLost]:
        """The errors of connections that broke for good, by node."""
        return self._connections.lost

    # Sending.

    def send(self, op: Send) -> Handle[None]:
        """Send a message; unless the vector is lent, this returns when the kernel has all of it."""
        x = op.x.detach().to("cpu").contiguous()
        body = wire.body_of(x)
        peer = self._peers[op.to]
        self._connections.post(peer, wire.Kind.MESSAGE, body, x, op)
        if op.to not in self._near:
            self._traffic.count(op.to, len(body))
        if op.lend and x.data_ptr() == op.x.data_ptr():
            return _LentVector(self, peer)
        self._flush(peer)
        return Done(None)

    def leave(self, op: Leave) -> Handle[None]:
        """Tell every member of a group that this node sends no more messages."""
        for node in op.group.members:
            peer = self._peers[node]
            self._connections.post(peer, wire.Kind.FAREWELL, memoryview(b""), torch.empty(0), None)
            self._flush(peer)
        return Done(None)

    def _flush(self, peer: Connection) -> None:
        """Wait until the kernel has all outgoing bytes: it sends them while this node computes."""
        if peer.outgoing or peer.broken_at is not None:
            self._wait(
                lambda: not peer.outgoing and peer.broken_at is None,
                lambda: f"{self._connections.names([peer.rank])} to take a message",
                [peer],
            )

    # Receiving.

    def recv(self, op: Recv) -> Handle[Message | Departed | None]:
        """Take the next message of one node, or of any node in a group."""
        sources = [self._peers[s] for s in (op.group.members if op.source is None else (op.source,)) if s != self._rank]

        def ready() -> bool:
            if self._first(sources) is not None or all(p.left for p in sources):
                return True
            if self._idle_listener is not None:
                self._idle_listener.on_idle(at_rest=op.at_rest)
            return False

        def waiting_for() -> str:
            return "a message from " + self._connections.names([p.rank for p in sources if not p.left])

        while True:
            self._wait(ready, waiting_for, [p for p in sources if not p.left])
            peer = self._first(sources)
            if peer is None:
                return Done(None)
            message = peer.arrived.popleft()
            self._next_source = peer.rank + 1
            self._make_room(peer)
            if isinstance(message, Message):
                if peer.rank not in self._near:
                    self._traffic.received += message.x.numel() * message.x.element_size()
                return Done(message)
            peer.left = True
            if op.departures:
                return Done(message)

    def send_piece(self, to: int, x: Tensor, weight: float) -> Handle[None]:
        """Send a part of a collective, from the sender's own memory."""
        peer = self._peers[to]
        self._connections.post(peer, wire.Kind.PIECE, wire.body_of(x), x, Send(to, x, weight=weight))
        return _LentVector(self, peer)

    def receive_piece(self, source: int) -> Message:
        """Take the next part of a collective from another node."""
        peer = self._peers[source]
        name = self._connections.names([source])
        self._wait(lambda: bool(peer.pieces), lambda: f"{name} to take part in a collective", [peer])
        piece = peer.pieces.popleft()
        self._make_room(peer)
        return piece

    def sleep(self, op: Sleep) -> bool:
        """Sleep for a while; return whether it was not cut short by a message of a node in `op.cancel_on`."""
        until = time.perf_counter() + op.seconds
        disturbing = [self._peers[node] for node in op.cancel_on.members] if op.cancel_on is not None else []
        while self._first(disturbing) is None:
            left = until - time.perf_counter()
            if left <= 0:
                return True
            with self._showing(SLEEPING):
                self._connections.pump(left)
        return False

    def _first(self, peers: Sequence[Connection]) -> Connection | None:
        """Return a connection with a message, in turn: the one served last is looked at last."""
        for i in range(len(peers)):
            peer = peers[(self._next_source + i) % len(peers)]
            if peer.arrived:
                return peer
        return None

    def _make_room(self, peer: Connection) -> None:
        """After a message was taken: read further messages, for which there was no room."""
        self._connections.read(peer)
        self._connections.watch(peer)

    def _accept(self, peer: Connection, frame: wire.Frame, body: Tensor) -> None:
        """Handle a complete frame."""
        match frame.kind:
            case wire.Kind.CONTROL:
                control = wire.read_control(body)
                peer.closing = peer.closing or control == _BYE
                if not peer.closing:
                    self._listener.on_control(peer.rank, control)
            case wire.Kind.FILE:
                self._listener.on_file_piece(peer.rank, bytes(wire.body_of(body)))
            case wire.Kind.FAREWELL:
                peer.arrived.append(Departed(peer.rank))
            case _:
                about = (frame.version, frame.weight, frame.tag, frame.stamp, frame.progress)
                message = Message(peer.rank, body, *about)
                (peer.pieces if frame.kind == wire.Kind.PIECE else peer.arrived).append(message)

    # The run as a whole.

    def send_control(self, to: int, control: dict[str, Any]) -> None:
        """Send a control message; the other node reads it when it next waits, after this node's earlier messages."""
        peer = self._peers[to]
        if peer.lost is None:
            text = bytearray(json.dumps(control).encode())
            x = torch.empty(len(text), dtype=torch.uint8)
            self._connections.post(peer, wire.Kind.CONTROL, memoryview(text), x, None)

    def send_control_to_all(self, control: dict[str, Any]) -> None:
        """Send a control message to every other node."""
        for node in self._peers:
            self.send_control(node, control)

    def send_file(self, to: int, data: bytes) -> None:
        """Send the bytes that a control message has announced."""
        peer, most = self._peers[to], wire.LONGEST[wire.Kind.FILE]
        for start in range(0, len(data), most):
            piece = memoryview(bytearray(data[start : start + most]))
            self._connections.post(peer, wire.Kind.FILE, piece, torch.empty(len(piece), dtype=torch.uint8), None)
            self._flush(peer)

    def ring(self, node: int) -> None:
        """Do nothing: a node that waits reads at once what was sent."""

    def is_closing(self, node: int) -> bool:
        """Whether a node has said that it closes its connections."""
        return self._peers[node].closing

    def has_mail(self, node: int | None = None) -> bool:
        """Whether an unread message from a node, or from any node, is here."""
        return any(peer.arrived for peer in self._peers.values() if node in (None, peer.rank))

    def watch_connections(self, seconds: float) -> None:
        """Read and write for a while, and for as long as a connection is being replaced."""
        began = time.perf_counter()
        while time.perf_counter() - began < seconds or self._connections.reconnecting:
            self._connections.send_heartbeats(began)
            self._connections.pump(_SLICE)

    def poll(self, *, watch: bool = False) -> None:
        """Read what has arrived, without waiting. `watch`: look for processes of this machine that hang."""
        self._listener.on_waiting()
        others, waits = [*self._peers.values()], self._neighbours.doing == WAITING
        if waits:
            self._keep_waiting(self._waiting_since, lambda: "a mean of all workers")
        if watch or waits:
            self._neighbours.look(others, self._waiting_since if waits else time.perf_counter())
        self._connections.pump(0.0)

    def wait_until(
        self,
        ready: Callable[[], bool],
        waiting_for: Callable[[], str],
        *,
        forever: bool = False,
        starting: bool = False,
    ) -> None:
        """Wait for something that concerns the run; messages that no op has asked for yet do not block it.

        Processes of this machine that hang are detected meanwhile, unless the run is only `starting`.
        """
        self._connections.ahead = 1 << 30
        try:
            for peer in self._peers.values():
                self._connections.watch(peer)
            self._wait(ready, waiting_for, [], forever=forever, watched=() if starting else [*self._peers.values()])
        finally:
            self._connections.ahead = AHEAD
            for peer in self._peers.values():
                self._connections.watch(peer)

    # Waiting.

    def _wait(
        self,
        ready: Callable[[], bool],
        waiting_for: Callable[[], str],
        needed: Sequence[Connection],
        *,
        forever: bool = False,
        watched: Sequence[Connection] = (),
    ) -> None:  # fmt: skip
        began = time.perf_counter()
        while not ready():
            self._listener.on_waiting()
            for peer in needed:
                self._connections.require(peer)
            self._keep_waiting(began, waiting_for, forever=forever)
            self._neighbours.look(watched or needed, began)
            with self._showing(WAITING):
                self._connections.pump(_SLICE)
        self._traffic.waited += time.perf_counter() - began

    def _keep_waiting(self, began: float, waiting_for: Callable[[], str], *, forever: bool = False) -> None:
        """Send heartbeats; raise if this node has waited too long since a process of this machine last worked.

        The node that this one waits for may itself wait for the process that works, or has just ended its work.
        """
        self._connections.send_heartbeats(began)
        patience, now = self._connections.patience, time.perf_counter()
        if any(map(is_at_work, self._peers.values())):
            self._worked = now
        if not forever and now - max(began, self._worked) > patience:
            raise Stalled(f"{self._connections.names([self._rank])} waited {patience:g} s for {waiting_for()}.")

    def begin(self) -> None:
        """Begin the run: from now on the durations of steps determine when a node hangs."""
        self._neighbours.begin()

    def stepped(self, step: int) -> None:
        """Show the processes of this machine which step this node is in."""
        self._neighbours.stepped(step)

    def judge_only_while_waiting(self, waiters: Sequence[int]) -> None:
        """Let no process hang, whatever it does, unless one of these nodes waits."""
        self._neighbours.judge_only_while_waiting(waiters)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Show that this node waits for others by other means; `poll` then looks for processes that hang."""
        self._waiting_since = time.perf_counter()
        with self._showing(WAITING):
            yield

    @contextmanager
    def _showing(self, doing: int) -> Iterator[None]:
        """Show the processes of this machine that this node waits or sleeps, and so does not hang."""
        before = self._neighbours.doing
        self._neighbours.show(doing)
        try:
            yield
        finally:
            self._neighbours.show(before)

    def close(self, *, within: float = 2.0) -> None:
        """Send what is left and close all connections, within so many seconds even if other nodes do not read."""
        self._listener = NoListener()
        for peer in self._peers.values():
            peer.pid = None  # from now on, no process is watched
        until = time.monotonic() + within
        for peer in self._peers.values():
            with suppress(Stalled, WorkerLost):
                self.send_control(peer.rank, _BYE)
                self._connections.patience = max(0.0, until - time.monotonic())
                self._flush(peer)
        self._connections.close(until)


@dataclass(slots=True)
class _LentVector:
    """A message that is sent from the sender's own memory."""

    messenger: Messenger
    peer: Connection

    def wait(self) -> None:
        """Block until the kernel has the last byte."""
        self.messenger._flush(self.peer)
