# SPDX-License-Identifier: Apache-2.0
"""Who sent how much to whom, and when: from a trace where there is one, else as far as totals tell.

A traced run has files `trace-*.jsonl` with one line for each op, and each node's last event says how many bytes of
messages it sent to whom; what all do together is not in there, and is shared out evenly.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from orchestra.events import Ended
from orchestra.report.reading import Run
from orchestra.strategies import EASGD, AllReduce, Downpour, LocalSGD, ParameterServer, SlowMo, Solo, SyncEASGD
from orchestra.strategy import Strategy

KINDS = ("compute", "send", "receive", "mean")
_TOGETHER = {"broadcast": "mean", "gather": "mean"}  # all are what everybody does at once
MOST = 40_000  # ops of a run in a page
_MOST_SEEN = 2_000_000  # ops of a run that are looked at
Flow = dict[tuple[int, int], float]  # bytes by sender and receiver


@dataclass(slots=True)
class Moved:
    """One op of a node."""

    node: int
    kind: str
    began: float
    seconds: float
    peer: int | None
    bytes: int
    met: float | None = None  # of a send, when it was received; of a receipt, when it was sent


@dataclass
class Trace:
    """What a trace tells: seconds of each node by kind, bytes between nodes, and the first ops themselves."""

    spent: dict[int, dict[str, float]] = field(default_factory=dict)
    flow: Flow = field(default_factory=dict)
    ops: list[Moved] = field(default_factory=list)
    left_out: int = 0  # ops that there was no room for


def read(run: Path, nodes: int, most: int = MOST) -> Trace | None:
    """The trace of a run, if it was traced."""
    trace, flow = Trace(), defaultdict[tuple[int, int], float](float)
    spent: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(KINDS, 0.0))
    moves = chain.from_iterable(_moves(path, nodes) for path in sorted(run.glob("trace-*.jsonl")))
    for move in islice(moves, _MOST_SEEN):
        spent[move.node][move.kind] += move.seconds
        if move.kind == "send" and move.peer is not None:
            flow[move.node, move.peer] += move.bytes
        trace.ops.append(move)
    if not trace.ops:
        return None
    trace.ops.sort(key=lambda move: move.began)
    _pair(trace.ops)
    trace.left_out = max(0, len(trace.ops) - most)
    del trace.ops[most:]
    trace.spent, trace.flow = dict(spent), dict(flow)
    return trace


def _pair(ops: list[Moved]) -> None:
    """What one node sends another comes in the order in which it was sent."""
    ways: dict[tuple[int, int], tuple[list[Moved], list[Moved]]] = defaultdict(lambda: ([], []))
    for op in ops:
        if op.peer is not None and op.kind == "send":
            ways[op.node, op.peer][0].append(op)
        elif op.peer is not None and op.kind == "receive":
            ways[op.peer, op.node][1].append(op)
    for sent, got in ways.values():
        for one, other in zip(sent, got, strict=False):  # the last may never have been read
            one.met, other.met = other.began + other.seconds, one.began


def _moves(path: Path, nodes: int) -> Iterator[Moved]:
    """The ops of a file; lines that are cut short or make no sense are passed over."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                found = json.loads(line)
                if found["event"] == "moved" and (move := _move(found, nodes)) is not None:
                    yield move
            except (ValueError, KeyError, TypeError, RecursionError):
                continue


def _move(found: dict[str, Any], nodes: int) -> Moved | None:
    node, kind, peer = found["node"], _TOGETHER.get(found["kind"], found["kind"]), found.get("peer")
    began, size = float(found["began"]), int(found.get("bytes") or 0)
    seconds = float(found["t"]) - began
    there = range(nodes)
    if kind not in KINDS or node not in there or not math.isfinite(began + seconds) or seconds < 0:
        return None
    return Moved(node, kind, began, seconds, peer if peer in there else None, size)


@dataclass(frozen=True)
class Traffic:
    """Bytes between nodes, and how they are known."""

    flow: Flow
    source: str  # "measured", or how it follows from totals


def traffic(run: Run, strategy: Strategy[Any] | None, trace: Trace | None) -> Traffic | None:
    """Bytes from each node to each other; None where only a trace would tell."""
    ended = [e for e in run.events if isinstance(e, Ended)]
    measured = {(e.node, int(peer)): float(size) for e in ended for peer, size in e.sent_to.items()}
    if measured:
        return Traffic(_with_means(measured, ended, run.facts.workers), "measured")
    if trace is not None and trace.flow:
        return Traffic(trace.flow, "measured")
    workers = {e.node: e for e in ended if e.node < run.facts.workers}
    if len(workers) < run.facts.workers:
        return None
    return _derived(strategy, workers, run.facts.servers)


def _with_means(messages: Flow, ended: list[Ended], workers: int) -> Flow:
    """Messages, and what workers sent beside them: in a mean, as much to every other."""
    flow = defaultdict[tuple[int, int], float](float, messages)
    for e in ended:
        rest = e.sent - sum(e.sent_to.values())
        for other in range(workers) if rest > 0 and e.node < workers else ():
            if other != e.node:
                flow[e.node, other] += rest / (workers - 1)
    return dict(flow)


def _derived(strategy: Strategy[Any] | None, workers: dict[int, Ended], servers: int) -> Traffic | None:
    n = len(workers)
    match strategy:
        case ParameterServer(colocated=False) | EASGD() | Downpour() if servers == 1:
            up = {(w, n): float(e.sent) for w, e in workers.items()}
            down = {(n, w): float(e.received) for w, e in workers.items()}
            return Traffic(up | down, "from totals: everything goes through the one server")
        case AllReduce(algorithm="ring") if n > 1:
            return Traffic({(w, (w + 1) % n): float(e.sent) for w, e in workers.items()}, "from totals, along the ring")
        case AllReduce(algorithm="native") | LocalSGD() | SyncEASGD() | SlowMo(base=Solo()) if n > 1:
            even = {(w, v): e.sent / (n - 1) for w, e in workers.items() for v in workers if v != w}
            return Traffic(even, "from totals: in a mean every worker sends as much to every other")
    return None
