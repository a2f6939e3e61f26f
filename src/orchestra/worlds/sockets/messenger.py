# SPDX-License-Identifier: Apache-2.0
"""Messages between machines: one connection for each pair of nodes, and no thread beside the node's own.

Whoever waits, to send or to receive, reads and writes whatever can be read and written meanwhile: two nodes that send
to each other at the same time both get on. A node that computes takes no part; its kernel holds what comes, and tells
the others that the machine is alive. At most `AHEAD` messages of one sender are taken in before they are asked for.

What concerns the run as a whole travels the same way, in turn with the messages, and is heard as soon as it is read.
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

_BYE = {"kind": "bye"}  # a node's last word: that its connection ends is nothing to worry about
_SLICE = 0.2  # seconds between two looks at the deadline


class Messenger:
    """One node's messages, to and from everybody."""

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
        arranged: Pairing | None = None,
    ) -> None:
        self._listener: Listener = NoListener()
        self._idle_listener: IdleListener | None = None
        self.largest = largest  # bytes of a message
        self._rank, self._traffic, self._near = rank, traffic, near
        self._lines = Connections(
            rank, workers, run, connections, self._accept, self._reconnected,
            largest=largest, patience=patience, summed=summed, arranged=arranged or Pairing(),
        )  # fmt: skip
        self._peers = self._lines.peers
        self._turn = 0
        self._neighbours = Neighbours(rank, self._peers, patience, lambda node: self._lines.names([node]))
        self.begin, self.stepped = self._neighbours.begin, self._neighbours.stepped
        self.judge_only_while_waiting = self._neighbours.judge_only_while_waiting
        self._waits_since = 0.0

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
        """Nodes whose connection broke, and what to say of it."""
        return self._lines.lost

    # Sending.

    def send(self, op: Send) -> Handle[None]:
        """Send a message; unless it is lent, this returns when the kernel has all of it."""
        x = op.x.detach().to("cpu").contiguous()
        body = wire.body_of(x)
        peer = self._peers[op.to]
        self._lines.post(peer, wire.Kind.MESSAGE, body, x, op)
        if op.to not in self._near:
            self._traffic.count(op.to, len(body))
        if op.lend and x.data_ptr() == op.x.data_ptr():
            return _LentVector(self, peer)
        self._flush(peer)
        return Done(None)

    def leave(self, op: Leave) -> Handle[None]:
        """Say farewell to every member of a group."""
        for node in op.group.members:
            peer = self._peers[node]
            self._lines.post(peer, wire.Kind.FAREWELL, memoryview(b""), torch.empty(0), None)
            self._flush(peer)
        return Done(None)

    def _flush(self, peer: Connection) -> None:
        """Wait until the kernel has everything: from there it goes on while this node computes."""
        if peer.out or peer.parted is not None:
            self._wait(
                lambda: not peer.out and peer.parted is None,
                lambda: f"{self._lines.names([peer.rank])} to take a message",
                [peer],
            )

    # Receiving.

    def recv(self, op: Recv) -> Handle[Message | Departed | None]:
        """Take the next message from one node, or from whoever comes first."""
        sources = [self._peers[s] for s in (op.group.members if op.source is None else (op.source,)) if s != self._rank]

        def ready() -> bool:
            if self._first(sources) is not None or all(p.left for p in sources):
                return True
            if self._idle_listener is not None:
                self._idle_listener.on_idle(at_rest=op.at_rest)
            return False

        def whom() -> str:
            return "a message from " + self._lines.names([p.rank for p in sources if not p.left])

        while True:
            self._wait(ready, whom, [p for p in sources if not p.left])
            peer = self._first(sources)
            if peer is None:
                return Done(None)
            came = peer.arrived.popleft()
            self._turn = peer.rank + 1
            self._make_room(peer)
            if isinstance(came, Message):
                if peer.rank not in self._near:
                    self._traffic.received += came.x.numel() * came.x.element_size()
                return Done(came)
            peer.left = True
            if op.departures:
                return Done(came)

    def send_piece(self, to: int, x: Tensor, weight: float) -> Handle[None]:
        """Send a part of what a whole group does, in place."""
        peer = self._peers[to]
        self._lines.post(peer, wire.Kind.PIECE, wire.body_of(x), x, Send(to, x, weight=weight))
        return _LentVector(self, peer)

    def receive_piece(self, source: int) -> Message:
        """The next such part of another node."""
        peer = self._peers[source]
        whose = self._lines.names([source])
        self._wait(lambda: bool(peer.pieces), lambda: f"{whose}, for what all do together", [peer])
        piece = peer.pieces.popleft()
        self._make_room(peer)
        return piece

    def sleep(self, op: Sleep) -> bool:
        """Sleep for a while; whether no message came from those whose messages disturb it."""
        until = time.perf_counter() + op.seconds
        disturbing = [self._peers[node] for node in op.cancel_on.members] if op.cancel_on is not None else []
        while self._first(disturbing) is None:
            left = until - time.perf_counter()
            if left <= 0:
                return True
            with self._doing(SLEEPING):
                self._lines.pump(left)
        return False

    def _first(self, peers: Sequence[Connection]) -> Connection | None:
        """Somebody whose message is here; the one served last comes last, so that nobody is passed over."""
        for i in range(len(peers)):
            peer = peers[(self._turn + i) % len(peers)]
            if peer.arrived:
                return peer
        return None

    def _make_room(self, peer: Connection) -> None:
        """Something was taken away: take in what there was no room for."""
        self._lines.read(peer)
        self._lines.watch(peer)

    def _accept(self, peer: Connection, frame: wire.Frame, body: Tensor) -> None:
        """A message is whole."""
        match frame.kind:
            case wire.Kind.CONTROL:
                said = wire.read_control(body)
                peer.gone = peer.gone or said == _BYE
                if not peer.gone:
                    self._listener.on_control(peer.rank, said)
            case wire.Kind.FILE:
                self._listener.on_file_piece(peer.rank, bytes(wire.body_of(body)))
            case wire.Kind.FAREWELL:
                peer.arrived.append(Departed(peer.rank))
            case _:
                about = (frame.version, frame.weight, frame.tag, frame.stamp, frame.progress)
                message = Message(peer.rank, body, *about)
                (peer.pieces if frame.kind == wire.Kind.PIECE else peer.arrived).append(message)

    # The run as a whole.

    def send_control(self, to: int, said: dict[str, Any]) -> None:
        """Tell a node something; it hears it when it next looks, in turn with this node's messages."""
        peer = self._peers[to]
        if peer.lost is None:
            text = bytearray(json.dumps(said).encode())
            self._lines.post(peer, wire.Kind.CONTROL, memoryview(text), torch.empty(len(text), dtype=torch.uint8), None)

    def send_control_to_all(self, said: dict[str, Any]) -> None:
        """Tell every other node."""
        for node in self._peers:
            self.send_control(node, said)

    def send_file(self, to: int, data: bytes) -> None:
        """Send what was announced by a note."""
        peer, most = self._peers[to], wire.LONGEST[wire.Kind.FILE]
        for start in range(0, len(data), most):
            piece = memoryview(bytearray(data[start : start + most]))
            self._lines.post(peer, wire.Kind.FILE, piece, torch.empty(len(piece), dtype=torch.uint8), None)
            self._flush(peer)

    def ring(self, node: int) -> None:
        """Nothing to do: who waits hears at once what was sent."""

    def is_gone(self, node: int) -> bool:
        """Whether a node has said that it leaves."""
        return self._peers[node].gone

    def has_mail(self, node: int | None = None) -> bool:
        """Whether a message from a node, or from any, lies here unread."""
        return any(peer.arrived for peer in self._peers.values() if node in (None, peer.rank))

    def watch_connections(self, seconds: float) -> None:
        """Hear what is said, and see who is there: for a while, and for as long as somebody is sought."""
        began = time.perf_counter()
        while time.perf_counter() - began < seconds or self._lines.seeks:
            self._lines.give_signs(began)
            self._lines.pump(_SLICE)

    def poll(self, *, watch: bool = False) -> None:
        """Take in what has come, without waiting. `watch`: look for processes of this machine that hang."""
        self._listener.on_waiting()
        others, waits = [*self._peers.values()], self._neighbours.doing == WAITING
        if waits:
            self._go_on_waiting(self._waits_since, lambda: "a mean of all workers")
        if watch or waits:
            self._neighbours.look(others, self._waits_since if waits else time.perf_counter())
        self._lines.pump(0.0)

    def wait_until(
        self, ready: Callable[[], bool], whom: Callable[[], str], *, forever: bool = False, starting: bool = False
    ) -> None:
        """Wait for something that concerns the run: messages that no op has asked for yet do not block it.

        Processes of this machine that hang are found meanwhile, unless the run is only `starting`.
        """
        self._lines.ahead = 1 << 30
        try:
            for peer in self._peers.values():
                self._lines.watch(peer)
            self._wait(ready, whom, [], forever=forever, watched=() if starting else [*self._peers.values()])
        finally:
            self._lines.ahead = AHEAD
            for peer in self._peers.values():
                self._lines.watch(peer)

    # Waiting.

    def _wait(
        self,
        ready: Callable[[], bool],
        whom: Callable[[], str],
        needed: Sequence[Connection],
        *,
        forever: bool = False,
        watched: Sequence[Connection] = (),
    ) -> None:  # fmt: skip
        began = time.perf_counter()
        while not ready():
            self._listener.on_waiting()
            for peer in needed:
                self._lines.require(peer)
            self._go_on_waiting(began, whom, forever=forever)
            self._neighbours.look(watched or needed, began)
            with self._doing(WAITING):
                self._lines.pump(_SLICE)
        self._traffic.waited += time.perf_counter() - began

    def _go_on_waiting(self, began: float, whom: Callable[[], str], *, forever: bool = False) -> None:
        """Show other machines that this node is there. Raise if it waits too long, and none of its machine works.

        Whom this node waits for may wait itself for the one that works.
        """
        self._lines.give_signs(began)
        overdue = time.perf_counter() - began > self._lines.patience
        if not forever and overdue and not any(map(is_at_work, self._peers.values())):
            raise Stalled(f"{self._lines.names([self._rank])} waited {self._lines.patience:g} s for {whom()}.")

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Show that this node waits for others by other means; `poll` then looks whether they are there."""
        self._waits_since = time.perf_counter()
        with self._doing(WAITING):
            yield

    @contextmanager
    def _doing(self, what: int) -> Iterator[None]:
        """Show the processes of this machine that this node waits or sleeps, and so does not hang."""
        before = self._neighbours.doing
        self._neighbours.show(what)
        try:
            yield
        finally:
            self._neighbours.show(before)

    def close(self, *, within: float = 2.0) -> None:
        """Send what is left, and hang up; after so many seconds even if somebody does not listen."""
        self._listener = NoListener()
        for peer in self._peers.values():
            peer.pid = None  # from now on nothing of theirs matters
        until = time.monotonic() + within
        for peer in self._peers.values():
            with suppress(Stalled, WorkerLost):
                self.send_control(peer.rank, _BYE)
                self._lines.patience = max(0.0, until - time.monotonic())
                self._flush(peer)
        self._lines.close(until)


@dataclass(slots=True)
class _LentVector:
    """A message that is sent from the sender's own memory."""

    messenger: Messenger
    peer: Connection

    def wait(self) -> None:
        """Block until the kernel has the last byte."""
        self.messenger._flush(self.peer)
