# SPDX-License-Identifier: Apache-2.0
"""A run's figures for other tools: TensorBoard, Weights & Biases, MLflow.

    train/loss, train/lr, train/epoch       mean over the workers that did a step, by step
    time/compute, time/communicate, time/wait       shares of the workers' time, over the last steps
    traffic/sent, traffic/received          bytes of a worker until then, on average
    train/staleness                         age of the gradients that came, in updates, on average over a step's
    test/...                                what was evaluated

All against steps; the time of each is that of the run, virtual or real, counted from when it began. Nothing is sent
anywhere but where the tool was told to.
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
_LONGEST = 500  # characters that MLflow takes of a setting, and we of a complaint
_RETRIES = "3"  # of MLflow, unless its user said otherwise: its own seven take four minutes


@dataclass(frozen=True)
class MetricRow:
    """All that is known at one step."""

    step: int
    t: float  # seconds since the run began
    figures: dict[str, float]


def rows(run: RunRecord) -> list[MetricRow]:
    """A run's figures, in order of steps."""
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
    """Servers count updates: as many as there are workers make a step."""
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
    """What every tool takes for a name."""
    return re.sub(r"[^\w.-]", "_", name)[:100] or "_"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# Where it goes.

# A run, its figures, what to call it, and when it began, in seconds since the epoch.
Sink = Callable[[RunRecord, Sequence[MetricRow], str, float], None]


@contextmanager
def _in_a_line(what: str, advice: str = "") -> Iterator[None]:
    """Tell what a tool complains about, whatever it raises, in a line."""
    try:
        yield
    except Exception as error:
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)[:_LONGEST].rstrip(".")
        raise EnvironmentProblem(f"{what}: {why}.{advice}") from None


def tensorboard(folder: Path) -> Sink:
    """Event files below a folder, one folder for each run."""
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
    """Runs of a project of Weights & Biases; offline where WANDB_MODE says so."""
    module = needed("wandb", "wandb")

    @_in_a_line("Weights & Biases does not take it", " With WANDB_MODE=offline it is kept here, to be synced later.")
    def write(run: RunRecord, figures: Sequence[MetricRow], name: str, began: float) -> None:
        with module.init(project=project, name=name, config=run.config) as there:
            for row in figures:
                there.log({**row.figures, "seconds": row.t, "_timestamp": began + row.t}, step=row.step)

    return write


def mlflow(uri: str) -> Sink:
    """Runs of the experiment `orchestra` at a tracking server, a database or a folder."""
    module = needed("mlflow", "mlflow")
    entities = importlib.import_module("mlflow.entities")
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # who names a folder means it
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", _RETRIES)
    heard = partial(_in_a_line, f"MLflow at {uri} does not take it")
    with heard():
        module.set_tracking_uri(uri)
        module.set_experiment("orchestra")

    @heard()
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
    """A tool that not everybody has."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise EnvironmentProblem(f"{error}. It comes with: pip install 'neural-orchestra[{extra}]'") from None


def export(paths: Sequence[Path], sinks: Sequence[Sink]) -> tuple[list[str], list[str]]:
    """Give all runs at and below these folders to the sinks; what they were called, and which could not be read."""
    done, refused = [], []
    above = Path(os.path.commonpath([path.resolve() for path in paths]))  # what names begin below: no two are alike
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
