# SPDX-License-Identifier: Apache-2.0
"""Frames: what was sent is read, and nothing else is taken for it."""

from __future__ import annotations

import struct
import zlib

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestra.core.ops import RangeStamp
from orchestra.worlds.sockets import wire

RUN = 0x0123456789ABCDEF
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)


def read(header: bytes, *, source: int = 3, number: int = 7, largest: int = 1 << 20, run: int = RUN) -> wire.Frame:
    return wire.decode(header, run, source=source, number=number, largest=largest)


@given(
    kind=st.sampled_from([wire.Kind.MESSAGE, wire.Kind.FAREWELL, wire.Kind.PIECE]),
    dtype=st.sampled_from(DTYPES),
    numel=st.integers(0, 1 << 17),
    tag=st.integers(0, 2**32 - 1),
    version=st.integers(-(2**63), 2**63 - 1),
    weight=st.floats(allow_nan=False),
    stamp=st.tuples(*[st.integers(0, 2**64 - 1)] * 3),
    progress=st.floats(allow_nan=False),
    check=st.integers(0, 2**64 - 1),
)
def test_what_is_written_is_read(
    kind: int, dtype: torch.dtype, numel: int, tag: int, version: int, weight: float, stamp: tuple[int, ...],
    progress: float, check: int,
) -> None:  # fmt: skip
    frame = wire.Frame(kind, 3, 7, dtype, numel, tag, version, weight, RangeStamp(*stamp), progress, check)
    header = wire.encode(frame, RUN)
    assert len(header) == wire.LENGTH
    assert read(header) == frame


@given(st.binary(min_size=wire.LENGTH, max_size=wire.LENGTH))
@example(b"GET / HTTP/1.1\r\nHost: there\r\n\r\n".ljust(wire.LENGTH, b" "))
@example(bytes(wire.LENGTH))
@settings(max_examples=500)
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(wire.BadFrame, match="node 3 sent"):
        read(noise)


@given(bit=st.integers(0, 8 * wire.LENGTH - 1))
def test_one_flipped_bit_is_seen(bit: int) -> None:
    header = bytearray(wire.encode(wire.Frame(wire.Kind.MESSAGE, 3, 7, torch.float32, 5), RUN))
    header[bit // 8] ^= 1 << bit % 8
    with pytest.raises(wire.BadFrame):
        read(bytes(header))


def forged(offset: int, form: str, value: int) -> bytes:
    """Return a header with one field changed and its checksum computed again."""
    header = bytearray(wire.encode(wire.Frame(wire.Kind.MESSAGE, 3, 7, torch.float32, 5), RUN))
    struct.pack_into(form, header, offset, value)
    header[-4:] = struct.pack("<I", zlib.crc32(bytes(header[:-4])))
    return bytes(header)


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        (forged(3, "B", 9), "version 9, not 3"),
        (forged(4, "B", 77), "kind 77"),
        (forged(5, "B", 255), "type 255"),
        (forged(8, "<Q", 1), "another run's"),
        (forged(16, "<I", 2), "in the name of node 2"),
        (forged(20, "<Q", 6), "message 6 instead of 7"),
        (forged(88, "<Q", 2**62), "nothing longer than 1,048,576"),
    ],
)
def test_a_forgery_is_named(header: bytes, complaint: str) -> None:
    with pytest.raises(wire.BadFrame, match=complaint):
        read(header)


def test_a_damaged_body_is_refused() -> None:
    x = torch.arange(10.0)
    body = wire.body_of(x)
    frame = wire.Frame(wire.Kind.MESSAGE, 3, 7, x.dtype, x.numel(), check=wire.sum_of(body))
    wire.checked(frame, body)
    x[3] = 3.0001
    with pytest.raises(wire.BadFrame, match="message 7 of node 3 was damaged"):
        wire.checked(frame, body)


@given(data=st.binary(min_size=1, max_size=40), place=st.integers(0, 319))
def test_a_sum_sees_every_flipped_bit(data: bytes, place: int) -> None:
    flipped = bytearray(data)
    place %= 8 * len(data)
    flipped[place // 8] ^= 1 << place % 8
    assert wire.sum_of(memoryview(bytearray(data))) != wire.sum_of(memoryview(flipped))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bytes_of_a_body_are_the_tensor_itself(dtype: torch.dtype) -> None:
    x = torch.zeros(6, dtype=dtype)
    body = wire.body_of(x)
    assert len(body) == wire.Frame(wire.Kind.MESSAGE, 0, 0, dtype, 6).nbytes
    body[0] = 1
    assert x[0] != 0
