# SPDX-License-Identifier: Apache-2.0
"""A run's events as columns of numbers, few enough to draw: the size of a page does not grow with the run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from orchestra.runs.dropped_events import Dropped
from orchestra.runs.events import Event, Logged, Sampled, Scored, Stepped

Column = npt.NDArray[np.float64]
MOST = 2000  # points of a curve
BUCKETS = 120  # of the training loss, which is noisy from batch to batch
QUANTILES = 101
SAID = 400  # points of what a strategy logged


class StepColumns:
    """All steps of a run as columns, in order of time."""

    def __init__(self, events: Sequence[Event]) -> None:
        names = (
            "t",
            "node",
            "step",
            "samples",
            "loss",
            "compute",
            "communicate",
            "wait",
            "sent",
            "received",
            "sampled",
        )
        rows = [
            (e.t, e.node, e.step, e.samples, np.nan if e.loss is None else e.loss,
             e.compute, e.communicate, e.wait, e.sent, e.received, isinstance(e, Sampled))
            for e in events
            if isinstance(e, Stepped)
        ]  # fmt: skip
        table = np.array(rows, dtype=np.float64).reshape(len(rows), len(names))
        table = table[np.lexsort((table[:, 2], table[:, 0]))]
        self._column = {name: table[:, i] for i, name in enumerate(names)}
        nodes, starts = np.unique(np.sort(self["node"]), return_index=True)
        rows_of = np.split(np.argsort(self["node"], kind="stable"), starts[1:])
        self._rows = {int(node): rows for node, rows in zip(nodes, rows_of, strict=False)}
        self.nodes = [*self._rows]

    def __getitem__(self, name: str) -> Column:
        return self._column[name]

    def of(self, node: int, name: str) -> Column:
        """Return a column of one node."""
        column: Column = self[name][self._rows[node]]
        return column

    def gained(self, node: int, name: str) -> Column:
        """Return by how much a total grew in each step of a node."""
        return np.diff(self.of(node, name), prepend=0.0)

    def total(self, name: str) -> Column:
        """Return a total over all nodes, after each step of any node."""
        gained = np.zeros(len(self["t"]))
        for node, rows in self._rows.items():
            gained[rows] = self.gained(node, name)
        return np.cumsum(gained)

    def traffic(self) -> Column:
        """Return the bytes sent and received by a node, on average, after each step of any node."""
        return (self.total("sent") + self.total("received")) / max(1, len(self.nodes))


def training(steps: StepColumns) -> dict[str, list[float]]:
    """Return the training loss by time, samples and bytes: bucket means, with each bucket's minimum and maximum."""
    known = ~np.isnan(steps["loss"])
    count = int(known.sum())
    if not count:
        return {name: [] for name in ("t", "samples", "bytes", "loss", "low", "high")}
    edges = np.unique(np.linspace(0, count, min(count, BUCKETS) + 1).astype(int))
    loss, last = steps["loss"][known], edges[1:] - 1
    means = np.add.reduceat(loss, edges[:-1]) / np.diff(edges)
    return {
        "t": rounded(steps["t"][known][last]),
        "samples": rounded(steps.total("samples")[known][last]),
        "bytes": rounded(steps.traffic()[known][last]),
        "loss": rounded(means),
        "low": rounded(np.minimum.reduceat(loss, edges[:-1])),
        "high": rounded(np.maximum.reduceat(loss, edges[:-1])),
    }


def scored(scores: Sequence[Scored], steps: StepColumns) -> dict[str, Any]:
    """Return the scores by time, samples and bytes."""
    times = np.array([s.t for s in scores])
    bytes_then = np.interp(times, steps["t"], steps.traffic(), left=0.0) if len(steps["t"]) else times * 0
    names = sorted({name for s in scores for name in s.metrics})
    figures = {name: np.array([s.metrics.get(name, np.nan) for s in scores]) for name in names}
    kept = thinned(times, figures[names[0]]) if names else np.arange(0)
    return {
        "t": rounded(times[kept]),
        "samples": rounded(np.array([s.samples for s in scores], dtype=np.float64)[kept]),
        "bytes": rounded(bytes_then[kept]),
        "metrics": {name: rounded(column[kept]) for name, column in figures.items()},
    }


def logged(events: Sequence[Event], names: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """Return the values that strategies logged, by time: means over the nodes that logged the same step."""
    found = {}
    for name in names:
        said = np.array([(e.step, e.t, e.value) for e in events if isinstance(e, Logged) and e.name == name])
        if len(said):
            _, of = np.unique(said[:, 0], return_inverse=True)
            t, value = (np.bincount(of, column) / np.bincount(of) for column in said.T[1:])
            order = np.argsort(t, kind="stable")
            t, value = t[order], value[order]
            kept = thinned(t, value, SAID)
            found[name] = {"t": rounded(t[kept]), "value": rounded(value[kept])}
    return found


def step_times(steps: StepColumns, lost: Dropped | None = None) -> list[dict[str, Any]]:
    """Return quantiles of the step times of each worker, from the shortest to the longest.

    Each quantile is the time of a step; for steps whose events a long run has dropped, it is exact to within 5 %.
    """
    shares, found = np.linspace(0, 1, QUANTILES), []
    for node in steps.nodes:
        times = steps.gained(node, "t")[steps.of(node, "sampled") == 0]
        weights = np.ones(len(times))
        for seconds, count in (lost.times.get(node, {}) if lost is not None else {}).items():
            times, weights = np.append(times, seconds), np.append(weights, count)
        if not len(times):
            continue
        order = np.argsort(times, kind="stable")
        reached = np.cumsum(weights[order])
        at = np.searchsorted(reached, np.maximum(1.0, np.ceil(shares * reached[-1] - 1e-9)))
        found.append({"node": node, "count": int(reached[-1]), "seconds": rounded(times[order][at])})
    return found


def lanes(steps: StepColumns, most: int) -> list[dict[str, Any]]:
    """Return a timeline: ends of steps and their parts, in whole microseconds, `together` steps in a block."""
    found = []
    for node in steps.nodes:
        ends = steps.of(node, "t")
        together = max(1, -(-len(ends) // max(1, most)))
        last = np.unique(np.append(np.arange(together - 1, len(ends), together), len(ends) - 1))
        lane: dict[str, Any] = {"node": node, "together": together, "t": _micro(ends[last])}
        for name in ("compute", "wait", "communicate"):
            lane[name] = _micro(steps.of(node, name)[last])
        found.append(lane)
    return found


def coarser(lanes: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Return the same timeline with at most `most` blocks in a lane."""
    return [_coarser(lane, -(-len(lane["t"]) // most)) for lane in lanes]


def _coarser(lane: dict[str, Any], together: int) -> dict[str, Any]:
    if together <= 1:
        return lane
    gains = {
        name: [sum(column[i : i + together]) for i in range(0, len(column), together)]
        for name, column in lane.items()
        if name not in ("node", "together")
    }
    return {**lane, **gains, "together": lane["together"] * together}


def _micro(totals: Column) -> list[int]:
    """Return by how much totals grew, in whole microseconds that add up."""
    whole = np.maximum.accumulate(np.rint(totals * 1e6))
    return [int(x) for x in np.diff(whole, prepend=0.0)]


def thinned(x: Column, y: Column, most: int = MOST) -> npt.NDArray[np.intp]:
    """Return the indices of points to keep so that a curve looks the same: each bucket's extremes, and the ends."""
    if len(x) <= most:
        return np.arange(len(x))
    filled = np.nan_to_num(y, nan=float(np.nanmedian(y)))
    edges = np.linspace(0, len(x), (most - 2) // 2 + 1).astype(int)
    kept = {0, len(x) - 1}
    for a, b in pairwise(edges):
        kept |= {int(a + np.argmin(filled[a:b])), int(a + np.argmax(filled[a:b]))}
    return np.array(sorted(kept))


def rounded(column: Column) -> list[float]:
    """Round to six significant digits: more are not visible, and make the file three times as large."""
    return [float(f"{x:.6g}") for x in column]
