# SPDX-License-Identifier: Apache-2.0
"""Memory that two nodes of one machine both map, through which the long bodies of their messages go.

    sender      copies the body into the ring, and puts its place into the header
    receiver    copies the body out; its next message back acknowledges it, and the sender may use the place again

The ring has no name in any file system: it belongs to the sender's process, and is freed with the last process that
maps it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

_MOST = 64 << 20  # bytes; only pages that were used take memory
_LEAST = 4096  # bytes: shorter bodies follow their header
_SECRET = 16  # bytes at the beginning of a ring
_ACTIVITY = struct.Struct("<BxxxIQ")  # after the secret: an `Activity`, with milliseconds for seconds
_FIRST = _SECRET + _ACTIVITY.size  # where the first body goes


class Activity(NamedTuple):
    """What a sender shows in its ring, for processes that wait for it."""

    doing: int  # layout.NOT_WAITING, WAITING or SLEEPING
    longest: float  # seconds of its longest work between two steps or waits
    step: int


@dataclass
class RingWriter:
    """The sender's end."""

    memory: mmap.mmap
    descriptor: int
    secret: bytes
    _head: int = _FIRST  # where the next body goes
    _held: deque[tuple[int, int, int]] = field(default_factory=deque)  # unacknowledged bodies: frame, start, stop

    @classmethod
    def make(cls, longest: int) -> RingWriter | None:
        """Return a new ring for bodies of at most `longest` bytes; None where the system has none."""
        size = _FIRST + min(_MOST, 4 * longest)
        try:
            descriptor = os.memfd_create("orchestra")
            os.ftruncate(descriptor, size)
            memory, secret = mmap.mmap(descriptor, size), secrets.token_bytes(_SECRET)
        except (OSError, AttributeError):
            return None
        memory[:_SECRET] = secret
        return cls(memory, descriptor, secret)

    def invitation(self) -> dict[str, Any]:
        """Return what the other process must know to map this ring."""
        return {"process": os.getpid(), "descriptor": self.descriptor, "secret": self.secret.hex()}

    @property
    def unread(self) -> int:
        """Bodies that the receiver has not acknowledged."""
        return len(self._held)

    def put(self, number: int, body: memoryview) -> int | None:
        """Copy a body into the ring and return its place; None if it is short or there is no room."""
        length, size = len(body), len(self.memory)
        if length < _LEAST:
            return None
        start = self._head if self._head + length <= size else _FIRST
        stop = start + length
        if stop > size or any(first < stop and start < last for _, first, last in self._held):
            return None
        self.memory[start:stop] = body
        self._held.append((number, start, stop))
        self._head = stop
        return start

    def free(self, received: int) -> None:
        """Free the bodies of the first `received` frames: the other node has read them."""
        while self._held and self._held[0][0] < received:
            self._held.popleft()
        if not self._held:
            self._head = _FIRST  # these pages are still in the cache

    def show(self, doing: int, longest: float, step: int) -> None:
        """Show the other node whether this one waits, the seconds of its longest work so far, and its step."""
        self.memory[_SECRET:_FIRST] = _ACTIVITY.pack(doing, min(int(1000 * longest), 2**32 - 1), step)

    def close(self) -> None:
        """Unmap the ring."""
        os.close(self.descriptor)
        self.memory.close()


def enter(invitation: dict[str, Any]) -> mmap.mmap | None:
    """Map the ring of another process; None if that process is on another machine or belongs to another user."""
    try:
        process, descriptor = int(invitation["process"]), int(invitation["descriptor"])
        secret = bytes.fromhex(invitation["secret"])
        with open(f"/proc/{process}/fd/{descriptor}", "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if memory[:_SECRET] == secret:
        return memory
    memory.close()
    return None


def activity_of(memory: mmap.mmap) -> Activity:
    """Return what the sender shows in its ring."""
    doing, milliseconds, step = _ACTIVITY.unpack(memory[_SECRET:_FIRST])
    return Activity(doing, milliseconds / 1000, step)


def machine() -> str:
    """Return a name that is equal for processes on the same machine that see the same network."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return secrets.token_hex(8)  # unlike any other
