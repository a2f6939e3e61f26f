# SPDX-License-Identifier: Apache-2.0
"""The figures of a report for a paper: SVG drawn here, PNG by a browser that draws the SVG."""

from __future__ import annotations

import math
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from orchestra.errors import EnvironmentProblem
from orchestra.report.drawing import INK, SOFT, Drawing, number, scale
from orchestra.report.plots import FIGURES, Report, Runs, by_strategy, lines, with_names

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_PATIENCE = 60.0  # seconds that a browser may take for a figure
_SHARP = 2  # pixels of a PNG for one of the SVG
_MOST_CONDITIONS = 12
_LONGEST = 60  # characters of a condition in the name of a file


def draw(report: Report) -> dict[str, str]:
    """Return every figure for which there is data, by the name of its file."""
    found: dict[str, Drawing] = {}
    conditions = report["conditions"][:_MOST_CONDITIONS]
    for condition, slug in zip(conditions, slugs(conditions), strict=True):
        runs = [run for run in report["runs"] if run["condition"] == condition]
        for name, make in FIGURES.items():
            if (drawing := make(report, runs)) is not None:
                drawing.title += f" · {condition}" if condition else ""
                found[f"{name}-{slug}" if slug else name] = drawing
    if len(report["conditions"]) > 1:
        found |= _scaling(report) | {"conditions": _conditions(report)}
    return {name: drawing.svg() for name, drawing in found.items()}


def left_out(report: Report) -> list[str]:
    """Return the conditions without figures of their own, beyond the first twelve."""
    found: list[str] = report["conditions"][_MOST_CONDITIONS:]
    return found


def slugs(conditions: Sequence[str]) -> list[str]:
    """Return conditions as parts of file names, no two alike.

    >>> slugs(["", "batch 8 · lr 0.1", "batch 8, lr 0.1"])
    ['', 'batch-8-lr-0-1', 'batch-8-lr-0-1-2']
    """
    found: list[str] = []
    for condition in conditions:
        words = "".join(c if c.isascii() and c.isalnum() else " " for c in condition).split()
        slug = "-".join(words)[:_LONGEST]
        more = (f"{slug}-{k}" for k in range(2, len(conditions) + 2))
        found.append(next(name for name in (slug, *more) if name not in found))
    return found


# All conditions.


def _scaling(report: Report) -> dict[str, Drawing]:
    """Draw the throughput against the number of nodes, one figure for each set of equal other settings."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in report["runs"]:
        rest = " · ".join(part for part in run["condition"].split(" · ") if not part.startswith("workers "))
        groups.setdefault(rest, []).append(run)
    drawn = {rest: _against_nodes(report, rest, runs) for rest, runs in groups.items()}
    names = zip(drawn, slugs([*drawn]), strict=True)
    return {f"scaling-{slug}" if slug else "scaling": d for rest, slug in names if (d := drawn[rest]) is not None}


def _against_nodes(report: Report, condition: str, runs: Runs) -> Drawing | None:
    """Draw samples per second against nodes; the ideal line scales the best rate per node at the fewest nodes."""
    speeds: dict[str, list[tuple[float, float]]] = {}
    for name, own in by_strategy(runs).items():
        at: dict[int, list[float]] = {}
        for run in own:
            at.setdefault(run["workers"] + run["servers"], []).append(run["samples_per_second"])
        if len(at) > 1 and all(sum(found) > 0 for found in at.values()):
            speeds[name] = [(n, statistics.fmean(found)) for n, found in sorted(at.items())]
    points = [point for own in speeds.values() for point in own]
    if not points:
        return None
    fewest, most = min(points)[0], max(points)[0]
    each = max(speed / n for n, speed in points if n == fewest)
    d = with_names(
        "Throughput by nodes; dashed: linear speed-up of the best" + f" · {condition}" * bool(condition), [*speeds]
    )
    x = scale([fewest, most], *d.across, log=True)
    y = scale([each * fewest, each * most, *(speed for _, speed in points)], *d.upwards, log=True)
    d.x_axis(x, "nodes, servers counted", ticks=_apart(sorted({n for n, _ in points})))
    d.y_axis(y, "samples a second")
    d.line([(x(n), y(each * n)) for n in (fewest, most)], INK, dashes="5 4")
    lines(report, d, x, y, speeds)
    return d


def _apart(ticks: Sequence[float]) -> list[float]:
    """Return the ticks without those that would touch others."""
    kept: list[float] = []
    for tick in ticks:
        kept += [tick] if not kept or tick / kept[-1] > 1.2 else []
    return kept


def _conditions(report: Report) -> Drawing:
    """Draw the seconds of each strategy under each condition; those that may have been first are boxed."""
    names = [s["name"] for s in report["strategies"]]
    conditions = report["conditions"]
    deep = max(condition.count(" · ") + 1 for condition in conditions)
    left = 18 + 6.8 * max(map(len, names))
    goal = f"Median seconds to {report['target']['text']}" if report["target"] else "Median seconds of a run"
    d = Drawing(goal, width=left + 112 * len(conditions) + 16, height=62 + 15 * deep + 42 * len(names), left=left)
    top = 44 + 15 * deep
    for j, name in enumerate(names):
        d.text(left - 10, top + 42 * j + 24, name, anchor="end")
    for i, condition in enumerate(conditions):
        for k, line in enumerate(condition.split(" · ")):
            d.text(left + 112 * i + 54, 44 + 15 * k, line, anchor="middle", size=11, colour=SOFT)
        times = {name: _time(report, name, condition) for name in names}
        best = min((t for t in times.values() if t is not None), default=None)
        for j, name in enumerate(names):
            first = report["firsts"].get(condition, [])
            word = "" if name not in first else "first" if len(first) == 1 else "tie"
            _cell(d, left + 112 * i, top + 42 * j, times[name], best, word)
    return d


def _time(report: Report, name: str, condition: str) -> float | None:
    own = [r for r in report["runs"] if r["strategy"] == name and r["condition"] == condition]
    times = [r["reached"] if report["target"] else r["seconds"] for r in own]
    return statistics.median(times) if own and None not in times else None


def _cell(d: Drawing, x: float, y: float, time: float | None, best: float | None, word: str) -> None:
    if time is None or not best:
        d.bar(x, y, 108, 38, "#f6f7f9")
        d.text(x + 54, y + 24, "-", anchor="middle", colour=SOFT)
        return
    share = min(1.0, math.log(time / best) / math.log(12))
    mixed = [round(a + share * (b - a)) for a, b in zip((230, 241, 249), (232, 149, 90), strict=True)]
    d.bar(x, y, 108, 38, f"rgb({','.join(map(str, mixed))})", edge=INK if word else "none")
    d.text(x + 54, y + 17, f"{number(time)} s", anchor="middle", bold=bool(word))
    d.text(x + 54, y + 31, word or f"{time / best:.2f}×", anchor="middle", size=10.5, colour=SOFT)


# Pixels.


def pictures(report: Report) -> dict[str, bytes]:
    """Return the same figures as PNG, drawn by a browser."""
    browser = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        raise EnvironmentProblem(
            "PNG figures are drawn by Chromium, and there is none here. Install it (apt-get install chromium), or take "
            "--format svg, which needs nothing."
        )
    return dict(_photographed(draw(report), browser))


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
            flags += ["--no-sandbox"] * (os.geteuid() == 0)  # Chromium refuses a sandbox to root; the file is our own
            flags += [f"--force-device-scale-factor={_SHARP}", f"--window-size={width},{height}"]
            command = [browser, *flags, f"--screenshot={target}", source.as_uri()]
            try:
                subprocess.run(command, check=True, capture_output=True, timeout=_PATIENCE)
                yield name, target.read_bytes()
            except (OSError, subprocess.SubprocessError) as error:
                raise EnvironmentProblem(f"{browser} did not draw {name}: {error}. Take --format svg.") from None
