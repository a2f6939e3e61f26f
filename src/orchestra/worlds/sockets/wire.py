# SPDX-License-Identifier: Apache-2.0
"""The bytes on a connection between two machines: frames, each a header of fixed length and a body.

    header    magic "ONO", version, kind, dtype · run · sender, number, received · tag, version, weight, progress ·
              stamp · size, place · checksum of the body · checksum of the header
    body      the numbers of a tensor as they lie in memory, or bytes of text or of a file

Everything is checked before memory is allocated for a body: that the frame comes from this release, this run and this
sender, is the next in turn, has a known type and is not longer than any expected body. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from orchestra.core.ops import RangeStamp
from orchestra.errors import ClusterError

if sys.byteorder != "little":
    raise ImportError("numbers travel as they lie in memory, which is little-endian")


class Kind(IntEnum):
    """What a frame carries."""

    MESSAGE = 1  # a message of the strategy
    FAREWELL = 2  # the sender sends no further message of the strategy
    PIECE = 3  # a part of a collective
    CONTROL = 4  # a control message, as JSON
    FILE = 5  # a piece of a file
    HEARTBEAT = 6  # a sign of life; it has no number of its own


INLINE = 2**64 - 1  # the place of a body that follows its header
LONGEST: dict[int, int] = {Kind.CONTROL: 1 << 17, Kind.FILE: 1 << 20, Kind.HEARTBEAT: 0}  # bytes of a body
_MAGIC, _VERSION = b"ONO", 3
_FIELDS = struct.Struct("<3sBBBHQIQQIqddQQQQQQ")  # the fields of `_Header`
_CHECK = struct.Struct("<I")  # checksum of the fields
LENGTH = _FIELDS.size + _CHECK.size
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
_SIZES = tuple(torch.empty(0, dtype=dtype).element_size() for dtype in _DTYPES)


class BadFrame(ClusterError):
    """Received bytes that no node of this run would have sent."""


class Damaged(BadFrame):
    """A body that was changed on its way."""


class Frame(NamedTuple):
    """A header, decoded."""

    kind: int  # see `Kind`
    source: int
    number: int  # of this sender's frames to this receiver
    dtype: torch.dtype = torch.uint8
    numel: int = 0
    tag: int = 0
    version: int = 0
    weight: float = 1.0
    stamp: RangeStamp = RangeStamp()
    progress: float = 0.0  # of the sender in the data, in epochs
    check: int = 0  # checksum of the body
    received: int = 0  # how many of the receiver's frames the sender had received
    place: int = INLINE  # where the body lies in memory that both nodes map

    @property
    def nbytes(self) -> int:
        """Length of the body."""
        return self.numel * _SIZES[_DTYPES.index(self.dtype)]


class _Header(NamedTuple):
    """The fields of a header in the order in which they are sent."""

    magic: bytes
    release: int
    kind: int
    dtype: int
    zero: int  # padding
    run: int
    source: int
    number: int
    received: int
    tag: int
    version: int
    weight: float
    progress: float
    clock: int  # these three: the stamp
    start: int
    stop: int
    numel: int
    place: int
    check: int


def encode(frame: Frame, run: int) -> bytes:
    """Return the header's bytes."""
    fields = _FIELDS.pack(
        *_Header(
            _MAGIC, _VERSION, frame.kind, _DTYPES.index(frame.dtype), 0, run, frame.source, frame.number,
            frame.received, frame.tag, frame.version, frame.weight, frame.progress, *frame.stamp, frame.numel,
            frame.place, frame.check,
        )
    )  # fmt: skip
    return fields + _CHECK.pack(zlib.crc32(fields))


def decode(header: bytes | bytearray | memoryview, run: int, *, source: int, number: int, largest: int) -> Frame:
    """Decode a header that should be frame `number` of node `source`, with at most `largest` bytes; or refuse it."""
    fields = bytes(header[: _FIELDS.size])
    h = _Header._make(_FIELDS.unpack(fields))
    if h.magic != _MAGIC or _CHECK.unpack(header[_FIELDS.size : LENGTH])[0] != zlib.crc32(fields):
        raise BadFrame(f"node {source} sent {fields[:16].hex()}..., which is no frame of this protocol")
    wrong = (
        (h.release != _VERSION, f"version {h.release}, not {_VERSION}: the same release must run everywhere"),
        (not Kind.MESSAGE <= h.kind <= Kind.HEARTBEAT or h.zero, f"kind {h.kind}"),
        (h.dtype >= len(_DTYPES), f"type {h.dtype}"),
        (h.run != run, "another run's message"),
        (h.source != source, f"a message in the name of node {h.source}"),
        (h.number != number, f"message {h.number} instead of {number}"),
    )
    for is_wrong, what in wrong:
        if is_wrong:
            raise BadFrame(f"node {source} sent {what}")
    frame = Frame(
        h.kind, source, number, _DTYPES[h.dtype], h.numel, h.tag, h.version, h.weight,
        RangeStamp(h.clock, h.start, h.stop), h.progress, h.check, h.received, h.place,
    )  # fmt: skip
    largest = LONGEST.get(h.kind, largest)
    if frame.nbytes > largest:
        raise BadFrame(f"node {source} announced {frame.nbytes:,} bytes; nothing longer than {largest:,} is expected")
    return frame


def body_of(x: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, in place."""
    return memoryview(x.detach().reshape(-1).view(torch.uint8).numpy().data)


def sum_of(body: memoryview) -> int:
    """Return a checksum that any flipped bit changes, as fast as memory is read. TLS makes it unnecessary."""
    whole = len(body) // 8 * 8
    words = torch.frombuffer(body[:whole], dtype=torch.int64).sum() if whole else 0
    return (int(words) + zlib.crc32(body[whole:])) % 2**64


def checked(frame: Frame, body: memoryview) -> None:
    """Refuse a body that is not what was sent."""
    if sum_of(body) != frame.check:
        raise Damaged(f"message {frame.number} of node {frame.source} was damaged on its way")


def read_control(body: Tensor) -> dict[str, Any]:
    """Return the control message in a body."""
    try:
        message = json.loads(bytes(body_of(body)))
    except ValueError as error:
        raise BadFrame(f"a control message that cannot be read: {error}") from None
    if not isinstance(message, dict):
        raise BadFrame("a control message without fields")
    return message
