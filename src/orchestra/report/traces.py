# SPDX-License-Identifier: Apache-2.0
"""The traffic between nodes: from a trace where there is one, else derived from totals where possible.

A traced run has files `trace-*.jsonl` with one line for each op, and each node's last event holds the bytes of
messages that it sent to each other node. Traffic of collectives is not in there; it is divided evenly.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from orchestra.core.strategy import Strategy
from orchestra.runs import events, files
from orchestra.runs.events import NodeEnded, OpTraced
from orchestra.runs.reading import LARGEST, RunRecord
from orchestra.strategies.catalogue import (
    EASGD,
    AllReduce,
    Downpour,
    LocalSGD,
    ParameterServer,
    SlowMo,
    Solo,
    SyncEASGD,
)

KINDS = ("compute", "send", "receive", "mean")
_TOGETHER = {"broadcast": "mean", "gather": "mean"}  # all collectives are shown as one kind
MOST = 40_000  # ops of a run in a page
_MOST_SEEN = 2_000_000  # ops of a run that are read
Flow = dict[tuple[int, int], float]  # bytes by sender and receiver


def moves(run: Path) -> Iterator[OpTraced]:
    """Yield every op of a traced run, file by file; skip lines that make no sense."""
    for path in _files(run):
        yield from _moves(path)


def _files(run: Path) -> list[Path]:
    return sorted(run.glob("trace-*.jsonl"))


def _moves(path: Path) -> Iterator[OpTraced]:
    return (e for e in events.read(path) if isinstance(e, OpTraced) and _makes_sense(e))


def _makes_sense(e: OpTraced) -> bool:
    times, whole = (e.began, e.t), (e.node, e.bytes, 0 if e.peer is None else e.peer)
    return (
        all(type(t) in (int, float) and 0 <= t < LARGEST for t in times)
        and e.began <= e.t
        and all(type(n) is int and 0 <= n < LARGEST for n in whole)
        and isinstance(e.kind, str)
    )


def messages(moved: Iterable[OpTraced]) -> Iterator[tuple[OpTraced, OpTraced]]:
    """Yield each send with its receive. Messages from one node to another arrive in the order of sending."""
    sent: dict[tuple[int, int], list[OpTraced]] = defaultdict(list)
    got: dict[tuple[int, int], list[OpTraced]] = defaultdict(list)
    for e in moved:
        if e.peer is not None and e.kind == "send":
            sent[e.node, e.peer].append(e)
        elif e.peer is not None and e.kind == "receive":
            got[e.peer, e.node].append(e)
    for way, ones in sent.items():
        yield from zip(ones, got[way], strict=False)  # the last messages may not have been received


@dataclass
class OpTrace:
    """The first ops of a trace; if all were read, also the seconds of each node by kind and bytes between nodes."""

    spent: dict[int, dict[str, float]] = field(default_factory=dict)
    flow: Flow = field(default_factory=dict)
    ops: list[OpTraced] = field(default_factory=list)
    met: list[float | None] = field(default_factory=list)  # of each op: when a send was received, a receive sent
    left_out: int = 0  # ops beyond the limit


def read(run: Path, nodes: int, most: int = MOST) -> OpTrace | None:
    """Return the trace of a run, if it was traced."""
    trace, unread, until, paths = OpTrace(), 0, math.inf, _files(run)
    room = _MOST_SEEN // max(1, len(paths))
    for path in paths:
        some = [*islice(_moves(path), room)]
        if len(some) == room and (more := _lines(path) - room) > 0:  # of later ones, other nodes' would be missing
            unread, until = unread + more, min(until, max(op.began for op in some))
        trace.ops += _ours(some, nodes)
    if not trace.ops:
        return None
    trace.ops.sort(key=lambda op: op.began)
    met: dict[int, float] = {}
    for sent, got in messages(trace.ops):
        met[id(sent)], met[id(got)] = got.t, sent.began
    if not unread:  # else the totals in the nodes' last events are more complete
        trace.spent, trace.flow = _totals(trace.ops)
    kept = min(most, bisect_right(trace.ops, until, key=lambda op: op.began))
    trace.left_out = unread + len(trace.ops) - kept
    del trace.ops[kept:]
    trace.met = [met.get(id(op)) for op in trace.ops]
    return trace


def _lines(path: Path) -> int:
    with files.open_regular(path) as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))


def _ours(ops: Iterable[OpTraced], nodes: int) -> Iterator[OpTraced]:
    """Yield the ops of known nodes and kinds."""
    for op in ops:
        op.kind = _TOGETHER.get(op.kind, op.kind)
        if op.peer is not None and op.peer >= nodes:
            op.peer = None
        if op.kind in KINDS and op.node < nodes:
            yield op


def _totals(ops: Iterable[OpTraced]) -> tuple[dict[int, dict[str, float]], Flow]:
    spent: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(KINDS, 0.0))
    flow: Flow = defaultdict(float)
    for op in ops:
        spent[op.node][op.kind] += op.t - op.began
        if op.kind == "send" and op.peer is not None:
            flow[op.node, op.peer] += op.bytes
    return dict(spent), dict(flow)


@dataclass(frozen=True)
class LinkTraffic:
    """Bytes between nodes, and their source."""

    flow: Flow
    source: str  # "measured", or how it follows from totals


def traffic(run: RunRecord, strategy: Strategy[Any] | None, trace: OpTrace | None) -> LinkTraffic | None:
    """Return the bytes from each node to each other; None where only a trace would hold them."""
    ended = [e for e in run.events if isinstance(e, NodeEnded)]
    measured = {(e.node, int(peer)): float(size) for e in ended for peer, size in e.sent_to.items()}
    if measured:
        flow = _with_means(measured, ended, run.facts.workers)
        return LinkTraffic(flow, "measured" if flow == measured else "messages measured, all-reduces divided evenly")
    if trace is not None and trace.flow:
        return LinkTraffic(trace.flow, "measured")
    workers = {e.node: e for e in ended if e.node < run.facts.workers}
    if len(workers) < run.facts.workers:
        return None
    return _derived(strategy, workers, run.facts.servers)


def _with_means(messages: Flow, ended: list[NodeEnded], workers: int) -> Flow:
    """Add the traffic of collectives to that of messages: the same amount to every other worker."""
    flow = defaultdict[tuple[int, int], float](float, messages)
    for e in ended:
        rest = e.sent - sum(e.sent_to.values())
        for other in range(workers) if rest > 0 and e.node < workers else ():
            if other != e.node:
                flow[e.node, other] += rest / (workers - 1)
    return dict(flow)


def _derived(strategy: Strategy[Any] | None, workers: dict[int, NodeEnded], servers: int) -> LinkTraffic | None:
    n = len(workers)
    match strategy:
        case ParameterServer(colocated=False) | EASGD() | Downpour() if servers == 1:
            up = {(w, n): float(e.sent) for w, e in workers.items()}
            down = {(n, w): float(e.received) for w, e in workers.items()}
            return LinkTraffic(up | down, "from totals: everything goes through the one server")
        case AllReduce(algorithm="ring") if n > 1:
            return LinkTraffic(
                {(w, (w + 1) % n): float(e.sent) for w, e in workers.items()}, "from totals, along the ring"
            )
        case AllReduce(algorithm="native") | LocalSGD() | SyncEASGD() | SlowMo(base=Solo()) if n > 1:
            even = {(w, v): e.sent / (n - 1) for w, e in workers.items() for v in workers if v != w}
            return LinkTraffic(even, "from totals: in an all-reduce every worker sends as much to every other")
    return None
