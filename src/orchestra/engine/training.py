# SPDX-License-Identifier: Apache-2.0
"""One run of `train`, from its arguments to its result."""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn
from torch.utils.data import IterableDataset

import orchestra.runs.budget as budgets
from orchestra._version import __version__
from orchestra.data import samples
from orchestra.data.feed import SampleStore, make_feed
from orchestra.data.labels import distribution
from orchestra.data.random_state import seed_everything
from orchestra.engine import checkpoint, expression, fingerprint, warnings
from orchestra.engine import resume as resuming
from orchestra.engine.cluster import Cluster
from orchestra.engine.conclusion import Conclusion
from orchestra.engine.runner import PreparedRun, Runner, RunOutcome
from orchestra.engine.scoring import Scorer
from orchestra.engine.snapshot import MODEL, adopt, read_exported
from orchestra.engine.spec import RunSpec, TrainArguments
from orchestra.engine.validate import check_arguments, check_model_and_data, placed, read_strategy, refuse
from orchestra.errors import ConfigError, Problem
from orchestra.model import schedules
from orchestra.model.flat_optimizer import elementwise
from orchestra.model.replica import flatten, trainable
from orchestra.runs import progress, run_lock
from orchestra.runs.budget import Epochs, Seconds, Steps, Target
from orchestra.runs.facts import Facts
from orchestra.runs.status import RunStatus
from orchestra.strategies.catalogue import row_of


@dataclass(frozen=True)
class Result:
    """The result of a run: the trained model, its scores, the facts of the run, and the run folder."""

    model: nn.Module
    metrics: dict[str, float]
    summary: Facts
    run: Path

    def __repr__(self) -> str:
        figures = "".join(f", {name} {value:.4g}" for name, value in self.metrics.items())
        what = f"{self.summary.strategy}: {self.summary.made}{figures}"
        more = [text for text in (self.summary.missing, self.summary.unlearned) if text]
        return f"<Result {', '.join([what, *more])}, in {self.run}>"

    @property
    def learned(self) -> bool | None:
        """Whether the run learned anything; None if that is unknown, for example after few steps.

        False if the training loss did not fall below that of the first steps, or the accuracy is that of guessing.
        `summary.why_unlearned` then has the figures and what to do.
        """
        return self.summary.learned


class Training:
    """One call of `train`: checks its arguments, makes the `RunSpec`, and passes it to a runner."""

    def __init__(self, asked: TrainArguments, runner_of: Callable[[Cluster], Runner]) -> None:
        strategy, problems = read_strategy(asked)
        given = placed(asked, strategy)
        refuse([*problems, *check_arguments(given, strategy)])
        assert strategy is not None
        self.strategy = strategy
        together = given.batch * given.cluster.workers
        given = replace(given, schedule=schedules.for_global_batch(given.schedule, together))
        seed_everything(given.seed)
        self.module = given.model()
        self.data = samples.read(given.data())
        self.doubts: list[str] = []
        refuse(check_model_and_data(given, strategy, self.module, self.data, self.doubts.append))
        cluster = given.cluster.resolved(given, strategy, self.module, self.data)
        self.runner = runner_of(cluster)
        self.trains = cluster.abilities.trains
        self.given = replace(given, cluster=cluster, evaluate=given.evaluate if self.trains else None)
        self.targets = [p for p in budgets.parts(given.budget) if isinstance(p, Target)]
        self.folder = Path(given.out) if given.out is not None else _new_folder(expression.show(strategy))
        self.saved: checkpoint.Checkpoint | None = None

    def result(self) -> Result:
        """Train: as the process that coordinates the run, or as one of the others."""
        return self._coordinate() if self.given.cluster.is_coordinator else self._participate()

    # The process that owns the run folder.

    def _coordinate(self) -> Result:
        spec, resumed_at = self.spec(), 0.0
        if self.given.resume:
            about, budget = fingerprint.about(spec, self.module), fingerprint.budget_of(spec)
            if (ended := resuming.as_it_ended(self.folder, about, self.runner, spec)) is not None:
                return self._as_it_ended(spec, ended)
            largest = resuming.largest_part(self.module, spec.workers + spec.servers)
            self.saved = resuming.find(self.folder, about, self.runner, largest)
            spec, resumed_at = self.spec(), resuming.clock(self.saved)
            goes_on = resuming.look_at_budget(self.folder, self.saved, spec, resumed_at)
            if goes_on and not progress.is_silent(spec.progress):
                print(f"continues from the checkpoint of step {self.saved.step:,}", file=sys.stderr)
            resuming.forget_after(self.folder, self.saved)
            resuming.remember(self.folder, budget=budget, note=self.given.note)
        scorer = self._scorer()
        if self.saved is None:
            metrics = scorer.initial()
            self.folder.mkdir(parents=True, exist_ok=True)
            run_lock.make_room(self.folder)
        with run_lock.holding(self.folder):
            if self.saved is None:
                self._write_config(spec, scorer)
                scorer.begin(metrics)
            result = self._carry_out(spec, scorer, resumed_at)
        if "recipe" not in self.given.note:  # else the command line prints the warnings
            warnings.say(result.summary.warning)
        return result

    def _carry_out(self, spec: RunSpec, scorer: Scorer, resumed_at: float) -> Result:
        doubts = warnings.say(*self.doubts, *self._cautions(spec)) if self.trains else []
        seconds = next((p.count for p in budgets.parts(spec.budget) if isinstance(p, Seconds)), None)
        display = spec.progress if callable(spec.progress) else progress.auto(spec.progress, seconds)
        prepared = PreparedRun(
            spec=spec.for_nodes(), x0=flatten(self.module), module=self.module, data=self.data,
            about=fingerprint.about(spec, self.module), seconds=seconds, resumed_at=resumed_at,
            resumed_from=0 if self.saved is None else self.saved.step, how_to_resume=self._how_to_resume(),
            show=display, scorer=scorer, has_target=bool(self.targets), fingerprint=self._fingerprint(spec),
        )  # fmt: skip
        shown = display if isinstance(display, progress.Display) else progress.Display(None)
        try:
            ending = self.runner.carry_out(prepared)
            scorer.stop()
        except BaseException:
            scorer.stop(wait=False)
            raise
        finally:
            shown.close()
        with closing(ending), shown:
            ending.warnings[:0] = doubts
            conclusion = Conclusion(
                self.folder, spec.launch, self.module, scorer, spec.keep_snapshots, prepared.how_to_resume
            )
            metrics, facts = conclusion.conclude(ending, shown.scored)
            result = Result(self.module, metrics, facts, self.folder)
            model = partial(read_exported, self.module, self.folder / MODEL)
            ending.tell(lambda: RunOutcome(str(result.run), result.metrics, result.summary.as_dict(), model()))
        return result

    def _as_it_ended(self, spec: RunSpec, facts: Facts) -> Result:
        """Return the result of a run that is already complete, and send it to the other processes."""
        x0, common = flatten(self.module), self._fingerprint(spec)
        try:
            model = read_exported(self.module, self.folder / MODEL)
            adopt(self.module, model)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise resuming.damaged(self.folder, error) from None
        if callable(show := self.given.progress):  # the command line takes the folder from there
            shown = facts.strategy, spec.workers, spec.servers, spec.last_step
            show(RunStatus(spec.run, *shown, False, facts.seconds, ()))
        outcome = RunOutcome(str(self.folder), facts.metrics, facts.as_dict(), model)
        self.runner.announce_finished(spec, x0, common, outcome)
        self.module.eval()
        return Result(self.module, facts.metrics, facts, self.folder)

    # Any other process.

    def _participate(self) -> Result:
        spec = self.spec().for_nodes()
        show = given if callable(given := self.given.progress) else lambda status: None
        outcome = self.runner.participate(spec, flatten(self.module), self._fingerprint(self.spec()), show)
        adopt(self.module, outcome.model)
        self.module.eval()
        return Result(self.module, outcome.metrics, Facts.of(outcome.summary), Path(outcome.run))

    # What both need.

    def spec(self) -> RunSpec:
        """Return the settings of the run, with every choice made."""
        given, cluster = self.given, self.given.cluster
        feed = make_feed(
            self.data, batch=given.batch, seed=given.seed, rank=0, size=cluster.workers, partition=given.partition
        )
        per_epoch, streamed = feed.steps_per_epoch, isinstance(self.data, IterableDataset)
        layers = trainable(self.module)
        resources = cluster.resources(cluster.workers + self.strategy.layout.servers)
        made = {
            "strategy": self.strategy,
            "workers": cluster.workers,
            "device": resources.device,
            "one_memory": cluster.abilities.one_memory,
            "uses_torch_collectives": resources.uses_torch_collectives,
            "threads": resources.threads,
            "compute_time": None if resources.compute_time is None else resources.compute_time.at(given.batch),
            "run": self.folder.absolute(),
            "launch": uuid.uuid4().hex[:8],
            "last_step": budgets.last_step(given.budget, per_epoch, given.batch * cluster.workers),
            "last_epoch": budgets.last_epoch(given.budget) if streamed else None,
            "snapshot_steps": _steps(given.evaluate_every, per_epoch) if given.evaluate is not None else None,
            "checkpoint_steps": _steps(given.checkpoint_every, per_epoch),
            "steps_per_epoch": per_epoch,
            "samples_per_epoch": None if streamed else len(SampleStore(self.data)),
            "shards": feed.shards,
            "names": tuple(layers),
            "layers": tuple(tuple(p.shape) for p in layers.values()),
            "layerwise": not elementwise(given.optimizer, list(layers.values())),
            "checkpoint": None if self.saved is None else self.saved.path.absolute(),
        }
        return RunSpec(**vars(given) | made)

    def _cautions(self, spec: RunSpec) -> Iterator[str | None]:
        yield warnings.about_shards(spec.shards, spec.partition)
        optimizer = spec.optimizer(list(trainable(self.module).values()))
        note = self.given.note
        typed = "recipe" in note and "race" not in note and not self.given.resume  # only run and sim have --momentum
        yield warnings.about_momentum(spec.strategy, optimizer, spec.workers, options=typed)

    def _how_to_resume(self) -> str:
        """Return the command or the call that resumes the run: the command line knows only runs that it started."""
        if "recipe" in self.given.note:
            return self.runner.how_to_resume(self.folder)
        return f'the same train(..., out="{self.folder}", resume=True)'

    def _scorer(self) -> Scorer:
        given = self.given
        data = given.evaluation_data() if given.evaluate is not None and given.evaluation_data is not None else None
        return Scorer(
            self.folder, self.module, given.evaluate, data, self.strategy, given.cluster.workers, self.targets,
            given.keep_snapshots, given.score_afterwards,
        )  # fmt: skip

    def _fingerprint(self, spec: RunSpec) -> dict[str, Any]:
        """Return what processes on other machines must have in common with this one; nothing on a single machine."""
        if spec.one_memory:
            return {}
        seed_everything(spec.seed)  # samples may be drawn
        return fingerprint.fingerprint(__version__, spec, self.module, self.data)

    def _write_config(self, spec: RunSpec, scorer: Scorer) -> None:
        seed_everything(spec.seed)  # samples may be drawn
        config = fingerprint.about(spec, self.module) | {
            "must_log": row_of(self.strategy).must_log,
            "stale": self.strategy.layout.sees_stale_gradients,
            "labels": distribution(scorer.data) or distribution(self.data),
            "parameters": spec.parameters,
            "initial": fingerprint.initial(flatten(self.module)),
            "samples": fingerprint.samples(self.data) if self.trains else None,
            "budget": fingerprint.budget_of(spec),
            "threads": spec.threads,
            "cluster": spec.cluster.about(),
            "snapshot_every": spec.snapshot_steps,
            "checkpoint_every": spec.checkpoint_steps,
            "versions": fingerprint.versions(__version__),
            "note": spec.note,
        }
        checkpoint.write_text(self.folder / "config.json", json.dumps(config, indent=1))


def _steps(every: Steps | Epochs | None, per_epoch: int | None) -> int | None:
    """Return an interval in steps; a hundred for a stream, whose length is unknown."""
    if every is None:
        return None
    if isinstance(every, Steps):
        return every.count
    return max(1, round(every.count * per_epoch)) if per_epoch else 100


def _new_folder(name: str) -> Path:
    """Return a run folder of today that does not exist yet."""
    slug = "".join(c if c.isalnum() else "-" for c in name).strip("-")
    stem = f"{time.strftime('%Y-%m-%d-%H%M%S')}-{slug}"
    for suffix in ("", *(f"-{i}" for i in range(2, 1000))):
        path = Path("runs") / (stem + suffix)
        if not path.exists():
            return path
    raise ConfigError([Problem("out", stem, "all such run folders exist: name one with out=")])
