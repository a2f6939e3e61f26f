# SPDX-License-Identifier: Apache-2.0
"""Figures of the runs under one condition: lines, points, and a row for each strategy."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from orchestra.formatting import size
from orchestra.report.drawing import INK, LINE, SOFT, Drawing, Scale, scale
from orchestra.report.statistics import median_interval
from orchestra.report.styles import COLOURS

_KINDS = {"compute": "#0072b2", "communicate": "#e69f00", "send": "#e69f00", "receive": "#cc79a7", "wait": "#b9c0c8"}
_GRID = 160  # points of a median over seeds
_FEW = 12  # points of a line that are all marked
_ENOUGH = 6  # times, for a 95 % interval of their median

Report = dict[str, Any]
Runs = Sequence[dict[str, Any]]
Curve = list[tuple[float, float]]


def look(report: Report, strategy: str) -> tuple[str, str]:
    """Return the colour and the marker of a strategy."""
    found = next(s for s in report["strategies"] if s["name"] == strategy)
    return COLOURS[found["colour"]][0], found["marker"]


def by_strategy(runs: Runs) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of each strategy."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        found.setdefault(run["strategy"], []).append(run)
    return found


def _seconds(report: Report) -> str:
    return "virtual seconds" if report["virtual"] else "seconds"


# Lines.


def with_names(title: str, names: Sequence[str]) -> Drawing:
    """Return a drawing with room for names on its right."""
    return Drawing(title, right=min(220, 34 + 6.6 * max(map(len, names))))


def lines(
    report: Report, d: Drawing, x: Scale, y: Scale, curves: dict[str, Curve], *, stairs: bool = False
) -> None:  # fmt: skip
    """Draw a line for each strategy with marks at its points (or at some of many) and its name beside the end.

    Where only some points are marked, they differ from line to line, so that two equal lines are both seen.
    """
    for i, (name, curve) in enumerate(curves.items()):
        colour, marker = look(report, name)
        corners = [(t, v) for k, (t, _) in enumerate(curve) for _, v in curve[max(0, k - 1) : k + 1]]
        d.line([(x(t), y(v)) for t, v in (corners if stairs else curve)], colour, width=2)
        apart = max(1, len(curve) // 6) if len(curve) > _FEW else 1
        for t, v in curve[(apart // 2 + i * apart // 5) % apart :: apart]:
            d.mark(x(t), y(v), marker, colour, r=4)
    _names(report, d, [(y(curve[-1][1]), name) for name, curve in curves.items()])


def _names(report: Report, d: Drawing, heights: Sequence[tuple[float, str]]) -> None:
    """Write the names on the right, without overlap."""
    last = -math.inf
    for height, name in sorted(heights):
        last = max(height, last + 16)
        colour, marker = look(report, name)
        d.mark(d.across[1] + 12, last, marker, colour, r=4)
        d.text(d.across[1] + 21, last + 4, name, size=11)


def _over_time(
    report: Report, runs: Runs, title: str, label: str, pick: Callable[[dict[str, Any]], Curve], *,
    log: bool = False, target: float | None = None,
) -> Drawing | None:  # fmt: skip
    """Draw the median over seeds of each strategy, and single seeds as thin lines."""
    drawn = [(run, curve) for run in runs if (curve := pick(run))]
    points = [point for _, curve in drawn for point in curve]
    if len(points) < 2:
        return None
    groups = {name: [c for run, c in drawn if run["strategy"] == name] for name in by_strategy([r for r, _ in drawn])}
    over = {name: [c for run, c in drawn if run["strategy"] == name and run["over"]] for name in groups}
    d = with_names(title, [*groups])
    x = scale([t for t, _ in points], *d.across, zero=True)
    y = scale([v for _, v in points], *d.upwards, log=log)
    d.x_axis(x, _seconds(report))
    d.y_axis(y, label)
    if target is not None and y.low <= target <= y.high:
        d.line([(d.left, y(target)), (d.across[1], y(target))], INK, dashes="5 4")
    for name, curves in groups.items():
        for curve in curves if len(curves) > 1 else []:
            d.line([(x(t), y(v)) for t, v in curve], look(report, name)[0], width=0.8, opacity=0.45)
    # A run that has just begun must not shorten the median of the others.
    lines(report, d, x, y, {name: median(over[name] or curves) for name, curves in groups.items()})
    return d


def median(curves: Sequence[Curve]) -> Curve:
    """Return the median of several curves over the range that all of them cover.

    >>> median([[(0.0, 1.0), (2.0, 3.0)], [(0.0, 5.0), (1.0, 5.0)], [(0.0, 9.0), (4.0, 9.0)]])[-1]
    (1.0, 5.0)
    """
    if len(curves) == 1:
        return curves[0]
    low, high = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    grid = np.unique([low, high, *(t for curve in curves for t, _ in curve if low <= t <= high)])
    if len(grid) > _GRID:  # else the points are those that were measured
        grid = np.linspace(low, high, _GRID)
    heights = [np.interp(grid, *np.transpose(curve)) for curve in curves]
    return [*zip(grid.tolist(), np.median(heights, axis=0).tolist(), strict=True)]


def _seeds(runs: Runs) -> str:
    seeds = len({run["seed"] for run in runs})
    return f"median of {seeds} seeds, single ones thin" if seeds > 1 else "one seed"


def _score(report: Report, runs: Runs) -> Drawing | None:
    metric, goal = report["metric"], report["target"]

    def pick(run: dict[str, Any]) -> Curve:
        values = run["scores"]["metrics"].get(metric, []) if run["scores"] else []
        return [(t, v) for t, v in zip(run["scores"]["t"], values, strict=True) if v is not None] if values else []

    value = goal["value"] if goal is not None and goal["metric"] == metric else None
    what = _seeds(runs) if value is None else f"{_seeds(runs)}; dashed: target {value:g}"
    return _over_time(report, runs, f"Test {metric} ({what})", str(metric), pick, target=value)


def _loss(report: Report, runs: Runs) -> Drawing | None:
    def pick(run: dict[str, Any]) -> Curve:
        return [*zip(run["training"]["t"], run["training"]["loss"], strict=True)] if run["training"] else []

    return _over_time(report, runs, f"Training loss ({_seeds(runs)})", "loss", pick, log=True)


def _consensus(report: Report, runs: Runs) -> Drawing | None:
    """Draw the distance between the replicas, as logged by the strategy."""

    def pick(run: dict[str, Any]) -> Curve:
        said = run["logged"].get("consensus")
        return [*zip(said["t"], said["value"], strict=True)] if said else []

    return _over_time(report, runs, "Consensus distance (first seed)", "distance from the mean", pick, log=True)


def _step_times(report: Report, runs: Runs) -> Drawing | None:
    """Draw the distribution of step times over all workers and seeds."""
    # Every worker has the same number of quantiles, each weighted by the worker's number of steps.
    times = {name: [(t, worker["count"] / len(worker["seconds"]))
                    for run in own for worker in run["step_times"] for t in worker["seconds"] if t > 0]
             for name, own in by_strategy(runs).items()}  # fmt: skip
    times = {name: sorted(found) for name, found in times.items() if found}
    if not times:
        return None
    d = with_names("How long steps took, those of all workers together", [*times])
    x = scale([t for found in times.values() for t, _ in found], *d.across, log=True)
    y = scale([0.0, 100.0], *d.upwards)
    d.x_axis(x, f"{_seconds(report)} of a step")
    d.y_axis(y, "% of the steps took no longer")
    lines(report, d, x, y, {name: shares(found) for name, found in times.items()}, stairs=True)
    return d


def shares(weighted: Sequence[tuple[float, float]]) -> Curve:
    """Return the values in order of size, each with the per cent of the weights at or below it.

    >>> shares([(0.1, 9.0), (0.5, 1.0)])
    [(0.1, 90.0), (0.5, 100.0)]
    """
    values, weights = np.transpose(weighted)
    return [*zip(values.tolist(), (100 * np.cumsum(weights) / np.sum(weights)).tolist(), strict=True)]


# Points.


def _cost(report: Report, runs: Runs, cost: Callable[[dict[str, Any]], float], label: str) -> Drawing | None:
    """Draw the final score against its cost, with a line through the strategies that no other beats in both."""
    metric = report["metric"]
    groups = by_strategy([run for run in runs if metric in run["metrics"]])
    if len(groups) < 2:
        return None
    found = {name: [(cost(run), run["metrics"][metric]) for run in own] for name, own in groups.items()}
    means = {name: (statistics.fmean(c for c, _ in own), statistics.fmean(v for _, v in own))
             for name, own in found.items()}  # fmt: skip
    d = with_names(f"Final {metric} and its cost: means, least to most", [*groups])
    x = scale([c for own in found.values() for c, _ in own], *d.across, zero=True)
    y = scale([v for own in found.values() for _, v in own], *d.upwards)
    d.x_axis(x, label or _seconds(report), grid=True)
    d.y_axis(y, f"final {metric}; dashed: none is better in both")
    front = unbeaten([*means.values()], lower=report["metrics"].get(metric, False))
    corners = [(x(c), y(v)) for i, (c, _) in enumerate(front) for _, v in front[max(0, i - 1) : i + 1]]
    d.line(corners, SOFT, dashes="3 3")
    for name, (c, v) in means.items():
        colour, marker = look(report, name)
        (low, high), (least, most) = ((min(side), max(side)) for side in zip(*found[name], strict=True))
        d.line([(x(low), y(v)), (x(high), y(v))], colour)
        d.line([(x(c), y(least)), (x(c), y(most))], colour)
        d.mark(x(c), y(v), marker, colour, r=6)
    _names(report, d, [(y(v), name) for name, (_, v) in means.items()])
    return d


def unbeaten(points: Curve, *, lower: bool) -> Curve:
    """Return the Pareto front of points (cost, score), the cheapest first.

    >>> unbeaten([(1.0, 0.5), (2.0, 0.4), (3.0, 0.9)], lower=False)
    [(1.0, 0.5), (3.0, 0.9)]
    """
    front: Curve = []
    for cost, score in sorted(points, key=lambda p: (p[0], p[1] if lower else -p[1])):
        if not front or (score < front[-1][1] if lower else score > front[-1][1]):
            front.append((cost, score))
    return front


# A row for each strategy.


def _rows(title: str, names: Sequence[str], **more: Any) -> Drawing:
    left = 18 + 6.8 * max(map(len, names))
    return Drawing(title, height=100 + 34 * len(names), left=left, **more)


def _race(report: Report, runs: Runs) -> Drawing | None:
    if report["target"] is None:
        return None
    groups = by_strategy(runs)
    times = {name: [r["reached"] for r in own if r["reached"] is not None] for name, own in groups.items()}
    order = sorted(groups, key=lambda n: (len(times[n]) < len(groups[n]), statistics.median(times[n] or [math.inf])))
    d = _rows(f"Time to {report['target']['text']}: median and {_interval(times.values())}", order, right=60)
    x = scale([r["reached"] or r["seconds"] for r in runs], *d.across, zero=True)
    d.x_axis(x, _seconds(report), grid=True)
    for i, name in enumerate(order):
        height = d.top + 14 + 34 * i
        colour, marker = look(report, name)
        d.text(d.left - 10, height + 4, name, anchor="end")
        if found := times[name]:
            d.line([(x(end), height) for end in median_interval(found)], colour, width=2.5)
            d.line([(x(statistics.median(found)), height + dy) for dy in (-10, 10)], colour, width=2.5)
        for run in groups[name]:
            hollow = run["reached"] is None
            where = x(run["seconds"] if hollow else run["reached"])
            d.mark(where, height, "circle" if hollow else marker, colour, hollow=hollow)
        if len(found) < len(groups[name]):
            text = f"not reached in {len(groups[name]) - len(found)} of {len(groups[name])}"
            d.text(min(x(r["seconds"]) for r in groups[name]) - 10, height + 4, text, anchor="end", size=11)
    return d


def _interval(times: Any) -> str:
    """Return what the line beside a median shows."""
    enough = {len(found) >= _ENOUGH for found in times if len(found) > 1}
    few = f"; of less than {_ENOUGH} runs least to most" if len(enough) > 1 else ""
    return f"its 95 % interval{few}" if True in enough else "least to most"


def _bytes(report: Report, runs: Runs) -> Drawing | None:
    groups = by_strategy(runs)
    sent = {name: statistics.fmean(r["sent_per_worker"] for r in own) for name, own in groups.items()}
    if not any(sent.values()):
        return None
    d = _rows("Megabytes sent by a worker; a tick where the formula has it", [*groups], right=80)
    x = scale([*(value / 1e6 for value in sent.values())], *d.across, zero=True)
    d.x_axis(x, "MB", grid=True)
    for i, (name, own) in enumerate(groups.items()):
        height = d.top + 14 + 34 * i
        d.text(d.left - 10, height + 4, name, anchor="end")
        d.bar(x(0), height - 9, x(sent[name] / 1e6) - x(0), 18, look(report, name)[0])
        known = [r["formula"]["bytes"] for r in own if r["formula"]]
        if known:
            d.line([(x(statistics.fmean(known) / 1e6), height + dy) for dy in (-13, 13)], INK, width=2.5)
        d.text(x(sent[name] / 1e6) + 9, height + 4, size(sent[name]), size=11)
    return d


def _waiting(report: Report, runs: Runs) -> Drawing | None:
    """Draw the workers' mean shares of time."""
    groups = {name: [n for r in own for n in r["nodes"] if n["role"] == "worker" and n["seconds"] > 0]
              for name, own in by_strategy(runs).items()}  # fmt: skip
    groups = {name: nodes for name, nodes in groups.items() if nodes}
    if not groups:
        return None
    d = _rows("Where the workers' time went", [*groups], right=30)
    x = scale([0.0, 100.0], *d.across)
    d.x_axis(x, "% of the time")
    for i, (name, nodes) in enumerate(groups.items()):
        height, at = d.top + 14 + 34 * i, 0.0
        d.text(d.left - 10, height + 4, name, anchor="end")
        for kind, colour in _KINDS.items():
            share = 100 * statistics.fmean(n["spent"].get(kind, 0.0) / n["seconds"] for n in nodes)
            d.bar(x(at), height - 10, x(at + share) - x(at), 20, colour)
            if share > 7:
                white = "#ffffff" if kind == "compute" else INK
                d.text(x(at + share / 2), height + 4, f"{kind} {share:.0f} %" if share > 22 else f"{share:.0f} %",
                       anchor="middle", size=11, colour=white)  # fmt: skip
            at += share
    return d


def _histogram(report: Report, runs: Runs, name: str, title: str, unit: str) -> Drawing | None:
    """Draw one histogram per strategy, one below the other on one axis; dashed: the strategy's bound."""
    groups, counts = by_strategy(runs), dict[str, Counter[int]]()
    for strategy, own in groups.items():
        counts[strategy] = sum((Counter(dict(run["counts"].get(name, []))) for run in own), Counter())
    counts = {strategy: found for strategy, found in counts.items() if found}
    if not counts:
        return None
    bounds = {s: bound[1] for s in counts if (bound := groups[s][0]["bound"]) and bound[0] == name}
    d = Drawing(title, height=80 + 90 * len(counts), left=40, right=30)
    x = scale([-0.6, max([*bounds.values(), *(v for found in counts.values() for v in found)]) + 0.6], *d.across)
    d.x_axis(x, unit)
    for i, (strategy, found) in enumerate(counts.items()):
        floor, whole = d.top + 76 + 90 * i, found.total()
        mean = sum(value * n for value, n in found.items()) / whole
        d.text(d.left, floor - 62, f"{strategy}: mean {mean:.3g}, at most {max(found)}", size=11)
        for value, n in found.items():
            high = 52 * n / max(found.values())
            d.bar(x(value - 0.42), floor - high, x(value + 0.42) - x(value - 0.42), high, look(report, strategy)[0])
        d.line([(d.left, floor), (d.across[1], floor)], LINE)
        if strategy in bounds:
            edge = x(bounds[strategy] + 0.5)
            d.line([(edge, floor - 56), (edge, floor)], INK, dashes="5 3")
    return d


FIGURES: dict[str, Callable[[Report, Runs], Drawing | None]] = {
    "score": _score,
    "training-loss": _loss,
    "time-to-target": _race,
    "pareto-time": partial(_cost, cost=lambda run: run["seconds"], label=""),
    "pareto-bytes": partial(
        _cost,
        cost=lambda run: (run["sent_per_worker"] + run["received_per_worker"]) / 1e6,
        label="MB sent and received by a worker",
    ),
    "bytes": _bytes,
    "waiting": _waiting,
    "step-times": _step_times,
    "gradient-age": partial(
        _histogram,
        name="staleness",
        title="Age of gradients: updates between a worker's pull and its push",
        unit="updates",
    ),
    "gap": partial(_histogram, name="gap", title="Steps ahead of the slowest worker; dashed: the bound", unit="steps"),
    "consensus": _consensus,
}
