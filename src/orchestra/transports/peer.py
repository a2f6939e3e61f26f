# SPDX-License-Identifier: Apache-2.0
"""One end of a connection between two machines, and what lies there."""

from __future__ import annotations

import socket
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from orchestra.ops import Departed, Message
from orchestra.transports import wire

# A machine that is gone is noticed by the kernel, also while the process computes. The last one is long: it also counts
# while the other end has no room because it computes.
_KEEPALIVE = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 300_000))


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
    gone: bool = False  # it has said so
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
