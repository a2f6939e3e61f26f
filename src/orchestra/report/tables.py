# SPDX-License-Identifier: Apache-2.0
"""The figures of all strategies side by side, for the page, for documents and for spreadsheets."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from orchestra.formatting import size
from orchestra.report import escaping
from orchestra.report.results import RunResult, always, standing, times_of, unlearned_of
from orchestra.report.settings import natural
from orchestra.report.statistics import Estimate, median_interval
from orchestra.report.verdict import Against, against_baseline, is_useless
from orchestra.runs.budget import Target

_RUN = (
    "name", "strategy", "condition", "seed", "workers", "servers", "steps", "samples", "seconds", "samples_per_second",
    "reached", "best", "final", "loss", "sent_per_worker", "received_per_worker", "sent_total", "staleness_mean",
    "staleness_max", "skipped", "stopped_by", "virtual", "learned", "unlearned",
)  # fmt: skip
_FIGURES = ("nodes", "in all", "samples/s", "per worker", "waiting", "gradient age (updates)")


def table(
    runs: Sequence[dict[str, Any]], marks: Sequence[RunResult], target: Target | None, metric: str | None,
    baseline: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return headings and lines of text: a line for each strategy under each condition, the fastest first."""
    lines: list[list[str]] = []
    groups = sorted({mark.condition for mark in marks}, key=natural)
    for condition in groups:
        mine = [mark for mark in marks if mark.condition == condition]
        by = {a: [mark for mark in mine if mark.strategy == a.strategy] for a in against_baseline(mine, baseline)}
        for against in sorted(by, key=lambda a: standing(by[a], target)):
            own = [r for r in runs if r["condition"] == condition and r["strategy"] == against.strategy]
            race = _race(by[against], against) if target is not None else []
            lost = unlearned_of(by[against])  # with its reason in one column only
            figures = _figures_of(own, metric, lost.partition(" (")[0] if lost and target is not None else lost)
            lines.append([condition] * (len(groups) > 1) + [against.strategy, *race, *figures])
    return {"head": [*["condition"] * (len(groups) > 1), *_head(target, metric)], "lines": lines}


def _head(target: Target | None, metric: str | None) -> list[str]:
    to_target = ["time to target", "speed", "p", "reached"] if target is not None else []
    return ["strategy", *to_target, *([f"final {metric}"] if metric is not None else []), *_FIGURES]


def _figures_of(own: Sequence[dict[str, Any]], metric: str | None, unlearned: str | None) -> list[str]:
    """Return the cells of the runs that exist: every run may have failed before it wrote anything."""
    final = [run["metrics"][metric] for run in own if metric in run["metrics"]]
    but = "" if unlearned is None else f", {unlearned}"
    score = [f"{statistics.fmean(final):.4g}{but}" if final else but.removeprefix(", ") or "-"] if metric else []
    if not own:
        return [*score, *["-"] * len(_FIGURES)]
    stale = [run["staleness_mean"] for run in own if run["staleness_mean"] is not None]
    return [
        *score,
        "-".join(dict.fromkeys(str(run["workers"] + run["servers"]) for run in own)),
        f"{statistics.median(run['seconds'] for run in own):.3g} s",
        f"{statistics.fmean(run['samples_per_second'] for run in own):,.0f}",
        size(statistics.fmean(run["sent_per_worker"] + run["received_per_worker"] for run in own)),
        _waiting(own),
        f"{statistics.fmean(stale):.1f} (max {max(run['staleness_max'] or 0 for run in own)})" if stale else "-",
    ]


def _race(own: Sequence[RunResult], against: Against) -> list[str]:
    times = times_of(own)
    time = "failed" if all(mark.failed for mark in own) else (unlearned_of(own) or "not reached")
    if times:
        low, high = median_interval(times)
        time = f"{statistics.median(times):.3g} s" + (f" [{low:.3g}, {high:.3g}]" if len(times) > 1 else "")
    speed = "1" if against.strategy == against.baseline and always(own) else "-"
    if against.speed is not None:
        e = against.speed
        speed = f"{e.value:.2f}×" + _between(e)
    p = "-" if against.p is None else "< 0.001" if against.p < 0.001 else f"{against.p:.3f}"
    return [time, speed, p, f"{len(times)}/{len(own)}"]


def _between(e: Estimate) -> str:
    if e.low is None or e.high is None:
        return ""
    return " [wide]" if is_useless(e) else f" [{e.low:.2f}, {e.high:.2f}]"


def _waiting(own: Iterable[dict[str, Any]]) -> str:
    nodes = [node for run in own for node in run["nodes"] if node["role"] == "worker" and node["seconds"] > 0]
    return f"{statistics.fmean(n['spent']['wait'] / n['seconds'] for n in nodes):.0%}" if nodes else "-"


_RACE_LEGEND = (
    "Time to target: median [95 % interval; of less than six runs least and most]. Speed: times as fast as {baseline}, "
    "geometric mean over pairs of runs with equal seeds [95 % interval]; p: of no difference, corrected for the number "
    "of strategies (Holm). "
)
_LEGEND = (
    "Nodes: workers and servers. In all, samples/s: of whole runs, past the target, to the last step of the slowest "
    "worker. Per worker: bytes sent and received. Waiting: share of the workers' time. Gradient "
    "age: updates made between a worker's pull and its push."
)


def legend(report: dict[str, Any]) -> str:
    """Return an explanation of the columns."""
    return (_RACE_LEGEND.format(baseline=report["verdict"]["baseline"]) if report["target"] else "") + _LEGEND


def markdown(report: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    equal = report["settings"]["equal"]
    parts = [
        f"# {escaping.markdown(report['title'])}",
        f"**{escaping.markdown(report['verdict']['sentence'])}**",
        *(escaping.markdown(doubt) for doubt in report["verdict"]["doubts"]),
        escaping.table([report["table"]["head"], *report["table"]["lines"]]),
        escaping.markdown(legend(report)),
        *_list("Why", report["why"]),
        *_list("Fairness", report["fairness"]),
        *_list("What happened", report["happened"]),
        "## Settings",
        escaping.table([["setting", "value"], *([name, value] for name, value in equal.items())]),
    ]
    if report["commands"]:
        # Indented, not fenced: a name may hold what ends a fence.
        parts += ["## To repeat it", "\n".join(f"    {command}" for command in report["commands"])]
    parts += _list("Not read", [f"{r['name']}: {r['why']}" for r in report["refused"]])
    return "\n\n".join(parts) + "\n"


def _list(heading: str, points: Sequence[str]) -> list[str]:
    return [f"## {heading}", "\n".join(f"- {escaping.markdown(point)}" for point in points)] if points else []


def runs_csv(report: dict[str, Any]) -> str:
    """Return a CSV file with a line for each run."""
    metrics = sorted({name for run in report["runs"] for name in run["metrics"]})
    head = [*_RUN, *(f"final {name}" for name in metrics)]
    lines = ([*(run[name] for name in _RUN), *(run["metrics"].get(name) for name in metrics)] for run in report["runs"])
    return _csv([head, *lines])


def curves_csv(report: dict[str, Any]) -> str:
    """Return a CSV file with a line for each point of each curve."""
    lines: list[Sequence[Any]] = [("run", "strategy", "condition", "seed", "figure", "t", "samples", "bytes", "value")]
    for run in report["runs"]:
        of = (run["name"], run["strategy"], run["condition"], run["seed"])
        for figure, points in _figures(run):
            lines += [(*of, figure, *point) for point in points]
    return _csv(lines)


def _figures(run: dict[str, Any]) -> Iterable[tuple[str, Iterable[tuple[float, ...]]]]:
    if (training := run["training"]) is not None:
        yield "training loss", zip(*(training[name] for name in ("t", "samples", "bytes", "loss")), strict=True)
    if (scores := run["scores"]) is not None:
        axes = [scores[name] for name in ("t", "samples", "bytes")]
        for name, values in scores["metrics"].items():
            yield f"test {name}", zip(*axes, values, strict=True)


def _csv(lines: Iterable[Sequence[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for line in lines:
        writer.writerow(map(escaping.cell, line))
    return out.getvalue()
