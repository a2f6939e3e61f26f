# SPDX-License-Identifier: Apache-2.0
"""A run's figures for other tools: TensorBoard, Weights & Biases, MLflow.

    train/loss, train/lr, train/epoch       mean over the workers that did a step, by step
    time/compute, time/communicate, time/wait       shares of the workers' time, over the last steps
    traffic/sent, traffic/received          bytes of a worker until then, on average
    train/staleness                         age of the gradients received in a step, in updates, on average
    test/...                                scores

All against steps; the time of each is that of the run, virtual or real, counted from its beginning. Nothing is sent
except to the address that the tool was given.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import textwrap
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from orchestra.errors import EnvironmentProblem
from orchestra.runs import reading
from orchestra.runs.events import Logged, Stepped
from orchestra.runs.reading import RunRecord

RECENT = 32  # steps over which shares are taken
_KINDS = ("compute", "communicate", "wait")
_TOGETHER = 1000  # figures that MLflow takes at once
_LONGEST = 500  # characters that MLflow takes of a setting, and we of an error message
_RETRIES = "3"  # of MLflow, unless the user set a number: its default of seven takes four minutes


@dataclass(frozen=True)
class MetricRow:
    """All figures of one step."""

    step: int
    t: float  # seconds since the run began
    figures: dict[str, float]


def rows(run: RunRecord) -> list[MetricRow]:
    """Return a run's figures, in order of steps."""
    figures: dict[int, dict[str, float]] = defaultdict(dict)
    times: dict[int, float] = {}
    for step, t, found in (*_steps(run), *_staleness(run), *_scores(run)):
        figures[step] |= found
        times[step] = max(t, times.get(step, 0.0))
    return [MetricRow(step, times[step], figures[step]) for step in sorted(figures)]


_Some = Iterator[tuple[int, float, dict[str, float]]]


def _steps(run: RunRecord) -> _Some:
    by_step: dict[int, list[Stepped]] = defaultdict(list)
    for e in run.events:
        if isinstance(e, Stepped):
            by_step[int(e.step)].append(e)
    before: deque[list[Stepped]] = deque(maxlen=RECENT)
    for step, events in sorted(by_step.items()):
        found = {"train/epoch": _mean([e.epoch for e in events]), "train/lr": _mean([e.lr for e in events])}
        if losses := [e.loss for e in events if e.loss is not None]:
            found["train/loss"] = _mean(losses)
        found |= {f"traffic/{name}": _mean([getattr(e, name) for e in events]) for name in ("sent", "received")}
        found |= _shares({e.node: e for e in before[0]} if before else {}, events)
        before.append(events)
        yield step, max(e.t for e in events), found


def _shares(before: dict[int, Stepped], events: Sequence[Stepped]) -> dict[str, float]:
    pairs = [(before.get(e.node), e) for e in events]
    whole = sum(e.t - (b.t if b else 0.0) for b, e in pairs)
    if whole <= 0:
        return {}
    spent = {kind: sum(getattr(e, kind) - (getattr(b, kind) if b else 0.0) for b, e in pairs) for kind in _KINDS}
    return {f"time/{kind}": min(1.0, max(0.0, seconds / whole)) for kind, seconds in spent.items()}


def _staleness(run: RunRecord) -> _Some:
    """Yield the mean staleness of each step. Servers count updates, of which as many as workers make a step."""
    said: dict[int, list[Logged]] = defaultdict(list)
    for e in run.events:
        if isinstance(e, Logged) and e.name == "staleness":
            share = 1 if e.node < run.facts.workers else max(1, run.facts.workers)
            said[-(-int(e.step) // share)].append(e)
    for step, events in said.items():
        yield step, max(e.t for e in events), {"train/staleness": _mean([e.value for e in events])}


def _scores(run: RunRecord) -> _Some:
    for score in run.scores:
        yield int(score.step), score.t, {f"test/{_plain(name)}": value for name, value in score.metrics.items()}


def _plain(name: str) -> str:
    """Return a name that every tool accepts."""
    return re.sub(r"[^\w.-]", "_", name)[:100] or "_"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# The tools.

# A run, its figures, what to call it, and when it began, in seconds since the epoch.
Sink = Callable[[RunRecord, Sequence[MetricRow], str, float], None]


@contextmanager
def _in_a_line(what: str, advice: str = "") -> Iterator[None]:
    """Turn any exception of a tool into an `EnvironmentProblem` of one line."""
    try:
        yield
    except Exception as error:
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)[:_LONGEST].rstrip(".")
        raise EnvironmentProblem(f"{what}: {why}.{advice}") from None


def tensorboard(folder: Path) -> Sink:
    """Return a sink that writes event files, one folder for each run."""
    needed("tensorboard", "tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    @_in_a_line(f"TensorBoard cannot write to {folder}")
    def write(run: RunRecord, figures: Sequence[MetricRow], name: str, began: float) -> None:
        writer: Any = SummaryWriter(log_dir=str(folder / name))
        # Indented, not fenced: a name may hold what ends a fence.
        config = textwrap.indent(json.dumps(run.config, indent=1), "    ")
        writer.add_text("config", config, walltime=began)
        for row in figures:
            for figure, value in row.figures.items():
                writer.add_scalar(figure, value, row.step, began + row.t)
        writer.close()

    return write


def wandb(project: str) -> Sink:
    """Return a sink that logs runs to a project of Weights & Biases; offline if WANDB_MODE is so set."""
    module = needed("wandb", "wandb")

    @_in_a_line("Weights & Biases refused the run", " With WANDB_MODE=offline it is kept here, to be synced later.")
    def write(run: RunRecord, figures: Sequence[MetricRow], name: str, began: float) -> None:
        with module.init(project=project, name=name, config=run.config) as there:
            for row in figures:
                there.log({**row.figures, "seconds": row.t, "_timestamp": began + row.t}, step=row.step)

    return write


def mlflow(uri: str) -> Sink:
    """Return a sink that logs runs of the experiment `orchestra` to a tracking server, a database or a folder."""
    module = needed("mlflow", "mlflow")
    entities = importlib.import_module("mlflow.entities")
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # the user may name a folder
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", _RETRIES)
    readable = partial(_in_a_line, f"MLflow at {uri} refused the run")
    with readable():
        module.set_tracking_uri(uri)
        module.set_experiment("orchestra")

    @readable()
    def write(run: RunRecord, figures: Sequence[MetricRow], name: str, began: float) -> None:
        metrics = [
            entities.Metric(figure, value, round((began + row.t) * 1e3), row.step)
            for row in figures
            for figure, value in row.figures.items()
        ]
        settings = {key: json.dumps(value)[:_LONGEST] for key, value in run.config.items()}
        with module.start_run(run_name=name) as there:
            module.log_params(settings)
            client = module.MlflowClient()
            for start in range(0, len(metrics), _TOGETHER):
                client.log_batch(there.info.run_id, metrics=metrics[start : start + _TOGETHER])

    return write


def needed(module: str, extra: str) -> Any:
    """Import an optional package; raise `EnvironmentProblem` with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise EnvironmentProblem(f"{error}. It comes with: pip install 'neural-orchestra[{extra}]'") from None


def export(paths: Sequence[Path], sinks: Sequence[Sink]) -> tuple[list[str], list[str]]:
    """Give all runs at and below these folders to the sinks; return their names, and those that could not be read."""
    done, refused = [], []
    above = Path(os.path.commonpath([path.resolve() for path in paths]))  # names are relative to it, so all differ
    for folder in reading.find(paths):
        try:
            run = reading.load(folder)
            figures = rows(run)
        except (reading.Unreadable, OSError, *reading.NONSENSE) as error:
            refused.append(f"{folder}: {error}")
            continue
        name = str(folder.resolve().relative_to(above)) if folder.resolve() != above else above.name
        for sink in sinks:
            sink(run, figures, name, (folder / "config.json").stat().st_mtime)
        done.append(name)
    return done, refused
