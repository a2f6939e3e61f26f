# SPDX-License-Identifier: Apache-2.0
"""What goes over a wire between two machines: a header of fixed length, then numbers as they lie in memory.

    magic "ONO", version, kind, dtype · run · sender, number, heard · tag, version, weight, progress · stamp ·
    size, place · sums

Everything is checked before memory is set aside for a body: that it is ours, of this run and of this sender, the next
in turn, of a type we know and not longer than anything that could be asked for. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from orchestra.core.ops import RangeStamp
from orchestra.errors import ClusterError

if sys.byteorder != "little":
    raise ImportError("numbers travel as they lie in memory, which is little-endian")

# Kinds: a message, nothing more to come, a part of what a whole group does; what concerns the run: words, files; and a
# sign of life, which is not counted.
BODY, FAREWELL, PIECE, NOTE, FILE, BEAT = range(1, 7)
INLINE = 2**64 - 1  # the place of a body that follows its header
LONGEST = {NOTE: 1 << 17, FILE: 1 << 20, BEAT: 0}  # bytes
_MAGIC, _VERSION = b"ONO", 3
_FIELDS = struct.Struct("<3sBBBHQIQQIqddQQQQQQ")  # all but the check of the header itself
_CHECK = struct.Struct("<I")
LENGTH = _FIELDS.size + _CHECK.size
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
_SIZES = tuple(torch.empty(0, dtype=dtype).element_size() for dtype in _DTYPES)


class BadFrame(ClusterError):
    """Something that none of our nodes would have sent."""


class Damaged(BadFrame):
    """A message that was changed on its way."""


class Frame(NamedTuple):
    """A header, read."""

    kind: int
    source: int
    number: int  # of this sender's messages to this receiver
    dtype: torch.dtype = torch.uint8
    numel: int = 0
    tag: int = 0
    version: int = 0
    weight: float = 1.0
    stamp: RangeStamp = RangeStamp()
    progress: float = 0.0  # of the sender in the data, in epochs
    check: int = 0  # of the body
    heard: int = 0  # how many of the other's messages were here when this was sent
    place: int = INLINE  # where the body lies in memory that both nodes see

    @property
    def nbytes(self) -> int:
        """Length of the body."""
        return self.numel * _SIZES[_DTYPES.index(self.dtype)]


def encode(frame: Frame, run: int) -> bytes:
    """The header's bytes."""
    dtype = _DTYPES.index(frame.dtype)
    fields = _FIELDS.pack(
        _MAGIC, _VERSION, frame.kind, dtype, 0, run, frame.source, frame.number, frame.heard, frame.tag, frame.version,
        frame.weight, frame.progress, *frame.stamp, frame.numel, frame.place, frame.check,
    )  # fmt: skip
    return fields + _CHECK.pack(zlib.crc32(fields))


def decode(header: bytes | bytearray | memoryview, run: int, *, source: int, number: int, largest: int) -> Frame:
    """Read a header that should be message `number` of node `source` with at most `largest` bytes; or refuse it."""
    fields = bytes(header[: _FIELDS.size])
    magic, version, kind, dtype, zero, of, sender, count, heard, *rest = _FIELDS.unpack(fields)
    tag, v, weight, progress, clock, start, stop, numel, place, check = rest
    if magic != _MAGIC or _CHECK.unpack(header[_FIELDS.size : LENGTH])[0] != zlib.crc32(fields):
        raise BadFrame(f"node {source} sent {fields[:16].hex()}..., which is no message of ours")
    wrong = (
        (version != _VERSION, f"version {version}, not {_VERSION}: the same release must run everywhere"),
        (not BODY <= kind <= BEAT or zero, f"kind {kind}"),
        (dtype >= len(_DTYPES), f"type {dtype}"),
        (of != run, "another run's message"),
        (sender != source, f"a message in the name of node {sender}"),
        (count != number, f"message {count} instead of {number}"),
    )
    for is_wrong, what in wrong:
        if is_wrong:
            raise BadFrame(f"node {source} sent {what}")
    stamp = RangeStamp(clock, start, stop)
    frame = Frame(kind, source, count, _DTYPES[dtype], numel, tag, v, weight, stamp, progress, check, heard, place)
    largest = LONGEST.get(kind, largest)
    if frame.nbytes > largest:
        raise BadFrame(f"node {source} announced {frame.nbytes:,} bytes; nothing longer than {largest:,} is expected")
    return frame


def body_of(x: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, in place."""
    return memoryview(x.detach().reshape(-1).view(torch.uint8).numpy().data)


def sum_of(body: memoryview) -> int:
    """A sum that any flipped bit changes, as fast as memory is read. Where messages are encrypted nobody needs it."""
    whole = len(body) // 8 * 8
    words = torch.frombuffer(body[:whole], dtype=torch.int64).sum() if whole else 0
    return (int(words) + zlib.crc32(body[whole:])) % 2**64


def checked(frame: Frame, body: memoryview) -> None:
    """Refuse a body that is not what was sent."""
    if sum_of(body) != frame.check:
        raise Damaged(f"message {frame.number} of node {frame.source} came damaged")


def read_note(body: Tensor) -> dict[str, Any]:
    """What a note says."""
    try:
        said = json.loads(bytes(body_of(body)))
    except ValueError as error:
        raise BadFrame(f"a note that cannot be read: {error}") from None
    if not isinstance(said, dict):
        raise BadFrame("a note that says nothing")
    return said
