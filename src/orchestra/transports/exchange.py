# SPDX-License-Identifier: Apache-2.0
"""Messages between machines: one connection for each pair of nodes, and no thread beside the node's own.

Whoever waits, to send or to receive, reads and writes whatever can be read and written meanwhile: two nodes that send
to each other at the same time both get on. A node that computes takes no part; its kernel holds what comes, and tells
the others that the machine is alive. At most `_AHEAD` messages of one sender are taken in before they are asked for.

What concerns the run as a whole travels the same way, in turn with the messages, and is heard as soon as it is read.
"""

from __future__ import annotations

import json
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orchestra.board import name_of
from orchestra.errors import Stalled, WorkerLost
from orchestra.ops import Departed, Done, Handle, Leave, Message, Recv, Send, Sleep, Traffic
from orchestra.transports import wire
from orchestra.transports.peer import Peer

_AHEAD = 8  # messages
_BYE = {"kind": "bye"}  # a node's last word: that its connection ends is nothing to worry about
_SLICE = 0.2  # seconds between two looks at the deadline
_BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


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
        self.when_waiting: Callable[[], None] = lambda: None  # now and then, for as long as it waits
        self.hear: Callable[[int, dict[str, Any]], None] = lambda source, said: None  # a word on the run as a whole
        self.lost: dict[int, str] = {}  # nodes whose connection broke, and how
        self.take_in: Callable[[int, bytes], None] = lambda source, piece: None  # of a file that was announced
        self._rank, self._workers, self._run = rank, workers, run
        self._largest, self._patience = largest, patience
        self._summed = summed  # bodies are checked here, since nothing below does
        self._traffic, self._near = traffic, near
        self._selector = selectors.DefaultSelector()
        self._peers = {node: Peer(node, sock) for node, sock in connections.items()}
        self._turn = 0
        self._ahead = _AHEAD
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
            self._read(peer)  # its last words may say why
            if peer.lost is None:
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
            while peer.kept < self._ahead and peer.lost is None:
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
        body, peer.frame, peer.room = peer.body, None, memoryview(peer.header)
        match frame.kind:
            case wire.NOTE:
                said = wire.read_note(body)
                peer.gone = peer.gone or said == _BYE
                if not peer.gone:
                    self.hear(peer.rank, said)
            case wire.FILE:
                self.take_in(peer.rank, bytes(wire.body_of(body)))
            case wire.FAREWELL:
                peer.arrived.append(Departed(peer.rank))
            case _:
                message = Message(peer.rank, body, frame.version, frame.weight, frame.tag, frame.stamp)
                (peer.pieces if frame.kind == wire.PIECE else peer.arrived).append(message)

    # The run as a whole.

    def note(self, to: int, said: dict[str, Any]) -> None:
        """Tell a node something; it hears it when it next looks, in turn with this node's messages."""
        peer = self._peers[to]
        if peer.lost is None:
            text = bytearray(json.dumps(said).encode())
            self._post(peer, wire.NOTE, memoryview(text), torch.empty(len(text), dtype=torch.uint8), None)

    def tell_all(self, said: dict[str, Any]) -> None:
        """Tell every other node."""
        for node in self._peers:
            self.note(node, said)

    def ship(self, to: int, data: bytes) -> None:
        """Send what was announced by a note."""
        peer, most = self._peers[to], wire.LONGEST[wire.FILE]
        for start in range(0, len(data), most):
            piece = memoryview(bytearray(data[start : start + most]))
            self._post(peer, wire.FILE, piece, torch.empty(len(piece), dtype=torch.uint8), None)
            self._flush(peer)

    def ring(self, node: int) -> None:
        """Nothing to do: who waits hears at once what was sent."""

    def is_gone(self, node: int) -> bool:
        """Whether a node has said that it leaves."""
        return self._peers[node].gone

    def has_mail(self) -> bool:
        """Whether a message from anybody lies here unread."""
        return any(peer.arrived for peer in self._peers.values())

    def poll(self) -> None:
        """Take in what has come, without waiting."""
        self.when_waiting()
        self._pump(0.0)

    def attend(self, ready: Callable[[], bool], whom: Callable[[], str], *, forever: bool = False) -> None:
        """Wait for something that concerns the run: messages nobody asked for yet must not stand in its way."""
        self._ahead = 1 << 30
        try:
            for peer in self._peers.values():
                self._watch(peer)
            self._wait(ready, whom, [], forever=forever)
        finally:
            self._ahead = _AHEAD
            for peer in self._peers.values():
                self._watch(peer)

    # Waiting.

    def _wait(
        self, ready: Callable[[], bool], whom: Callable[[], str], needed: Sequence[Peer], *, forever: bool = False
    ) -> None:
        began = time.perf_counter()
        while not ready():
            self.when_waiting()
            for peer in needed:
                self._require(peer)
            if not forever and time.perf_counter() - began > self._patience:
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
            wanted |= selectors.EVENT_READ if peer.kept < self._ahead else 0
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
        if not peer.gone:
            self.lost[peer.rank] = peer.lost
        peer.out.clear()
        self._watch(peer)
        peer.sock.close()

    def _names(self, nodes: Sequence[int]) -> str:
        return ", ".join(name_of(node, self._workers) for node in nodes) or "nobody"

    def close(self, *, within: float = 2.0) -> None:
        """Send what is left, and hang up; after so many seconds even if somebody does not listen."""
        self.when_waiting, self.hear = (lambda: None), (lambda source, said: None)
        self._patience = within
        until = time.monotonic() + within
        for peer in self._peers.values():
            with suppress(Stalled, WorkerLost):
                self.note(peer.rank, _BYE)
                self._flush(peer)
        for peer in self._peers.values():
            if peer.lost is None:
                _hang_up(peer.sock, until)
        self._selector.close()


def _hang_up(sock: socket.socket, until: float) -> None:
    """Close a connection once the other end has read everything.

    Closed with something unread here, it would be reset, and what was sent last lost on the way.
    """
    with suppress(OSError), closing(sock):
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(max(0.01, until - time.monotonic()))
        while time.monotonic() < until and sock.recv(1 << 16):
            pass


@dataclass(slots=True)
class _Lent:
    """A message that is sent from the sender's own memory."""

    exchange: Exchange
    peer: Peer

    def wait(self) -> None:
        """Block until the kernel has the last byte."""
        self.exchange._flush(self.peer)
