# SPDX-License-Identifier: Apache-2.0
"""One end of a connection between two nodes: what was sent and what came, message by message.

Every message has a number, and says how many of the other's were here when it was sent. Where connections may break,
what was sent is kept until the other end is known to have it, and sent again over a new connection from the first
message that is missing there: none is lost, and none comes twice.
"""

from __future__ import annotations

import contextlib
import mmap
import socket
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from orchestra.core.ops import Departed, Message, Send
from orchestra.errors import WorkerLost
from orchestra.worlds.sockets import wire
from orchestra.worlds.sockets.shm_ring import RingWriter

# A connection over which nothing goes is looked at by the kernel, also while the process computes. How long nobody may
# answer is what the last one says: it also counts while the other end has no room because it computes.
_KEEPALIVE = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_USER_TIMEOUT", 300_000))
# Of the kernel's tcp_info: segments that are not acknowledged, milliseconds since anything was heard from there.
_UNACKED_AND_HEARD = struct.Struct("<24xI28xI")
_AHEAD = 4  # messages
_OWED = 2, 256 << 10  # messages, bytes after which the other end is told that they are here


@dataclass(eq=False)
class Connection:
    """A connection to another node."""

    rank: int
    sock: socket.socket
    apart: bool = False  # on another machine
    keeps: bool = False  # it may break, and be made anew
    outlet: RingWriter | None = None  # memory that both see, if there is any
    inlet: mmap.mmap | None = None
    pid: int | None = None  # of a process of this machine
    out: deque[memoryview] = field(default_factory=deque)  # bytes still to be sent
    unheard: deque[tuple[int, list[memoryview]]] = field(default_factory=deque)  # messages the other may not have
    sent: int = 0  # messages
    taken: int = 0  # messages
    told: int = 0  # of those taken, as many as the other end knows of
    owed: int = 0  # bytes of the rest
    arrived: deque[Message | Departed] = field(default_factory=deque)
    pieces: deque[Message] = field(default_factory=deque)  # likewise, of what a whole group does
    left: bool = False  # it sends nothing more
    gone: bool = False  # it has said so
    lost: WorkerLost | None = None  # why nothing can be sent to it or come from it
    parted: float | None = None  # since when the connection is broken, and
    why: str = ""
    missed: bool = False  # and people were told
    failing: OSError | None = None  # nothing more can be sent, but its last words may lie here
    reading: bool = False  # somebody takes in what has come
    damaged: int = 0  # messages that did not come as they were sent
    calls: int = 0  # of the other end, for a new connection
    header: bytearray = field(default_factory=lambda: bytearray(wire.LENGTH))
    frame: wire.Frame | None = None  # of the body that is being read
    body: Tensor = field(default_factory=lambda: torch.empty(0))
    room: memoryview = field(init=False)  # where the next bytes go
    watched: int = 0  # what the selector looks at

    def __post_init__(self) -> None:
        self._use(self.sock)

    def _use(self, sock: socket.socket) -> None:
        self.sock, self.frame, self.room = sock, None, memoryview(self.header)
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sock.family == socket.AF_UNIX:
            return
        for name, value in _KEEPALIVE:
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    @property
    def kept(self) -> int:
        """Messages that nobody has asked for yet."""
        return len(self.arrived) + len(self.pieces)

    @property
    def owes(self) -> bool:
        """Whether the other end should be told how far this one is."""
        messages, nbytes = _OWED
        return self.taken - self.told >= messages or self.owed >= nbytes

    @property
    def ahead(self) -> bool:
        """Whether so much was sent that it should be seen how far the other end is."""
        return len(self.unheard) > _AHEAD or (self.outlet is not None and self.outlet.holds > 1)

    def silence(self) -> float:
        """Seconds for which the other machine owes a sign of life; its kernel gives them while the process computes.

        One without room for more owes none: it is asked more and more rarely.
        """
        try:
            told = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNACKED_AND_HEARD.size)
            unacknowledged, milliseconds = _UNACKED_AND_HEARD.unpack(told)
        except (OSError, AttributeError, struct.error):
            return 0.0
        return float(milliseconds) / 1000 if unacknowledged else 0.0

    # Sending.

    def post(self, me: int, run: int, kind: int, body: memoryview, x: Tensor, op: Send | None, *, summed: bool) -> None:
        """Have a message sent. Where it is kept or laid into common memory, `body` may change at once."""
        place = None if self.outlet is None else self.outlet.put(self.sent, body)
        about = (op.tag, op.version, op.weight, op.stamp, op.progress) if op is not None else ()
        frame = wire.Frame(kind, me, self.sent, x.dtype, x.numel(), *about)
        inline = place is None and len(body) > 0
        frame = frame._replace(
            check=wire.sum_of(body) if summed and inline else 0,
            heard=self.taken,
            place=wire.INLINE if place is None else place,
        )
        parts = [memoryview(wire.encode(frame, run))]
        if inline:
            parts.append(memoryview(bytes(body)) if self.keeps else body)
        if self.keeps:
            self.unheard.append((self.sent, parts))
        self.sent += 1
        self.out.extend(parts)
        self.told, self.owed = self.taken, 0

    def beat(self, me: int, run: int) -> None:
        """Give a sign of life, and say how far this end is; not if something waits to be sent anyway."""
        if not self.out and self.parted is None and self.failing is None:
            self.out.append(
                memoryview(wire.encode(wire.Frame(wire.Kind.HEARTBEAT, me, self.sent, heard=self.taken), run))
            )
            self.told, self.owed = self.taken, 0

    def write(self) -> None:
        """Send as much as the kernel takes."""
        while self.out:
            done = self.sock.send(self.out[0])
            if done == len(self.out[0]):
                self.out.popleft()
            else:
                self.out[0] = self.out[0][done:]

    def _hear(self, heard: int) -> None:
        """The other end has so many messages."""
        if heard > self.sent:
            raise wire.BadFrame(f"node {self.rank} says it has {heard} messages, but was sent {self.sent}")
        while self.unheard and self.unheard[0][0] < heard:
            self.unheard.popleft()
        if self.outlet is not None:
            self.outlet.free(heard)

    # Receiving.

    def read(self, run: int, *, largest: int, ahead: int, summed: bool) -> Iterator[tuple[wire.Frame, Tensor]]:
        """What has come, message by message, as long as there is room; an error says that no more is here."""
        while self.kept < ahead and self.lost is None:
            if len(self.room):
                count = self.sock.recv_into(self.room)
                if not count:
                    raise ConnectionResetError("it closed the connection")
                self.room = self.room[count:]
            elif (came := self._complete(run, largest, summed=summed)) is not None:
                yield came

    def _complete(self, run: int, largest: int, *, summed: bool) -> tuple[wire.Frame, Tensor] | None:
        """A header or a body is whole."""
        frame = self.frame
        if frame is None:
            frame = wire.decode(self.header, run, source=self.rank, number=self.taken, largest=largest)
            if frame.kind == wire.Kind.HEARTBEAT:
                self._hear(frame.heard)
                self.room = memoryview(self.header)
                return None
            self.frame, self.body = frame, torch.empty(frame.numel, dtype=frame.dtype)
            self.room = memoryview(b"") if frame.place != wire.INLINE else wire.body_of(self.body)
            if len(self.room):
                return None
        if frame.place != wire.INLINE:
            self._fetch(frame)
        elif summed:
            wire.checked(frame, wire.body_of(self.body))
        self._hear(frame.heard)
        self.taken += 1
        self.owed += frame.nbytes
        self.frame, self.room = None, memoryview(self.header)
        return frame, self.body

    def _fetch(self, frame: wire.Frame) -> None:
        """Copy a body out of the memory that both see."""
        stop = frame.place + frame.nbytes
        if self.inlet is None or stop > len(self.inlet):
            raise wire.BadFrame(f"node {self.rank} sent a message that lies where nothing is")
        with memoryview(self.inlet) as memory, memory[frame.place : stop] as found:
            wire.body_of(self.body)[:] = found

    # Breaking off and going on.

    def part(self, now: float, why: str) -> None:
        """The connection is broken: what was half read is dropped, and will come again."""
        self.parted, self.why, self.missed = now, why, False
        self.hang_up()

    def resume(self, sock: socket.socket, heard: int) -> None:
        """Go on over another connection, with the first message that the other end does not have."""
        self._hear(heard)
        self.parted = None
        self._use(sock)
        self.out.clear()
        self.out.extend(part for _, parts in self.unheard for part in parts)

    def hang_up(self) -> None:
        """Nothing more goes over this connection, whoever else may hold it: processes forked since do."""
        self.out.clear()
        self.failing = None
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def close(self) -> None:
        """Nothing more is sent or taken through memory."""
        if self.outlet is not None:
            self.outlet.close()
        if self.inlet is not None:
            self.inlet.close()
