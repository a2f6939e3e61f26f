# SPDX-License-Identifier: Apache-2.0
"""One end of a connection between two nodes: the frames sent and received, and what is left to send.

Every frame has a number, and says how many frames of the other end had been received when it was sent. Where a
connection may be replaced after it broke, sent frames are kept until the other end has acknowledged them. After a
reconnection the first missing frame and all later ones are sent again: no frame is lost, and none is delivered twice.
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

# The kernel probes an idle connection, also while the process computes. The last option is how long the other end may
# leave data unacknowledged; it also counts while its buffers are full because its process computes.
_KEEPALIVE = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_USER_TIMEOUT", 300_000))
# Of the kernel's tcp_info: the number of unacknowledged segments, and milliseconds since the last one was received.
_UNACKED_AND_HEARD = struct.Struct("<24xI28xI")
_FAR_AHEAD = 4  # frames
_ACK_AFTER_FRAMES, _ACK_AFTER_BYTES = 2, 256 << 10  # received since the last acknowledgement


@dataclass(eq=False)
class Connection:
    """A connection to another node."""

    rank: int
    sock: socket.socket
    remote: bool = False  # the other node is on another machine
    reconnects: bool = False  # the connection may break, and be replaced
    ring_out: RingWriter | None = None  # memory that both nodes map, if they share any
    ring_in: mmap.mmap | None = None
    pid: int | None = None  # of the other process, if it is on this machine
    outgoing: deque[memoryview] = field(default_factory=deque)  # bytes still to be sent
    unacknowledged: deque[tuple[int, list[memoryview]]] = field(default_factory=deque)  # sent frames, by number
    sent: int = 0  # frames
    received: int = 0  # frames
    acknowledged: int = 0  # received frames that were acknowledged to the other end
    received_since: int = 0  # bytes received since then
    arrived: deque[Message | Departed] = field(default_factory=deque)
    pieces: deque[Message] = field(default_factory=deque)  # parts of collectives
    left: bool = False  # the other node sends no more messages of the strategy
    closing: bool = False  # the other node has said that it will close the connection
    lost: WorkerLost | None = None  # the error of a connection that is given up
    broken_at: float | None = None  # when the connection broke, while it is being replaced, and
    cause: str = ""
    reported: bool = False  # whether a warning was printed
    send_error: OSError | None = None  # nothing more can be sent, but received bytes may still be unread
    reading: bool = False  # `Connections` is reading from this connection now
    damaged: int = 0  # frames that were changed on their way
    attempts: int = 0  # the other end's latest attempt to reconnect
    header: bytearray = field(default_factory=lambda: bytearray(wire.LENGTH))
    frame: wire.Frame | None = None  # of the body that is being read
    body: Tensor = field(default_factory=lambda: torch.empty(0))
    space: memoryview = field(init=False)  # where the next received bytes go
    watched: int = 0  # the events that the selector waits for

    def __post_init__(self) -> None:
        self._use(self.sock)

    def _use(self, sock: socket.socket) -> None:
        self.sock, self.frame, self.space = sock, None, memoryview(self.header)
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sock.family == socket.AF_UNIX:
            return
        for name, value in _KEEPALIVE:
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    @property
    def unread(self) -> int:
        """Messages received that this node has not asked for yet."""
        return len(self.arrived) + len(self.pieces)

    @property
    def owes_acknowledgement(self) -> bool:
        """Whether the other end should be told how much was received."""
        return self.received - self.acknowledged >= _ACK_AFTER_FRAMES or self.received_since >= _ACK_AFTER_BYTES

    @property
    def far_ahead(self) -> bool:
        """Whether so much was sent that this end should read acknowledgements first."""
        return len(self.unacknowledged) > _FAR_AHEAD or (self.ring_out is not None and self.ring_out.unread > 1)

    def silence(self) -> float:
        """Return for how many seconds the other machine has left data unacknowledged; its kernel answers by itself.

        A machine whose buffers are full need not acknowledge: the kernel probes it less and less often.
        """
        try:
            info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNACKED_AND_HEARD.size)
            unacknowledged, milliseconds = _UNACKED_AND_HEARD.unpack(info)
        except (OSError, AttributeError, struct.error):
            return 0.0
        return float(milliseconds) / 1000 if unacknowledged else 0.0

    # Sending.

    def post(self, me: int, run: int, kind: int, body: memoryview, x: Tensor, op: Send | None, *, summed: bool) -> None:
        """Append a frame to the outgoing bytes. `body` is copied if frames are kept or it fits into the ring."""
        place = None if self.ring_out is None else self.ring_out.put(self.sent, body)
        about = (op.tag, op.version, op.weight, op.stamp, op.progress) if op is not None else ()
        frame = wire.Frame(kind, me, self.sent, x.dtype, x.numel(), *about)
        inline = place is None and len(body) > 0
        frame = frame._replace(
            check=wire.sum_of(body) if summed and inline else 0,
            received=self.received,
            place=wire.INLINE if place is None else place,
        )
        parts = [memoryview(wire.encode(frame, run))]
        if inline:
            parts.append(memoryview(bytes(body)) if self.reconnects else body)
        if self.reconnects:
            self.unacknowledged.append((self.sent, parts))
        self.sent += 1
        self.outgoing.extend(parts)
        self._note_acknowledged()

    def post_heartbeat(self, me: int, run: int) -> None:
        """Append a frame that shows that this node is alive, with an acknowledgement; not if others are waiting."""
        if not self.outgoing and self.broken_at is None and self.send_error is None:
            frame = wire.Frame(wire.Kind.HEARTBEAT, me, self.sent, received=self.received)
            self.outgoing.append(memoryview(wire.encode(frame, run)))
            self._note_acknowledged()

    def _note_acknowledged(self) -> None:
        self.acknowledged, self.received_since = self.received, 0

    def write(self) -> None:
        """Send as many bytes as the kernel takes."""
        while self.outgoing:
            done = self.sock.send(self.outgoing[0])
            if done == len(self.outgoing[0]):
                self.outgoing.popleft()
            else:
                self.outgoing[0] = self.outgoing[0][done:]

    def _acknowledge(self, received: int) -> None:
        """Forget the frames that the other end has received."""
        if received > self.sent:
            raise wire.BadFrame(f"node {self.rank} acknowledges {received} frames, but {self.sent} were sent")
        while self.unacknowledged and self.unacknowledged[0][0] < received:
            self.unacknowledged.popleft()
        if self.ring_out is not None:
            self.ring_out.free(received)

    # Receiving.

    def read(self, run: int, *, largest: int, ahead: int, summed: bool) -> Iterator[tuple[wire.Frame, Tensor]]:
        """Yield received frames while there is space for them; ends with an error once there is nothing to read."""
        while self.unread < ahead and self.lost is None:
            if len(self.space):
                count = self.sock.recv_into(self.space)
                if not count:
                    raise ConnectionResetError("it closed the connection")
                self.space = self.space[count:]
            elif (came := self._complete(run, largest, summed=summed)) is not None:
                yield came

    def _complete(self, run: int, largest: int, *, summed: bool) -> tuple[wire.Frame, Tensor] | None:
        """Handle a complete header or body; return a frame once its body is complete."""
        frame = self.frame
        if frame is None:
            frame = wire.decode(self.header, run, source=self.rank, number=self.received, largest=largest)
            if frame.kind == wire.Kind.HEARTBEAT:
                self._acknowledge(frame.received)
                self.space = memoryview(self.header)
                return None
            self.frame, self.body = frame, torch.empty(frame.numel, dtype=frame.dtype)
            self.space = memoryview(b"") if frame.place != wire.INLINE else wire.body_of(self.body)
            if len(self.space):
                return None
        if frame.place != wire.INLINE:
            self._copy_from_ring(frame)
        elif summed:
            wire.checked(frame, wire.body_of(self.body))
        self._acknowledge(frame.received)
        self.received += 1
        self.received_since += frame.nbytes
        self.frame, self.space = None, memoryview(self.header)
        return frame, self.body

    def _copy_from_ring(self, frame: wire.Frame) -> None:
        """Copy a body out of the memory that both nodes map."""
        stop = frame.place + frame.nbytes
        if self.ring_in is None or stop > len(self.ring_in):
            raise wire.BadFrame(f"node {self.rank} sent a frame whose body lies outside of the shared memory")
        with memoryview(self.ring_in) as memory, memory[frame.place : stop] as found:
            wire.body_of(self.body)[:] = found

    # Breaking and reconnecting.

    def mark_broken(self, now: float, cause: str) -> None:
        """Close the socket until there is a new one. A half-read frame is dropped: it will be sent again."""
        self.broken_at, self.cause, self.reported = now, cause, False
        self.disconnect()

    def resume(self, sock: socket.socket, received: int) -> None:
        """Go on over a new socket, with the first frame that the other end has not received."""
        self._acknowledge(received)
        self.broken_at = None
        self._use(sock)
        self.outgoing.clear()
        self.outgoing.extend(part for _, parts in self.unacknowledged for part in parts)

    def disconnect(self) -> None:
        """Shut the connection down, also for forked processes that still hold the socket."""
        self.outgoing.clear()
        self.send_error = None
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def close_rings(self) -> None:
        """Unmap the shared memory."""
        if self.ring_out is not None:
            self.ring_out.close()
        if self.ring_in is not None:
            self.ring_in.close()
