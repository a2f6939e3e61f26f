# SPDX-License-Identifier: Apache-2.0
"""Event files that stay small in a long run: the first and the last events in full, samples in between, and sums.

    a file that has grown past its limit is rewritten, at most half as long, and replaces the old one atomically:
        of each series (steps, each figure that a strategy logs) the first HEAD and last TAIL events are kept
        the time between them is cut into K equal intervals, and one event of each interval stays
        a line `thinned` sums up the dropped events: counts, sums and histograms of figures, durations of steps

A step that is kept while the one before it is dropped becomes `sampled`: its duration is in the histogram. So every
duration is either the difference of two neighbouring steps or in a histogram, never both.

There is one line `thinned` for each of the last checkpoints: a resumed run drops the events after its own.
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

HEAD, TAIL = 1000, 2000  # events of a series that are kept at both ends
_MOST, _LEAST = 1 << 14, 2  # samples kept of a series between them
_ALL, _ONE = 512 << 20, 16 << 20  # bytes of all nodes' files together, and of one of them
_NAMES = 200  # figures that have a series of their own; all others share one
_VALUES = 512  # bars of a histogram
_OCTAVE = 16  # bars of the histogram of durations between one duration and twice that: 4.4 % wide
_KEPT_APART = 4  # checkpoints with a line `thinned` of their own: more than a run keeps
_TOGETHER = 1000  # lines that are read at once

Record = dict[str, Any]
Key = tuple[str, str]  # kind of event; the name of what was logged


def limit(nodes: int) -> int:
    """Return how many bytes the events of one node may take in a run of `nodes` nodes."""
    return min(_ONE, _ALL // max(1, nodes))


def bar_of(seconds: float) -> int:
    """Return the bar of the histogram that holds a duration."""
    return round(_OCTAVE * math.log2(max(seconds, 1e-9)))


def seconds_of(bar: int) -> float:
    """Return the duration in the middle of a bar."""
    return math.pow(2.0, bar / _OCTAVE)


def records(lines: list[str]) -> list[Any]:
    """Parse lines of JSON, all at once if none is damaged, which is twice as fast; skip lines that are not JSON."""
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
    """Rewrite a file of events in at most half of `most` bytes, replace the old file, and return the new one open.

    Raises OSError, and leaves the old file as it is, if the disk is full.
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
    """Yield the record of each line of a file; None for a line that is not an event."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for lines in _batches(iter(file)):
            found = records(lines)
            if len(found) < len(lines):  # some lines are damaged
                found = [next(iter(records([line])), None) for line in lines]
            for record in found:
                sensible = isinstance(record, dict) and isinstance(record.get("t"), int | float)
                yield record if sensible else None


# Which events are kept.

_NO_EVENT, _SUMS = -1, -2


class _Found:
    """The lines of a file: the series that each belongs to, its time and its value."""

    def __init__(self, path: Path) -> None:
        self.keys: dict[Key, int] = {}
        self.series, self.t, self.value = array("i"), array("d"), array("d")
        self.sums: list[Record] = []  # earlier lines `thinned`, in order
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
        """Return the series of a record. All steps are one series, whether sampled before or not."""
        kind = str(record.get("event"))
        if kind != "logged":
            return ("stepped" if kind == "sampled" else kind, "")
        name = str(record.get("name"))
        return (kind, name) if (kind, name) in self.keys or len(self.keys) < _NAMES else (kind, "")

    def choose(self, most: int) -> npt.NDArray[np.bool_]:
        """Return which lines to keep in about `most` bytes, taking every line to be of mean length."""
        series, t, samples = np.array(self.series), np.array(self.t), _MOST
        rows = [np.flatnonzero(series == i) for i in range(len(self.keys))]
        room = most * len(series) / max(1, self.bytes)
        while True:
            stay = np.zeros(len(series), dtype=np.bool_)
            for mine in rows:
                stay[mine] = ends_and_samples(t[mine], samples)
            if stay.sum() <= room or samples <= _LEAST:
                return stay
            samples //= 2

    def barriers(self) -> set[int]:
        """Return the lines of the last checkpoints."""
        saved = self.keys.get(("saved", ""))
        lines = [i for i, kind in enumerate(self.series) if kind == saved] if saved is not None else []
        return {*lines[-_KEPT_APART:]}


def ends_and_samples(t: npt.NDArray[np.float64], samples: int) -> npt.NDArray[np.bool_]:
    """Keep the first and the last events, and the last event of each of `samples` time intervals between them."""
    head, tail = min(HEAD, samples), min(TAIL, samples)
    stay = np.ones(len(t), dtype=np.bool_)
    middle = t[head : len(t) - tail]
    if len(middle) <= samples:
        return stay
    whole = middle[-1] - middle[0]
    span = np.floor((middle - middle[0]) / whole * samples) if whole > 0 else np.zeros(len(middle))
    last = np.append(span[1:] != span[:-1], True)
    if last.sum() > samples + 1:  # times that jump back
        last = np.arange(len(middle)) % -(-len(middle) // samples) == 0
    stay[head : len(t) - tail] = last
    return stay


# What is written.


def _thinned(path: Path, found: _Found, stay: npt.NDArray[np.bool_]) -> Iterator[str]:
    """Yield the lines that are kept, and the sums of those that are not."""
    sums, earlier, barriers, keys = _Sums(found.node), iter(found.sums), found.barriers(), [*found.keys]
    steps = found.keys.get(("stepped", ""), _NO_EVENT - 2)
    before, there = 0.0, True  # time of the previous step, and whether it is kept
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
    """Counts and sums of the events that were dropped."""

    def __init__(self, node: Any) -> None:
        self.t, self.node = 0.0, node
        self.dropped: dict[str, int] = {}
        self.said: dict[str, Record] = {}
        self.times: dict[str, int] = {}

    def told(self) -> Iterator[str]:
        """Yield the line `thinned`, if anything was dropped."""
        if self.dropped or self.times:
            what = {"event": "thinned", "t": self.t, "node": self.node, "dropped": self.dropped}
            yield json.dumps(what | {"said": self.said, "times": self.times}, separators=(",", ":")) + "\n"

    def took(self, seconds: float) -> None:
        """Count the duration of a step."""
        _count(self.times, str(bar_of(seconds)), 1)

    def add(self, kind: str, name: str, t: float, value: float) -> None:
        """Count an event as dropped."""
        self.t = max(self.t, t)
        _count(self.dropped, kind, 1)
        if kind == "logged":
            number = value if math.isfinite(value) else 0.0
            bars = {str(int(number)): 1} if number == value and number == int(number) else {}
            self._say(name, {"count": 1, "sum": number, "values": bars})

    def absorb(self, record: Record) -> None:
        """Add the counts of an earlier line `thinned`."""
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):  # a damaged line
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
