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
    found = _Found(path)
    stay = found.choose(most // 2)
    draft = path.with_name(path.name + ".tmp")
    draft.unlink(missing_ok=True)
    file = draft.open("ab", buffering=0)
    try:
        for lines in _batches(_thinned(path, found, stay)):
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


def _records(path: Path) -> Iterator[Record | None]:
    """What each line of a file says; None if that is no event."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for lines in _batches(iter(file)):
            found = records(lines)
            if len(found) < len(lines):  # some are damaged
                found = [next(iter(records([line])), None) for line in lines]
            for record in found:
                sensible = isinstance(record, dict) and isinstance(record.get("t"), int | float)
                yield record if sensible else None


# Which events stay.

_NO_EVENT, _SUMS = -1, -2


class _Found:
    """The lines of a file: to which series each belongs, its time and its value."""

    def __init__(self, path: Path) -> None:
        self.keys: dict[Key, int] = {}
        self.series, self.t, self.value = array("i"), array("d"), array("d")
        self.sums: list[Record] = []  # what earlier lines `thinned` say, in order
        self.node: Any = None
        self.bytes = path.stat().st_size
        for record in _records(path):
            self._note(record)

    def _note(self, record: Record | None) -> None:
        kind = _NO_EVENT
        if record is not None and record.get("event") == "thinned":
            kind = _SUMS
            self.sums.append(record)
        elif record is not None:
            kind = self.keys.setdefault(self._key(record), len(self.keys))
            self.node = record.get("node")
        value = None if record is None else record.get("value")
        self.series.append(kind)
        self.t.append(0.0 if record is None else record["t"])
        self.value.append(value if isinstance(value, int | float) else math.nan)

    def _key(self, record: Record) -> Key:
        """Steps are one series, whether sampled before or not."""
        kind = str(record.get("event"))
        if kind != "logged":
            return ("stepped" if kind == "sampled" else kind, "")
        name = str(record.get("name"))
        return (kind, name) if (kind, name) in self.keys or len(self.keys) < _NAMES else (kind, "")

    def choose(self, most: int) -> npt.NDArray[np.bool_]:
        """Which lines stay, in about so many bytes: every line counts as long as the mean."""
        series, t, samples = np.array(self.series), np.array(self.t), _MOST
        rows = [np.flatnonzero(series == i) for i in range(len(self.keys))]
        room = most * len(series) / max(1, self.bytes)
        while True:
            stay = np.zeros(len(series), dtype=np.bool_)
            for mine in rows:
                stay[mine] = _stay(t[mine], samples)
            if stay.sum() <= room or samples <= _LEAST:
                return stay
            samples //= 2

    def barriers(self) -> set[int]:
        """The lines of the last checkpoints."""
        saved = self.keys.get(("saved", ""))
        lines = [i for i, kind in enumerate(self.series) if kind == saved] if saved is not None else []
        return {*lines[-_KEPT_APART:]}


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


def _thinned(path: Path, found: _Found, stay: npt.NDArray[np.bool_]) -> Iterator[str]:
    """The lines that stay, and the sums of those that do not."""
    sums, earlier, barriers, keys = _Sums(found.node), iter(found.sums), found.barriers(), [*found.keys]
    steps = found.keys.get(("stepped", ""), _NO_EVENT - 2)
    before, there = 0.0, True  # when the step before was, and whether it stays
    with path.open(encoding="utf-8", errors="replace") as file:
        for i, (line, series, stays) in enumerate(zip(file, found.series, stay.tolist(), strict=False)):
            if series < 0:
                if series == _SUMS:
                    sums.absorb(next(earlier))
                continue
            t = found.t[i]
            if series == steps:
                if '"stepped"' in line[:32] and not (stays and there):
                    sums.took(t - before)
                    line = line.replace('"stepped"', '"sampled"', 1)
                before, there = t, stays
            if not stays:
                sums.add(*keys[series], t, found.value[i])
            if i in barriers:
                yield from sums.told()
                sums = _Sums(found.node)
            if stays:
                yield line if line.endswith("\n") else line + "\n"
    yield from sums.told()


class _Sums:
    """What is left of events that were dropped."""

    def __init__(self, node: Any) -> None:
        self.t, self.node = 0.0, node
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

    def add(self, kind: str, name: str, t: float, value: float) -> None:
        """Drop an event."""
        self.t = max(self.t, t)
        _count(self.dropped, kind, 1)
        if kind == "logged":
            number = value if math.isfinite(value) else 0.0
            bars = {str(int(number)): 1} if number == value and number == int(number) else {}
            self._say(name, {"count": 1, "sum": number, "values": bars})

    def absorb(self, record: Record) -> None:
        """Take in a line of before."""
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):  # a damaged one
            self.t = max(self.t, record["t"])
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
