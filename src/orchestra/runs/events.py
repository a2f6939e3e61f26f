# SPDX-License-Identifier: Apache-2.0
"""Events: what happened on a node, one JSON object a line, with one schema for real and simulated runs.

Reports, `compare` and all other tools that read a run are pure functions of these files.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import operator
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from orchestra.core.log import Logged as Logged
from orchestra.core.log import Skipped as Skipped
from orchestra.runs import event_thinning, files


@dataclass(frozen=True, slots=True)
class NodeStarted:
    """A node is ready. `setup` counts from the request for its process."""

    t: float
    node: int
    role: str
    setup: float  # seconds


@dataclass(slots=True)  # not frozen: that would make it four times as slow, and there are millions
class Stepped:
    """A worker finished a step. Seconds, bytes and samples are totals since the start of the run."""

    t: float
    node: int
    step: int
    epoch: float
    samples: int
    loss: float | None  # None: the batch was empty or its gradient was not finite
    lr: float
    compute: float
    communicate: float
    wait: float
    sent: int
    received: int


@dataclass(slots=True)
class Sampled(Stepped):
    """A step of a long run that stayed when the one before it was dropped: how long it took is in `Thinned`."""


@dataclass(frozen=True, slots=True)
class Reconnected:
    """A node's connection to another broke and was replaced after some seconds; no message was lost."""

    t: float
    node: int
    peer: int
    seconds: float
    why: str


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """A node copied its part of snapshot `number`."""

    t: float
    node: int
    step: int
    samples: int
    number: int


@dataclass(frozen=True, slots=True)
class Scored:
    """A snapshot was evaluated, outside of training time; `t` is when it was taken."""

    t: float
    step: int
    samples: int
    number: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Saved:
    """A node wrote its part of a checkpoint."""

    t: float
    node: int
    step: int


@dataclass(frozen=True, slots=True)
class NodeEnded:
    """A node ended. Totals as in `Stepped`."""

    t: float
    node: int
    step: int
    samples: int
    compute: float
    communicate: float
    wait: float
    sent: int
    received: int
    sent_to: dict[str, int] = field(default_factory=dict)  # bytes of messages, by receiver; collectives excluded


@dataclass(slots=True)
class OpTraced:
    """A node carried out an op, from `began` to `t`: compute, send, receive, mean, broadcast or gather."""

    t: float
    node: int
    kind: str
    began: float
    peer: int | None  # the other node, if there is one
    bytes: int


@dataclass(frozen=True, slots=True)
class Thinned:
    """Summary of events that were dropped to save room, the last of them at `t`."""

    t: float
    node: int
    dropped: dict[str, int]  # how many of each kind
    said: dict[str, dict[str, Any]]  # by name: "count", "sum" and "values", how often each whole number occurred
    times: dict[str, int]  # durations of steps: how many in each bar of a histogram, see `event_thinning.seconds_of`


Event = (
    NodeStarted
    | Stepped
    | Sampled
    | Logged
    | Skipped
    | Reconnected
    | SnapshotTaken
    | Scored
    | Saved
    | NodeEnded
    | OpTraced
    | Thinned
)
_KINDS: dict[str, type[Any]] = {
    re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower(): cls
    for cls in (
        NodeStarted,
        Stepped,
        Sampled,
        Logged,
        Skipped,
        Reconnected,
        SnapshotTaken,
        Scored,
        Saved,
        NodeEnded,
        OpTraced,
        Thinned,
    )
}
# The text of each kind of event with gaps for its values, and a function that returns the values.
_LAYOUT: dict[type[Any], tuple[str, Callable[[Any], tuple[Any, ...]]]] = {
    cls: (
        f'{{{{"event":"{kind}",' + ",".join(f'"{f.name}":{{}}' for f in fields(cls)) + "}}\n",
        operator.attrgetter(*(f.name for f in fields(cls))),
    )
    for kind, cls in _KINDS.items()
}
_CHUNK = 1 << 18  # bytes that are read at once, some thousand lines
_LONGEST = 1 << 22  # bytes of a line
_MOST = 1 << 33  # bytes of a file
_FLUSH = 0.5  # seconds an event may wait in memory


class EventLog:
    """Append events to a file, a few hundred at a time. A file that exceeds `limit` bytes is thinned.

    A full disk costs only memory for a while: events that could not be written are tried again with the next ones.
    """

    def __init__(
        self, path: Path, complain: Callable[[OSError], None] | None = None, *, limit: int | None = None
    ) -> None:
        self._path = path
        self._limit, self._thin_at = limit, limit
        self._file: IO[bytes] = path.open("ab", buffering=0)
        self._whole = self._file.seek(0, 2)  # bytes known to be complete lines
        self._waiting: list[Event] = []
        self._flushed = time.monotonic()
        self._complain = complain

    def write(self, event: Event) -> None:
        """Record an event."""
        self._waiting.append(event)
        if time.monotonic() - self._flushed > _FLUSH:  # so that tools that read the file see slow steps one by one
            self.flush()

    def write_together(self, events: Sequence[Event]) -> None:
        """Record events that are written to the file all together or not at all."""
        self._waiting.extend(events)

    def flush(self) -> None:
        """Write all events so far to the file, in complete lines."""
        self._flushed = time.monotonic()
        if not self._waiting:
            return
        text = "".join(encode(event) for event in self._waiting).encode()
        try:
            if self._file.write(text) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._whole)
            if self._complain is None:
                raise
            self._complain(error)
            return
        self._whole += len(text)
        self._waiting.clear()
        if self._limit is not None and self._thin_at is not None and self._whole > self._thin_at:
            self._thin(self._limit)

    def _thin(self, limit: int) -> None:
        """Rewrite the file shorter. If that fails, let the file grow a little before the next attempt."""
        try:
            thinner = event_thinning.rewrite(self._path, limit)
        except OSError:  # no room for a second file
            self._thin_at = self._whole + limit // 4
            return
        self._file.close()
        self._file, self._whole = thinner, thinner.seek(0, 2)
        self._thin_at = max(limit, 2 * self._whole)  # the sums alone may exceed the limit of a very large run

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()
        for pause in files.PAUSES if kind is None else ():  # events that are not written now are lost
            if self._waiting:
                time.sleep(pause)
                self.flush()
        self._file.close()

    def close(self) -> None:
        """Write what can be written now, and close the file."""
        try:
            self.flush()
        finally:
            self._file.close()


def encode(event: Event) -> str:
    """Return an event as one line of JSON. Numbers that are not finite become null, which every JSON parser accepts."""
    line, values_of = _LAYOUT[type(event)]
    return line.format(*[_text(value) for value in values_of(event)])


def _text(value: Any) -> Any:
    """Return a value as `json.dumps` writes it, but faster: a run has millions of values, nearly all numbers."""
    kind = type(value)
    if kind is int:
        return value
    if kind is float:
        return repr(value) if math.isfinite(value) else "null"
    return _quoted(value) if kind is str else json.dumps(_plain(value), separators=(",", ":"))


@lru_cache(maxsize=256)
def _quoted(text: str) -> str:
    """Return a quoted string from a cache: strategies log few different names."""
    return json.dumps(text)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(v) for name, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(path: Path) -> Iterator[Event]:
    """Yield the events of a file. Lines cut short or of an unknown kind are skipped: the run may go on, or be newer."""
    try:
        file = files.open_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        if error.errno == errno.EINVAL:  # not a regular file, so no run wrote it
            return
        raise
    with file:
        for lines in _lines(file):
            yield from decode(lines)


def _lines(file: IO[bytes]) -> Iterator[list[str]]:
    """Yield batches of lines. Lines that are too long are skipped, and so is everything after `_MOST` bytes."""
    rest, too_long = b"", False
    for _ in range(_MOST // _CHUNK):
        if not (chunk := file.read(_CHUNK)):
            break
        whole, end, cut = chunk.rpartition(b"\n")
        if end:
            found = whole.partition(b"\n")[2] if too_long else rest + whole
            yield [line for line in found.decode("utf-8", "replace").split("\n") if line]
            rest, too_long = cut, False
        elif len(rest := b"" if too_long else rest + chunk) > _LONGEST:
            rest, too_long = b"", True
    if rest:
        yield [rest.decode("utf-8", "replace")]


def decode(lines: list[str]) -> Iterator[Event]:
    """Yield the events of some lines; skip lines that are not events."""
    for record in event_thinning.records(lines):
        try:
            yield _KINDS[record.pop("event")](**record)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
