# SPDX-License-Identifier: Apache-2.0
"""A run as a trace for Perfetto or chrome://tracing: a lane for each node, a slice for each op, an arrow for a message.

The format is that of Trace Event documents: `X` slices, `s` and `f` the two ends of an arrow, `M` names; times in µs.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from orchestra.report.traces import messages, moves
from orchestra.runs.events import NodeStarted, Stepped, read
from orchestra.runs.reading import config_of, sound_ones
from orchestra.runs.status import name_of

_MICRO = 1e6
_BRIEF = 0.1  # µs, the shortest slice: arrows begin and end at slices
_COLOURS = {"compute": "thread_state_running", "send": "rail_response", "receive": "rail_load", "wait": "grey"}

Record = dict[str, Any]


def records(run: Path) -> Iterator[Record]:
    """Yield the entries of a run's trace; raise `Unreadable` if the folder holds no run."""
    config = config_of(run)
    yield from _names(run, config)
    moved = sorted(moves(run), key=lambda e: e.t)
    if not moved:
        yield from _steps(run, config)
        return
    pairs = [*messages(moved)]
    began = {id(got): sent.began for sent, got in pairs}
    for e in moved:
        about = {"bytes": e.bytes} | ({} if e.peer is None else {"with": e.peer})
        # Until a message was sent, its receiver waited.
        sent_at = min(max(e.began, began.get(id(e), e.began)), e.t)
        if sent_at > e.began:
            yield _slice("wait", e.node, e.began, sent_at, about)
        yield _slice(e.kind, e.node, sent_at, e.t, about)
    for number, (sent, got) in enumerate(pairs):
        end = {"name": "message", "cat": "message", "id": number, "pid": 0}
        yield {**end, "ph": "s", "tid": sent.node, "ts": sent.began * _MICRO}
        yield {**end, "ph": "f", "bp": "e", "tid": got.node, "ts": max(got.t, sent.began) * _MICRO}


def _slice(kind: str, node: int, began: float, ended: float, about: Record) -> Record:
    lasts = max(_BRIEF, (ended - began) * _MICRO)
    colour = {"cname": _COLOURS[kind]} if kind in _COLOURS else {}
    return {"name": kind, "ph": "X", "pid": 0, "tid": node, "ts": began * _MICRO, "dur": lasts, "args": about, **colour}


def _names(run: Path, config: dict[str, Any]) -> Iterator[Record]:
    yield {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": run.name}}
    for path in sorted(run.glob("events-*.jsonl")):
        for e in sound_ones(read(path), config):
            if isinstance(e, NodeStarted):
                about: Record = {"ph": "M", "pid": 0, "tid": e.node}
                yield {"name": "thread_name", **about, "args": {"name": name_of(e.node, config["workers"])}}
                yield {"name": "thread_sort_index", **about, "args": {"sort_index": e.node}}
                break


def _steps(run: Path, config: dict[str, Any]) -> Iterator[Record]:
    """Yield slices for a run that was not traced: the shares of each step's time, one after the other."""
    for path in sorted(run.glob("events-*.jsonl")):
        before = (0.0, 0.0, 0.0, 0.0)
        for e in sound_ones(read(path), config):
            if isinstance(e, Stepped):
                at, now = before[0], (e.t, e.compute, e.communicate, e.wait)
                for kind, earlier, later in zip(("compute", "communicate", "wait"), before[1:], now[1:], strict=True):
                    if later > earlier:
                        yield _slice(kind, e.node, at, at + later - earlier, {"step": e.step})
                        at += later - earlier
                before = now


def write(run: Path, path: Path) -> int:
    """Write the trace atomically, compressed if the name ends in .gz; return the number of entries."""
    draft, count = path.with_name(path.name + ".tmp"), 0
    try:
        with (gzip.open if path.suffix == ".gz" else open)(draft, "wt", encoding="utf-8") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            for count, record in enumerate(chain(records(run), _about(run)), 1):
                file.write((",\n" if count > 1 else "") + json.dumps(record, separators=(",", ":")))
            file.write("\n]}\n")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return count


def _about(run: Path) -> Iterator[Record]:
    """Yield one entry in any case: viewers refuse a trace without entries."""
    yield {"name": "process_labels", "ph": "M", "pid": 0, "args": {"labels": run.name}}
