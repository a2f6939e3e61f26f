# SPDX-License-Identifier: Apache-2.0
"""Everything that a report shows, as one plain dict: a pure function of run folders.

The page, the tables and the figures are drawn from it and from nothing else. Its size is bounded: curves are thinned,
timelines put steps together, and of many seeds only the first one has a timeline.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from orchestra.errors import ConfigError, Problem
from orchestra.formatting import plural
from orchestra.report import curves, formulas, settings, tables, traces, verdict
from orchestra.report.comparison_file import Comparison, ComparisonFiles, Failure
from orchestra.report.results import RunResult, achieved, times_of
from orchestra.report.statistics import median_interval
from orchestra.report.styles import looks
from orchestra.runs import dropped_events, reading
from orchestra.runs.budget import Target, lower_is_better
from orchestra.runs.events import Logged, NodeEnded, Stepped
from orchestra.runs.reading import RunRecord, Unreadable

BLOCKS = 300_000  # of all timelines together
MOST_NODES = 128  # in a traffic matrix
_COUNTED = ("staleness", "gap")  # what is shown as a histogram
_MOST_NAMES = 12  # of what a strategy logged
Load = Callable[[Path], RunRecord]
Describe = Callable[[RunRecord, Target | None, int | None], dict[str, Any]]


def build(
    paths: Sequence[Path], *, target: Target | None = None, title: str | None = None, load: Load = reading.load,
    describe: Describe | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Read all runs at and below these folders; raise `ConfigError` if none of them can be read.

    A caller that reads the same runs repeatedly passes a `load` and a `describe` that cache.
    """
    refused: list[dict[str, str]] = []
    folders = _folders(paths)
    races = ComparisonFiles(paths, folders)
    workloads = settings.workloads(folders)
    target = target or (races.target if len(workloads) < 2 else None)
    first = _Representatives(folders)
    runs, about = [], []
    for folder in folders:
        try:
            run = load(folder)
            failed = None if run.over else races.failures.get(folder)
            runs.append((describe or describe_run)(run, target, first.blocks_for(run)) | _end(failed))
            about.append(without_events(run))
        except (Unreadable, OSError) as error:
            refused.append({"name": str(folder), "why": str(error)})
        except reading.NONSENSE as error:
            refused.append({"name": str(folder), "why": f"its figures make no sense: {error}"})
    if not about:
        reasons = "; ".join(f"{r['name']}: {r['why']}" for r in refused[:3])
        raise ConfigError([Problem("run", str(paths[0]), f"holds no run that can be read ({reasons})")])
    report = _together(runs, about, refused, target, title, races)
    if len(workloads) > 1:
        report["verdict"] |= {"sentence": _no_verdict(workloads), "doubts": (), "tied": ()}
    return reading.harmless(report)  # type: ignore[no-any-return]


def _no_verdict(workloads: Mapping[str, Sequence[Path]]) -> str:
    kinds = [f"{what}: {plural(len(runs), 'run')}, such as {runs[0]}" for what, runs in workloads.items()]
    return f"No verdict, since the runs train different things. Give the folders of one of them. {'; '.join(kinds)}."


def _end(failed: Failure | None) -> dict[str, Any]:
    """Return the fields that mark a failed run; a run that reached the target and then failed counts as failed."""
    return {"failed": None} if failed is None else {"failed": failed.why, "reached": None}


def _folders(paths: Sequence[Path]) -> list[Path]:
    problems = [Problem("run", str(path), "does not exist") for path in paths if not path.is_dir()]
    folders = reading.find(path for path in paths if path.is_dir())
    if not problems and not folders:
        problems = [Problem("run", str(path), "holds no run: give a folder with a config.json") for path in paths]
    if problems or not folders:
        raise ConfigError(problems or [Problem("run", "", "name at least one run folder")])
    return folders


class _Representatives:
    """Chooses the runs that get a timeline: the first of each strategy under each condition. They share `BLOCKS`."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.room = BLOCKS // max(1, len(folders))
        self.seen: set[str] = set()

    def blocks_for(self, run: RunRecord) -> int | None:
        """Return how many blocks a worker's lane may have; None: no timeline."""
        mine = {name: text for name, text in settings.settings_of(run).items() if name != "seed"}
        key = json.dumps(mine, sort_keys=True)
        if key in self.seen:
            return None
        self.seen.add(key)
        return max(50, self.room // max(1, run.facts.workers))


def without_events(run: RunRecord) -> RunRecord:
    """Return a run without its events and scores, which fill the memory when a run is long."""
    return replace(run, events=(), scores=())


# One run.


def describe_run(run: RunRecord, target: Target | None, blocks: int | None) -> dict[str, Any]:
    """Return all figures of one run; with a timeline of at most `blocks` blocks per worker, unless that is None."""
    facts, steps = run.facts, curves.StepColumns(run.events)
    strategy = formulas.parsed(facts.strategy)
    lost = dropped_events.of(run.events)
    abandoned = lost.count("abandoned") + sum(isinstance(e, Logged) and e.name == "abandoned" for e in run.events)
    formula = formulas.sent(strategy, facts.workers, facts.steps, facts.parameters, abandoned / max(1, facts.workers))
    trace = traces.read(run.path, facts.workers + facts.servers) if blocks is not None else None
    same_steps = facts.most_steps in (None, facts.steps) and not facts.retired
    counted = {name: Counter(_said(run, name)) + lost.values(name) for name in _COUNTED}
    return {
        "name": run.name,
        **{name: getattr(facts, name) for name in _AS_THEY_ARE},
        "over": run.over,
        "fate": run.fate,
        "warnings": [*run.warnings],
        "missing": facts.missing,
        **_scores(run, target),
        "nodes": _nodes(run, trace),
        "training": curves.training(steps) if facts.trained else None,
        "scores": curves.scored(run.scores, steps) if facts.trained else None,
        "step_times": curves.step_times(steps, lost),
        "lanes": None if blocks is None else curves.lanes(steps, blocks),
        "trace": None if trace is None else _trace(trace),
        "traffic": None if blocks is None else _traffic(run, strategy, trace),
        "formula": asdict(formula) if formula is not None and same_steps and run.over else None,
        "counts": {name: sorted(found.items()) for name, found in counted.items() if found},
        "bound": formulas.bound(strategy),
        "logged": {} if blocks is None else curves.logged(run.events, _names(run)),
    }


_AS_THEY_ARE = (
    "strategy", "seed", "workers", "servers", "steps", "samples", "seconds", "setup", "samples_per_second", "loss",
    "metrics", "sent_per_worker", "received_per_worker", "sent_total", "staleness_mean", "staleness_max", "skipped",
    "dropped", "stopped_by", "parameters", "virtual", "trained", "learned", "unlearned",
)  # fmt: skip


def _said(run: RunRecord, name: str) -> list[int]:
    return [int(e.value) for e in run.events if isinstance(e, Logged) and e.name == name]


def _names(run: RunRecord) -> list[str]:
    """Return the names that strategies logged, without those shown as histograms."""
    names = {e.name for e in run.events if isinstance(e, Logged) and isinstance(e.name, str)}
    return sorted(names - {*_COUNTED})[:_MOST_NAMES]


def _scores(run: RunRecord, target: Target | None) -> dict[str, Any]:
    """Return when the target was reached, and the best and the final score."""
    if target is None:
        return {"reached": None, "since": 0.0, "best": None, "final": None}
    found = asdict(achieved(run.scores, target))
    lost = found["best"] is not None and found["final"] is None  # a model with non-finite values has no score
    return {"reached": found.pop("seconds"), **found} | ({"final": "not finite"} if lost else {})


def _nodes(run: RunRecord, trace: traces.OpTrace | None) -> list[dict[str, Any]]:
    """Return how each node spent its time, from its last event."""
    last: dict[int, Stepped | NodeEnded] = {}
    for e in run.events:
        if isinstance(e, NodeEnded) or (isinstance(e, Stepped) and not isinstance(last.get(e.node), NodeEnded)):
            last[e.node] = e
    found = []
    for node, e in sorted(last.items()):
        spent = {kind: max(0.0, getattr(e, kind)) for kind in ("compute", "communicate", "wait")}
        if trace is not None and node in trace.spent:
            sent = min(trace.spent[node]["send"], spent["communicate"])
            rest = spent["communicate"] - sent
            spent = {"compute": spent["compute"], "send": sent, "receive": rest, "wait": spent["wait"]}
        whole = {"seconds": e.t, "steps": e.step, "samples": e.samples, "sent": e.sent, "received": e.received}
        role = "worker" if node < run.facts.workers else "server"
        found.append({"node": node, "role": role, **whole, "spent": spent})
    return found


def _trace(trace: traces.OpTrace) -> dict[str, Any]:
    """Return the ops as columns, in whole microseconds."""
    return {
        "node": [op.node for op in trace.ops],
        "kind": [traces.KINDS.index(op.kind) for op in trace.ops],
        "began": [round(op.began * 1e6) for op in trace.ops],
        "took": [round((op.t - op.began) * 1e6) for op in trace.ops],
        "peer": [op.peer for op in trace.ops],
        "bytes": [op.bytes for op in trace.ops],
        "met": [None if met is None else round(met * 1e6) for met in trace.met],
        "kinds": [*traces.KINDS],
        "left_out": trace.left_out,
    }


def _traffic(run: RunRecord, strategy: Any, trace: traces.OpTrace | None) -> dict[str, Any] | None:
    nodes = run.facts.workers + run.facts.servers
    if nodes > MOST_NODES or (found := traces.traffic(run, strategy, trace)) is None:
        return None
    flow = [[a, b, round(size)] for (a, b), size in sorted(found.flow.items()) if max(a, b) < nodes]
    return {"flow": flow, "source": found.source}


# All of them.


def _together(
    runs: list[dict[str, Any]], about: Sequence[RunRecord], refused: list[dict[str, str]], target: Target | None,
    title: str | None, races: ComparisonFiles,
) -> dict[str, Any]:  # fmt: skip
    from orchestra._version import __version__

    all_settings = [settings.settings_of(run) for run in about]
    for run, condition in zip(runs, settings.conditions(all_settings), strict=True):
        run["condition"] = condition
    metrics = sorted({name for run in runs if run["scores"] for name in run["scores"]["metrics"]})
    metric = target.metric if target is not None else metrics[0] if metrics else None
    absent = [failure for folder, failure in races.failures.items() if folder not in {run.path for run in about}]
    marks = [*_marks(runs, metric), *_missing(absent, runs, about)]
    names = sorted({mark.strategy for mark in marks})
    equal, different = settings.split(all_settings)
    virtual = all(run["virtual"] for run in runs)
    found = verdict.judge(marks, target, metric, "virtual s" if virtual else "s", races.baseline)
    if not all(run["over"] or run["failed"] or run["fate"] for run in runs):
        found = replace(found, sentence=_so_far(found.sentence))
    dressed = looks(names, formulas.catalogue())
    return {
        "title": title or _title(equal, names, about),
        "version": __version__,
        "target": _goal(target),
        "metric": metric,
        "metrics": {name: lower_is_better(name) for name in metrics},
        "verdict": asdict(found),
        **_learned(races.whole(target), found.doubts),
        "strategies": [{"name": name, **dressed[name].as_dict()} for name in names],
        "conditions": sorted({run["condition"] for run in runs}, key=settings.natural),
        "firsts": _firsts(marks, runs, target),
        "intervals": [*_intervals(marks)],
        "table": tables.table(runs, marks, target, metric, races.baseline),
        "runs": runs,
        "refused": _left_out(refused, absent),
        "happened": [*(text for run in runs for text in _happened(run)), *_warnings(runs)],
        "settings": {"equal": equal, "different": different, "of": [_only(s, different) for s in all_settings]},
        "commands": settings.commands(about),
        "virtual": virtual,
    }


def _so_far(sentence: str) -> str:
    return f"So far: {sentence.replace('Nothing was scored', 'no trained model was scored yet')}"


def _marks(runs: Sequence[dict[str, Any]], metric: str | None) -> list[RunResult]:
    return [
        RunResult(
            r["strategy"],
            r["condition"],
            r["seed"],
            r["reached"],
            r["since"],
            r["best"],
            r["metrics"].get(metric),
            r["samples_per_second"],
            r["failed"] is not None,
            r["unlearned"],
        )
        for r in runs
    ]


def _firsts(marks: Sequence[RunResult], runs: Sequence[dict[str, Any]], target: Target | None) -> dict[str, list[str]]:
    """Return the strategies that were first under each condition: at the target, or without one at the end."""
    if target is None:
        marks = [replace(m, seconds=r["seconds"], since=r["seconds"]) for m, r in zip(marks, runs, strict=False)]
    groups = dict.fromkeys(mark.condition for mark in marks)
    return {group: verdict.firsts([m for m in marks if m.condition == group], target) for group in groups}


def _intervals(marks: Sequence[RunResult]) -> Iterator[dict[str, Any]]:
    """Yield the interval of the median time to the target, for each strategy under each condition."""
    for condition, strategy in dict.fromkeys((mark.condition, mark.strategy) for mark in marks):
        times = times_of([mark for mark in marks if (mark.condition, mark.strategy) == (condition, strategy)])
        if len(times) > 1:
            yield {"condition": condition, "strategy": strategy, "ends": median_interval(times)}


def _missing(
    absent: Sequence[Failure], runs: Sequence[dict[str, Any]], about: Sequence[RunRecord]
) -> Iterator[RunResult]:
    """Yield results of runs that failed before they wrote anything, under the condition of the runs beside them."""
    for failure in absent:
        race = [r for r, run in zip(runs, about, strict=True) if run.path.parent.parent == failure.folder.parent.parent]
        beside = next((r for r in race if r["strategy"] == failure.strategy), (race or runs)[0])
        yield RunResult(failure.strategy, beside["condition"], failure.seed, None, 0.0, None, None, failed=True)


def _happened(run: dict[str, Any]) -> Iterator[str]:
    """Yield remarks on a run: missing data, failure, skipped and dropped gradients."""
    name = run["name"]
    if run["missing"]:
        yield f"{name}: {run['missing']}."
    if run["failed"]:
        yield f"{name} failed: {run['failed']}"
    elif not run["over"]:
        yield f"{name} {run['fate']}: figures until then." if run["fate"] else f"{name} has not ended: figures so far."
    if run["skipped"]:
        yield f"{name}: {plural(run['skipped'], 'gradient')} not finite, not used."
    if run["dropped"]:
        yield f"{name}: {plural(run['dropped'], 'gradient')} dropped: too few workers were left for another update."


def _warnings(runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the warnings of all runs, each text once. The verdict already says which of several did not learn."""
    names = defaultdict[str, list[str]](list)
    for run in runs:
        for text in run["warnings"]:
            if len(runs) == 1 or run["unlearned"] is None or run["unlearned"] not in text:
                names[text].append(run["name"])
    for text, found in names.items():
        more = f" and {plural(len(found) - 1, 'other')}" if len(found) > 1 else ""
        yield f"{found[0]}{more}: {text}"


def _left_out(refused: Sequence[dict[str, str]], absent: Sequence[Failure]) -> list[dict[str, str]]:
    """Return why some runs are missing. Where a run failed, that reason replaces "cannot be read"."""
    found = {r["name"]: r["why"] for r in refused} | {str(f.folder): f"it failed: {f.why}" for f in absent}
    return [{"name": name, "why": why} for name, why in found.items()]


def _learned(race: Comparison | None, doubts: Sequence[str]) -> dict[str, Any]:
    """Return the explanations and the fairness notes of a comparison, without those that the verdict repeats."""
    words, fair = ((), ()) if race is None else (race.learned[1:], race.fairness)
    return {"why": [text for text in words if text not in doubts], "fairness": [*fair]}


def _goal(target: Target | None) -> dict[str, Any] | None:
    if target is None:
        return None
    lower = lower_is_better(target.metric)
    return {"metric": target.metric, "value": target.value, "lower": lower, "text": verdict.goal(target)}


def _title(equal: dict[str, str], names: Sequence[str], about: Sequence[RunRecord]) -> str:
    """Return a title: the name of the recipe or else of the folder, the strategies, and the number of workers."""
    what = Path(equal["recipe"]).name if "recipe" in equal else about[0].path.name if len(about) == 1 else "runs"
    strategies = names[0] if len(names) == 1 else f"{len(names)} strategies"
    workers = f", {equal['workers']} workers" if "workers" in equal else ""
    return f"{what}: {strategies}{workers}"


def _only(all_of_it: dict[str, str], names: Sequence[str]) -> dict[str, str]:
    return {name: all_of_it[name] for name in names if name in all_of_it}
