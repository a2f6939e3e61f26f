# SPDX-License-Identifier: Apache-2.0
"""Event files that stay small in a long run: the first and the last events in full, samples in between, and sums.

    a file that has grown past its limit is written again, at most half as long, and replaces the old one at once:
        of each series (steps, each figure that a strategy logs) the first HEAD and the last TAIL events stay
        of the events between them one stays in each of K equal spans of time
        what is dropped is counted in a line `thinned`: how many, sums and histograms of figures, durations of steps

A step that stays while the one before it is dropped becomes `sampled`: its duration is in the histogram. So every
duration is either the distance of two neighbours or in a histogram, never both.

There is one line `thinned` for each of the last checkpoints: a run that is resumed drops what came after its own.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from array import array
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

HEAD, TAIL = 1000, 2000  # events of a series that stay at both ends
_MOST, _LEAST = 1 << 14, 16  # samples of a series between them
_ALL, _ONE = 512 << 20, 16 << 20  # bytes of all nodes' files together, and of one of them
_SMALLEST = 1 << 20  # bytes
_NAMES = 200  # figures that have a series of their own; the others have one together
_VALUES = 512  # bars of a histogram
_OCTAVE = 16  # bars of the histogram of durations between one duration and twice that: 4.4 % wide
_KEPT_APART = 4  # checkpoints: more than a run keeps
_TOGETHER = 1000  # lines that are read at once

Record = dict[str, Any]
Key = tuple[str, str]  # kind of event; the name of what was logged


def limit(nodes: int) -> int:
    """Bytes that the events of one of so many nodes may take."""
    return max(_SMALLEST, min(_ONE, _ALL // max(1, nodes)))


def bar_of(seconds: float) -> int:
    """The bar of a histogram to which a duration belongs."""
    return round(_OCTAVE * math.log2(max(seconds, 1e-9)))


def seconds_of(bar: int) -> float:
    """The duration in the middle of a bar."""
    return math.pow(2.0, bar / _OCTAVE)


def records(lines: list[str]) -> list[Any]:
    """Lines of JSON, all at once if they are whole, which is twice as fast; what is no JSON is left out."""
    try:
        together: list[Any] = json.loads(f"[{','.join(lines)}]")
        if len(together) == len(lines):
            return together
    except (ValueError, RecursionError):
        pass
    found = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            found.append(json.loads(line))
    return found


def rewrite(path: Path, most: int) -> IO[bytes]:
    """Write a file of events again in at most half of `most` bytes, in place of the old one; gives it, open at its end.

    Raises an OSError, and leaves the old file as it is, if there is no room.
    """
    kept, barriers = _choose(path, most // 2)
    draft = path.with_name(path.name + ".tmp")
    draft.unlink(missing_ok=True)
    file = draft.open("ab", buffering=0)
    try:
        for lines in _batches(_thinned(path, kept, barriers)):
            text = "".join(lines).encode()
            if file.write(text) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(draft))
        os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        file.close()
        draft.unlink(missing_ok=True)
        raise
    return file


def _batches(lines: Iterator[str]) -> Iterator[list[str]]:
    while some := list(islice(lines, _TOGETHER)):
        yield some


def _events(path: Path) -> Iterator[tuple[str, Record]]:
    """The lines of a file that are events, and what they say."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for lines in _batches(iter(file)):
            found = records(lines)
            if len(found) < len(lines):  # some are damaged
                pairs = [(line, record) for line in lines for record in records([line])]
            else:
                pairs = list(zip(lines, found, strict=True))
            for line, record in pairs:
                if isinstance(record, dict) and isinstance(record.get("t"), int | float):
                    yield line, record


class _Keys:
    """Which series an event belongs to."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def of(self, record: Record) -> Key:
        """Steps are one series, whether sampled before or not."""
        kind = str(record.get("event"))
        if kind != "logged":
            return ("stepped" if kind == "sampled" else kind, "")
        name = str(record.get("name"))
        if name not in self._names and len(self._names) >= _NAMES:
            return kind, ""
        self._names.add(name)
        return kind, name


# Which events stay.


def _choose(path: Path, most: int) -> tuple[dict[Key, npt.NDArray[np.bool_]], set[int]]:
    """Of each series, which events stay; and after how many events of the file each of the last checkpoints came."""
    times: dict[Key, array[float]] = {}
    size: dict[Key, int] = {}
    saved: deque[int] = deque(maxlen=_KEPT_APART)
    keys = _Keys()
    for count, (line, record) in enumerate(_events(path), 1):
        key = keys.of(record)
        times.setdefault(key, array("d")).append(record["t"])
        size[key] = size.get(key, 0) + len(line)
        if key[0] == "saved":
            saved.append(count)
    times.pop(("thinned", ""), None)
    columns = {key: np.array(column) for key, column in times.items()}
    samples = _MOST
    while True:
        kept = {key: _stay(column, samples) for key, column in columns.items()}
        bytes_left = sum(size[key] * int(flags.sum()) / len(flags) for key, flags in kept.items())
        if bytes_left <= most or samples <= _LEAST:
            return kept, set(saved)
        samples //= 2


def _stay(t: npt.NDArray[np.float64], samples: int) -> npt.NDArray[np.bool_]:
    """The first, the last, and the last event of each of so many spans of time between them."""
    head, tail = min(HEAD, samples), min(TAIL, samples)
    stay = np.ones(len(t), dtype=np.bool_)
    middle = t[head : len(t) - tail]
    if len(middle) <= samples:
        return stay
    whole = middle[-1] - middle[0]
    span = np.floor((middle - middle[0]) / whole * samples) if whole > 0 else np.zeros(len(middle))
    last = np.append(span[1:] != span[:-1], True)
    if last.sum() > samples + 1:  # times that go to and fro
        last = np.arange(len(middle)) % -(-len(middle) // samples) == 0
    stay[head : len(t) - tail] = last
    return stay


# What is written.


def _thinned(path: Path, kept: dict[Key, npt.NDArray[np.bool_]], barriers: set[int]) -> Iterator[str]:
    """The lines that stay, and the sums of those that do not."""
    keys, sums, place = _Keys(), _Sums(), dict.fromkeys(kept, 0)
    before, there = 0.0, True  # when the step before was, and whether it stays
    for count, (line, record) in enumerate(_events(path), 1):
        key = keys.of(record)
        if key not in kept:  # one of these lines
            sums.absorb(record)
            continue
        stays = bool(kept[key][place[key]])
        place[key] += 1
        if key[0] == "stepped":
            if record["event"] == "stepped" and not (stays and there):
                sums.took(record["t"] - before)
                line = line.replace('"stepped"', '"sampled"', 1)
            before, there = record["t"], stays
        if not stays:
            sums.add(key[0], record)
        if count in barriers:
            yield from sums.told()
            sums = _Sums()
        if stays:
            yield line if line.endswith("\n") else line + "\n"
    yield from sums.told()


class _Sums:
    """What is left of events that were dropped."""

    def __init__(self) -> None:
        self.t = 0.0
        self.node: Any = None
        self.dropped: dict[str, int] = {}
        self.said: dict[str, Record] = {}
        self.times: dict[str, int] = {}

    def told(self) -> Iterator[str]:
        """As a line, if anything was dropped."""
        if self.dropped or self.times:
            what = {"event": "thinned", "t": self.t, "node": self.node, "dropped": self.dropped}
            yield json.dumps(what | {"said": self.said, "times": self.times}, separators=(",", ":")) + "\n"

    def took(self, seconds: float) -> None:
        """Count the duration of a step."""
        _count(self.times, str(bar_of(seconds)), 1)

    def add(self, kind: str, record: Record) -> None:
        """Drop an event."""
        self.t, self.node = max(self.t, record["t"]), record.get("node")
        _count(self.dropped, kind, 1)
        if kind == "logged":
            value = record.get("value")
            number = value if isinstance(value, int | float) and math.isfinite(value) else 0.0
            bars = {str(int(number)): 1} if number == value and number == int(number) else {}
            self._say(str(record.get("name")), {"count": 1, "sum": number, "values": bars})

    def absorb(self, record: Record) -> None:
        """Take in a line of before."""
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):  # a damaged one
            self.t, self.node = max(self.t, record["t"]), record["node"]
            for kind, count in record["dropped"].items():
                _count(self.dropped, kind, int(count))
            for bar, count in record["times"].items():
                _count(self.times, bar, int(count))
            for name, figures in record["said"].items():
                self._say(name, figures)

    def _say(self, name: str, figures: Record) -> None:
        if name not in self.said and len(self.said) >= _NAMES:
            name = ""
        mine = self.said.setdefault(name, {"count": 0, "sum": 0.0, "values": {}})
        mine["count"] += figures["count"]
        mine["sum"] += figures["sum"]
        for value, count in figures["values"].items():
            if value in mine["values"] or len(mine["values"]) < _VALUES:
                _count(mine["values"], value, count)


def _count(counts: dict[str, int], what: str, count: int) -> None:
    counts[what] = counts.get(what, 0) + count
