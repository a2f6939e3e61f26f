# SPDX-License-Identifier: Apache-2.0
"""The figures of a report for a paper: SVG drawn here, PNG by a browser that draws the SVG."""

from __future__ import annotations

import math
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from orchestra.errors import EnvironmentProblem
from orchestra.report.drawing import INK, SOFT, Drawing, number, scale
from orchestra.report.looks import COLOURS
from orchestra.words import size

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_PATIENCE = 60.0  # seconds that a browser may take for a figure
_SHARP = 2  # pixels of a PNG for one of the SVG
_KINDS = {"compute": "#0072b2", "communicate": "#e69f00", "send": "#e69f00", "receive": "#cc79a7", "wait": "#b9c0c8"}
_MOST_CONDITIONS = 12

Story = dict[str, Any]
Runs = Sequence[dict[str, Any]]


def draw(story: Story) -> dict[str, str]:
    """Every figure that there is something to show in, by the name of its file."""
    found: dict[str, str] = {}
    for condition in story["conditions"][:_MOST_CONDITIONS]:
        runs = [run for run in story["runs"] if run["condition"] == condition]
        slug = "-".join("".join(c if c.isalnum() else " " for c in condition).split())[:60]
        for name, make in _FIGURES.items():
            if (drawing := make(story, runs)) is not None:
                drawing.title += f" · {condition}" if condition else ""
                found[f"{name}-{slug}" if slug else name] = drawing.svg()
    if len(story["conditions"]) > 1:
        found["conditions"] = _conditions(story).svg()
    return found


def _look(story: Story, strategy: str) -> tuple[str, str]:
    look = next(s for s in story["strategies"] if s["name"] == strategy)
    return COLOURS[look["colour"]][0], look["marker"]


def _groups(runs: Runs) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        found.setdefault(run["strategy"], []).append(run)
    return found


def _seconds(story: Story) -> str:
    return "virtual seconds" if story["virtual"] else "seconds"


# Curves.

Curve = list[tuple[float, float]]


def _curves(
    story: Story, runs: Runs, title: str, label: str, pick: Callable[[dict[str, Any]], Curve], *,
    log: bool = False, target: float | None = None,
) -> Drawing | None:  # fmt: skip
    curves = {name: [c for run in own if (c := pick(run))] for name, own in _groups(runs).items()}
    points = [point for own in curves.values() for curve in own for point in curve]
    if len(points) < 2:
        return None
    longest = max(len(name) for name in curves)
    d = Drawing(title, right=min(220, 34 + 6.6 * longest))
    x = scale([t for t, _ in points], *d.across, zero=True)
    y = scale([v for _, v in points], *d.upwards, log=log)
    d.x_axis(x, _seconds(story))
    d.y_axis(y, label)
    if target is not None and y.low <= target <= y.high:
        d.line([(d.left, y(target)), (d.across[1], y(target))], INK, dashes="5 4")
    ends = []
    for name, own in curves.items():
        colour, marker = _look(story, name)
        for i, curve in enumerate(own):
            width, opacity = (2.0, 1.0) if i == 0 else (0.8, 0.45)
            d.line([(x(t), y(v)) for t, v in curve], colour, width=width, opacity=opacity)
        for t, v in own[0][len(own[0]) // 12 :: max(1, len(own[0]) // 6)] if own else []:
            d.mark(x(t), y(v), marker, colour, r=4)
        ends += [(y(own[0][-1][1]), name)] if own else []
    _names(story, d, ends)
    return d


def _names(story: Story, d: Drawing, ends: Sequence[tuple[float, str]]) -> None:
    """Beside the ends of the curves, and apart from each other."""
    last = -math.inf
    for height, name in sorted(ends):
        last = max(height, last + 16)
        colour, marker = _look(story, name)
        d.mark(d.across[1] + 12, last, marker, colour, r=4)
        d.text(d.across[1] + 21, last + 4, name, size=11)


def _score(story: Story, runs: Runs) -> Drawing | None:
    metric, goal = story["metric"], story["target"]

    def pick(run: dict[str, Any]) -> Curve:
        values = run["scores"]["metrics"].get(metric, []) if run["scores"] else []
        return [(t, v) for t, v in zip(run["scores"]["t"], values, strict=True) if v is not None] if values else []

    value = goal["value"] if goal is not None and goal["metric"] == metric else None
    what = "thin: other seeds" if value is None else f"dashed: target {value:g}; thin: other seeds"
    return _curves(story, runs, f"Test {metric} ({what})", str(metric), pick, target=value)


def _loss(story: Story, runs: Runs) -> Drawing | None:
    def pick(run: dict[str, Any]) -> Curve:
        return [*zip(run["training"]["t"], run["training"]["loss"], strict=True)] if run["training"] else []

    return _curves(story, runs, "Training loss", "loss", pick, log=True)


# A line for each strategy.


def _rows(title: str, names: Sequence[str], **more: Any) -> Drawing:
    left = 18 + 6.8 * max(map(len, names))
    return Drawing(title, height=100 + 34 * len(names), left=left, **more)


def _race(story: Story, runs: Runs) -> Drawing | None:
    if story["target"] is None:
        return None
    groups = _groups(runs)
    times = {name: [r["reached"] for r in own if r["reached"] is not None] for name, own in groups.items()}
    order = sorted(groups, key=lambda n: (len(times[n]) < len(groups[n]), statistics.median(times[n] or [math.inf])))
    d = _rows(f"Time to {story['target']['text']}", order, right=60)
    x = scale([r["reached"] or r["seconds"] for r in runs], *d.across, zero=True)
    d.x_axis(x, _seconds(story), grid=True)
    for i, name in enumerate(order):
        height = d.top + 14 + 34 * i
        colour, marker = _look(story, name)
        d.text(d.left - 10, height + 4, name, anchor="end")
        if found := times[name]:
            d.line([(x(min(found)), height), (x(max(found)), height)], colour, width=2.5)
            d.line([(x(statistics.median(found)), height + dy) for dy in (-10, 10)], colour, width=2.5)
        for run in groups[name]:
            hollow = run["reached"] is None
            where = x(run["seconds"] if hollow else run["reached"])
            d.mark(where, height, "circle" if hollow else marker, colour, hollow=hollow)
        if len(found) < len(groups[name]):
            text = f"not reached in {len(groups[name]) - len(found)} of {len(groups[name])}"
            d.text(min(x(r["seconds"]) for r in groups[name]) - 10, height + 4, text, anchor="end", size=11)
    return d


def _bytes(story: Story, runs: Runs) -> Drawing | None:
    groups = _groups(runs)
    sent = {name: statistics.fmean(r["sent_per_worker"] for r in own) for name, own in groups.items()}
    if not any(sent.values()):
        return None
    d = _rows("Megabytes sent by a worker; a tick where the formula has it", [*groups], right=80)
    x = scale([*(value / 1e6 for value in sent.values())], *d.across, zero=True)
    d.x_axis(x, "MB", grid=True)
    for i, (name, own) in enumerate(groups.items()):
        height = d.top + 14 + 34 * i
        d.text(d.left - 10, height + 4, name, anchor="end")
        d.bar(x(0), height - 9, x(sent[name] / 1e6) - x(0), 18, _look(story, name)[0])
        known = [r["formula"]["bytes"] for r in own if r["formula"]]
        if known:
            d.line([(x(statistics.fmean(known) / 1e6), height + dy) for dy in (-13, 13)], INK, width=2.5)
        d.text(x(sent[name] / 1e6) + 9, height + 4, size(sent[name]), size=11)
    return d


def _waiting(story: Story, runs: Runs) -> Drawing | None:
    """The workers' mean shares of time."""
    groups = {name: [n for r in own for n in r["nodes"] if n["role"] == "worker" and n["seconds"] > 0]
              for name, own in _groups(runs).items()}  # fmt: skip
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


_FIGURES: dict[str, Callable[[Story, Runs], Drawing | None]] = {
    "score": _score,
    "training-loss": _loss,
    "time-to-target": _race,
    "bytes": _bytes,
    "waiting": _waiting,
}


# All conditions.


def _conditions(story: Story) -> Drawing:
    """Who wins where: seconds, and the first of each condition boxed."""
    names = [s["name"] for s in story["strategies"]]
    conditions = story["conditions"]
    deep = max(condition.count(" · ") + 1 for condition in conditions)
    left = 18 + 6.8 * max(map(len, names))
    goal = f"Median seconds to {story['target']['text']}" if story["target"] else "Median seconds of a run"
    d = Drawing(goal, width=left + 112 * len(conditions) + 16, height=62 + 15 * deep + 42 * len(names), left=left)
    top = 44 + 15 * deep
    for j, name in enumerate(names):
        d.text(left - 10, top + 42 * j + 24, name, anchor="end")
    for i, condition in enumerate(conditions):
        for k, line in enumerate(condition.split(" · ")):
            d.text(left + 112 * i + 54, 44 + 15 * k, line, anchor="middle", size=11, colour=SOFT)
        times = {name: _time(story, name, condition) for name in names}
        best = min((t for t in times.values() if t is not None), default=None)
        for j, name in enumerate(names):
            _cell(d, left + 112 * i, top + 42 * j, times[name], best)
    return d


def _time(story: Story, name: str, condition: str) -> float | None:
    own = [r for r in story["runs"] if r["strategy"] == name and r["condition"] == condition]
    times = [r["reached"] if story["target"] else r["seconds"] for r in own]
    return statistics.median(times) if own and None not in times else None


def _cell(d: Drawing, x: float, y: float, time: float | None, best: float | None) -> None:
    if time is None or not best:
        d.bar(x, y, 108, 38, "#f6f7f9")
        d.text(x + 54, y + 24, "-", anchor="middle", colour=SOFT)
        return
    share = min(1.0, math.log(time / best) / math.log(12))
    mixed = [round(a + share * (b - a)) for a, b in zip((230, 241, 249), (232, 149, 90), strict=True)]
    d.bar(x, y, 108, 38, f"rgb({','.join(map(str, mixed))})", edge=INK if time == best else "none")
    d.text(x + 54, y + 17, f"{number(time)} s", anchor="middle", bold=time == best)
    d.text(x + 54, y + 31, "first" if time == best else f"{time / best:.2f}×", anchor="middle", size=10.5, colour=SOFT)


# Pixels.


def pictures(story: Story) -> dict[str, bytes]:
    """The same figures as PNG, which takes a browser."""
    browser = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        raise EnvironmentProblem(
            "PNG figures are drawn by Chromium, and there is none here. Install it (apt-get install chromium), or take "
            "--format svg, which needs nothing."
        )
    return dict(_photographed(draw(story), browser))


def _photographed(figures: dict[str, str], browser: str) -> Iterator[tuple[str, bytes]]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        for name, text in figures.items():
            width, height = (
                round(float(text.split(f'{side}="', 1)[1].split('"', 1)[0])) for side in ("width", "height")
            )
            source, target = folder / f"{name}.svg", folder / f"{name}.png"
            source.write_text(text, encoding="utf-8")
            flags = ["--headless=new", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder / 'profile'}"]
            flags += ["--no-sandbox"] * (os.geteuid() == 0)  # root has none; what is drawn is our own
            flags += [f"--force-device-scale-factor={_SHARP}", f"--window-size={width},{height}"]
            command = [browser, *flags, f"--screenshot={target}", source.as_uri()]
            try:
                subprocess.run(command, check=True, capture_output=True, timeout=_PATIENCE)
                yield name, target.read_bytes()
            except (OSError, subprocess.SubprocessError) as error:
                raise EnvironmentProblem(f"{browser} did not draw {name}: {error}. Take --format svg.") from None
