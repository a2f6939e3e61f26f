# SPDX-License-Identifier: Apache-2.0
"""Messages between machines: one connection for each pair of nodes, and no thread beside the node's own.

Whoever waits, to send or to receive, reads and writes whatever can be read and written meanwhile: two nodes that send
to each other at the same time both get on. A node that computes takes no part; its kernel holds what comes, and tells
the others that the machine is alive. At most `_AHEAD` messages of one sender are taken in before they are asked for.
"""

from __future__ import annotations

import selectors
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from orchestra.board import name_of
from orchestra.errors import Stalled, WorkerLost
from orchestra.ops import Departed, Done, Handle, Leave, Message, Recv, Send, Sleep, Traffic
from orchestra.transports import wire

_AHEAD = 8  # messages
_SLICE = 0.2  # seconds between two looks at the deadline
_BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_KEEPALIVE = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 5000))


@dataclass(eq=False)
class Peer:
    """A connection to another node."""

    rank: int
    sock: socket.socket
    out: deque[memoryview] = field(default_factory=deque)  # bytes still to be sent
    sent: int = 0  # messages
    taken: int = 0  # messages
    arrived: deque[Message | Departed] = field(default_factory=deque)
    pieces: deque[Message] = field(default_factory=deque)  # likewise, of what a whole group does
    left: bool = False  # it sends nothing more
    lost: str | None = None  # why nothing can be sent to it or come from it
    header: bytearray = field(default_factory=lambda: bytearray(wire.LENGTH))
    frame: wire.Frame | None = None  # of the body that is being read
    body: Tensor = field(default_factory=lambda: torch.empty(0))
    room: memoryview = field(init=False)  # where the next bytes go
    watched: int = 0  # what the selector looks at

    def __post_init__(self) -> None:
        self.room = memoryview(self.header)
        self.sock.setblocking(False)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            if hasattr(socket, name):
                self.sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    @property
    def kept(self) -> int:
        """Messages that nobody has asked for yet."""
        return len(self.arrived) + len(self.pieces)


class Exchange:
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
    ) -> None:
        self.when_idle: Callable[[], None] = lambda: None  # before this node sleeps for want of a message
        self.when_at_rest: Callable[[], None] = lambda: None  # likewise, if it is as it was after its last step
        self._rank, self._workers, self._run = rank, workers, run
        self._largest, self._patience = largest, patience
        self._summed = summed  # bodies are checked here, since nothing below does
        self._traffic, self._near = traffic, near
        self._selector = selectors.DefaultSelector()
        self._peers = {node: Peer(node, sock) for node, sock in connections.items()}
        self._turn = 0
        for peer in self._peers.values():
            self._watch(peer)

    # Sending.

    def send(self, op: Send) -> Handle[None]:
        """Send a message; unless it is lent, this returns when the kernel has all of it."""
        x = op.x.detach().to("cpu").contiguous()
        body = wire.body_of(x)
        peer = self._peers[op.to]
        self._post(peer, wire.BODY, body, x, op)
        if op.to not in self._near:
            self._traffic.sent += len(body)
        if op.lend and x.data_ptr() == op.x.data_ptr():
            return _Lent(self, peer)
        self._flush(peer)
        return Done(None)

    def leave(self, op: Leave) -> Handle[None]:
        """Say farewell to every member of a group."""
        for node in op.group.members:
            peer = self._peers[node]
            self._post(peer, wire.FAREWELL, memoryview(b""), torch.empty(0), None)
            self._flush(peer)
        return Done(None)

    def _post(self, peer: Peer, kind: int, body: memoryview, x: Tensor, op: Send | None) -> None:
        self._require(peer)
        about = (op.tag, op.version, op.weight, op.stamp) if op is not None else ()
        frame = wire.Frame(kind, self._rank, peer.sent, x.dtype, x.numel(), *about)
        peer.sent += 1
        header = wire.encode(frame._replace(check=wire.sum_of(body) if self._summed else 0), self._run)
        idle = not peer.out
        peer.out.extend([memoryview(header), body] if len(body) else [memoryview(header)])
        if idle:
            self._write(peer)
        self._watch(peer)

    def _flush(self, peer: Peer) -> None:
        """Wait until the kernel has everything: from there it goes on while this node computes."""
        if peer.out:
            self._wait(lambda: not peer.out, lambda: f"{self._names([peer.rank])} to take a message", [peer])

    def _write(self, peer: Peer) -> None:
        try:
            while peer.out:
                done = peer.sock.send(peer.out[0])
                if done == len(peer.out[0]):
                    peer.out.popleft()
                else:
                    peer.out[0] = peer.out[0][done:]
        except _BLOCKED:
            pass
        except OSError as error:
            self._lose(peer, error)

    # Receiving.

    def recv(self, op: Recv) -> Handle[Message | Departed | None]:
        """Take the next message from one node, or from whoever comes first."""
        sources = [self._peers[s] for s in (op.group.members if op.source is None else (op.source,)) if s != self._rank]

        def ready() -> bool:
            if self._first(sources) is not None or all(p.left for p in sources):
                return True
            if op.at_rest:
                self.when_at_rest()
            self.when_idle()
            return False

        def whom() -> str:
            return "a message from " + self._names([p.rank for p in sources if not p.left])

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

    def give(self, to: int, x: Tensor, weight: float) -> Handle[None]:
        """Send a part of what a whole group does, in place."""
        peer = self._peers[to]
        self._post(peer, wire.PIECE, wire.body_of(x), x, Send(to, x, weight=weight))
        return _Lent(self, peer)

    def take(self, source: int) -> Message:
        """The next such part of another node."""
        peer = self._peers[source]
        self._wait(lambda: bool(peer.pieces), lambda: f"{self._names([source])}, for what all do together", [peer])
        piece = peer.pieces.popleft()
        self._make_room(peer)
        return piece

    def sleep(self, op: Sleep) -> bool:
        """Sleep for a while; whether no message came from those whose messages disturb it."""
        until = time.perf_counter() + op.seconds
        disturbing = [self._peers[node] for node in op.unless.members] if op.unless is not None else []
        while self._first(disturbing) is None:
            left = until - time.perf_counter()
            if left <= 0:
                return True
            self._pump(left)
        return False

    def _first(self, peers: Sequence[Peer]) -> Peer | None:
        """Somebody whose message is here; the one served last comes last, so that nobody is passed over."""
        for i in range(len(peers)):
            peer = peers[(self._turn + i) % len(peers)]
            if peer.arrived:
                return peer
        return None

    def _read(self, peer: Peer) -> None:
        """Take in what has come, as far as there is room for it."""
        try:
            while peer.kept < _AHEAD and peer.lost is None:
                if not len(peer.room):
                    self._complete(peer)
                    continue
                count = peer.sock.recv_into(peer.room)
                if not count:
                    raise ConnectionResetError("it closed the connection")
                peer.room = peer.room[count:]
        except _BLOCKED:
            pass
        except (OSError, wire.BadFrame) as error:
            self._lose(peer, error)

    def _make_room(self, peer: Peer) -> None:
        """Something was taken away: take in what there was no room for."""
        self._read(peer)
        self._watch(peer)

    def _complete(self, peer: Peer) -> None:
        """A header or a body is whole."""
        frame = peer.frame
        if frame is None:
            frame = wire.decode(peer.header, self._run, source=peer.rank, number=peer.taken, largest=self._largest)
            peer.taken += 1
            peer.frame = frame
            peer.body = torch.empty(frame.numel, dtype=frame.dtype)
            peer.room = wire.body_of(peer.body)
            if frame.nbytes:
                return
        if self._summed:
            wire.checked(frame, wire.body_of(peer.body))
        message = Message(peer.rank, peer.body, frame.version, frame.weight, frame.tag, frame.stamp)
        if frame.kind == wire.PIECE:
            peer.pieces.append(message)
        else:
            peer.arrived.append(Departed(peer.rank) if frame.kind == wire.FAREWELL else message)
        peer.frame, peer.room = None, memoryview(peer.header)

    # Waiting.

    def _wait(self, ready: Callable[[], bool], whom: Callable[[], str], needed: Sequence[Peer]) -> None:
        began = time.perf_counter()
        while not ready():
            for peer in needed:
                self._require(peer)
            if time.perf_counter() - began > self._patience:
                raise Stalled(f"{self._names([self._rank])} waited {self._patience:g} s for {whom()}.")
            self._pump(_SLICE)
        self._traffic.waited += time.perf_counter() - began

    def _pump(self, seconds: float) -> None:
        """Read and write what can be, once there is something; or give up after some time."""
        for key, events in self._selector.select(seconds):
            peer: Peer = key.data
            if events & selectors.EVENT_WRITE:
                self._write(peer)
            if events & selectors.EVENT_READ:
                self._read(peer)
            self._watch(peer)

    def _watch(self, peer: Peer) -> None:
        """Have the selector look at what this node could do with a connection."""
        wanted = 0
        if peer.lost is None:
            wanted |= selectors.EVENT_READ if peer.kept < _AHEAD else 0
            wanted |= selectors.EVENT_WRITE if peer.out else 0
        if wanted == peer.watched:
            return
        if not wanted:
            self._selector.unregister(peer.sock)
        elif not peer.watched:
            self._selector.register(peer.sock, wanted, peer)
        else:
            self._selector.modify(peer.sock, wanted, peer)
        peer.watched = wanted

    def _require(self, peer: Peer) -> None:
        if peer.lost is not None and not peer.kept:
            raise WorkerLost(name_of(peer.rank, self._workers), peer.lost)

    def _lose(self, peer: Peer, error: Exception) -> None:
        """Nothing more can come or go: of consequence only if somebody still needs it."""
        peer.lost = f"its connection to {self._names([self._rank])} broke: {error}"
        peer.out.clear()
        self._watch(peer)
        peer.sock.close()

    def _names(self, nodes: Sequence[int]) -> str:
        return ", ".join(name_of(node, self._workers) for node in nodes) or "nobody"

    def close(self) -> None:
        """Send what is left, and hang up."""
        for peer in self._peers.values():
            if peer.lost is None:
                self._flush(peer)
                peer.sock.close()
        self._selector.close()


@dataclass(slots=True)
class _Lent:
    """A message that is sent from the sender's own memory."""

    exchange: Exchange
    peer: Peer

    def wait(self) -> None:
        """Block until the kernel has the last byte."""
        self.exchange._flush(self.peer)
