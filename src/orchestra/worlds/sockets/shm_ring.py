# SPDX-License-Identifier: Apache-2.0
"""Memory that two nodes of one machine both see, through which the long part of their messages goes.

    sender      copies the body into the ring and says in the header where it lies
    receiver    copies it out; with its next message back it says how far it is, and the sender may use that place again

The ring has no name in any file system: it belongs to the sender's process, and is gone with the last that looks at it.
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

_MOST = 64 << 20  # bytes; only those that were ever used are there
_LEAST = 4096  # bytes: shorter bodies go with their header
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
    _held: deque[tuple[int, int, int]] = field(default_factory=deque)  # messages not known to have been read: where

    @classmethod
    def make(cls, longest: int) -> RingWriter | None:
        """A new ring, for bodies up to so many bytes; None where there can be none."""
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
        """What the other end must know."""
        return {"process": os.getpid(), "descriptor": self.descriptor, "secret": self.secret.hex()}

    @property
    def holds(self) -> int:
        """Messages that may not have been read yet."""
        return len(self._held)

    def put(self, number: int, body: memoryview) -> int | None:
        """Lay a body down; gives its place, or None if there is no room or it is not worth it."""
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

    def free(self, heard: int) -> None:
        """The other node has read all messages before this one."""
        while self._held and self._held[0][0] < heard:
            self._held.popleft()
        if not self._held:
            self._head = _FIRST  # what was used before is still warm

    def show(self, doing: int, longest: float, step: int) -> None:
        """Show the other node whether this one waits, the seconds of its longest work so far, and its step."""
        self.memory[_SECRET:_FIRST] = _ACTIVITY.pack(doing, min(int(1000 * longest), 2**32 - 1), step)

    def close(self) -> None:
        """Nothing more is to be sent."""
        os.close(self.descriptor)
        self.memory.close()


def enter(invitation: dict[str, Any]) -> mmap.mmap | None:
    """The receiver's end: the ring of another process, or None if it is not of this machine, or not of this user."""
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
    """What two processes have in common if they run on the same machine and see the same network."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return secrets.token_hex(8)  # nobody else's
