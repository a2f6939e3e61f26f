# SPDX-License-Identifier: Apache-2.0
"""The one call."""

from __future__ import annotations

import inspect
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
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
from orchestra.clusters.attached import Attached
from orchestra.clusters.local import Local
from orchestra.core.strategy import Strategy
from orchestra.data import samples
from orchestra.data.batches import Loss
from orchestra.data.feed import SampleStore, make_feed
from orchestra.data.labels import distribution
from orchestra.data.partitions import Partition
from orchestra.data.random_state import left_alone, seed_everything
from orchestra.engine import checkpoint, environment, expression, fingerprint, overrides, warnings
from orchestra.engine import resume as resuming
from orchestra.engine.cluster import Cluster, Order, RunOutcome
from orchestra.engine.conclusion import Conclusion
from orchestra.engine.job import Job
from orchestra.engine.request import Request, check_arguments, check_model_and_data, placed, read_strategy, refuse
from orchestra.engine.scoring import Evaluate, Scorer
from orchestra.engine.snapshot import adopt
from orchestra.errors import ConfigError, OrchestraError, Problem
from orchestra.model import schedules
from orchestra.model.flat_optimizer import Factory, Schedule, elementwise
from orchestra.model.replica import flatten, trainable
from orchestra.runs import progress, run_lock
from orchestra.runs.budget import Budget, Epochs, Seconds, Steps, Target
from orchestra.runs.facts import Facts
from orchestra.runs.status import RunStatus
from orchestra.strategies.catalogue import row_of


@dataclass(frozen=True)
class Result:
    """What a run leaves: the trained model, its figures, the facts of the run, and the folder with everything."""

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
        """Whether the run learned anything; None if that cannot be told, as of a run of few steps.

        False if the training loss did not fall below that of the first steps, or the accuracy is that of guessing.
        `summary.why_unlearned` then has the figures and what to do.
        """
        return self.summary.learned


def train(
    *,
    model: Callable[[], nn.Module],
    data: Callable[[], Any],
    loss: Loss | None = None,
    optimizer: Factory,
    strategy: Strategy[Any] | str = "allreduce",
    cluster: Cluster | None = None,
    batch: int = 32,
    budget: Budget | None = None,
    evaluate: Evaluate | None = None,
    evaluation_data: Callable[[], Any] | None = None,
    evaluate_every: Steps | Epochs | None = None,
    validation_data: Callable[[], Any] | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    schedule: Schedule | None = None,
    clip: float | None = None,
    accumulate: int = 1,
    precision: str = "float32",
    partition: Partition | None = None,
    checkpoint_every: Steps | Epochs | None = None,
    resume: bool = False,
    tolerate: int = 10,
    keep_snapshots: bool = False,
    score_afterwards: bool = False,
    trace: bool = False,
    progress: Callable[[RunStatus], None] | bool | None = None,
    note: dict[str, Any] | None = None,
) -> Result:
    """Train a model on several processes with a strategy, and block until it is done.

    Samples are dealt out anew every epoch, streams as well; every sample is used once an epoch, by one worker. Batch
    statistics (BatchNorm) are each worker's own; the result, which comes in evaluation mode, has their mean, weighted
    by the samples that each worker saw.

    Args:
        model: makes the module. Every process calls it, with the same seed.
        data: makes the training data: a tuple or a dict of tensors or NumPy arrays, a Dataset or an IterableDataset, of
            single samples, not batches. The last entry of a tuple is the target; of a dict, "labels", "label",
            "targets", "target" or "y", else the last. The model gets the others, those of a dict by name.
        loss: `loss(output, target)`, the mean over the batch. None: the model gets the target as well, and computes the
            loss itself, as `output.loss`.
        optimizer: makes the inner optimizer from parameters, e.g. `partial(torch.optim.SGD, lr=0.1)`; it may put them
            into groups.
        strategy: how the workers agree, as an object or as text: `"slowmo(tau=12)"`.
        cluster: where; `Local(workers=2)` by default, under torchrun `Attached()`, which is many machines.
            `Simulated(workers=64)` rehearses it in virtual time.
        batch: samples of each worker and step.
        budget: how long: `Epochs(3)`, `Steps(1000) | Seconds(60)`, ...; one epoch by default.
        evaluate: `evaluate(model, evaluation_data)` gives a number or a dict of them; called off the clock, on a copy
            of the model in evaluation mode, on the CPU.
        evaluation_data: makes the data for `evaluate`.
        evaluate_every: how often to set the model aside for scoring; every epoch by default, and at the end.
        validation_data: makes samples set apart, for strategies that look at their loss.
        seed: of everything random.
        out: the run folder; a new one under `runs/` by default.
        schedule: factor on the learning rate as a function of epochs done.
        clip: largest norm of the gradient: of the mean where gradients are averaged, else of each worker's own.
        accumulate: parts in which a batch is computed, to save memory.
        precision: `"bf16"` computes forward and backward in mixed precision.
        partition: how samples are divided among workers: `IID()`, `LabelSorted()`, `Dirichlet(alpha=0.5)`.
        checkpoint_every: how often to save everything, beside on Ctrl-C; then the end is saved as well, where the
            workers go in step.
        resume: go on from the newest checkpoint in `out`; of a run that is complete, the result as it was.
        tolerate: gradients in a row that may be not finite before the run is given up.
        keep_snapshots: keep the models that were scored.
        score_afterwards: score them after training instead of beside it, with the lowest priority, as they come.
        trace: write down every message and every mean, for a timeline of who did what when (`orchestra trace`).
        progress: True prints a line every few seconds where there is no terminal to draw on, False is silent; a
            function is called several times a second with a `Progress`, the state of the run.
        note: anything more to be kept in the run's configuration.

    """
    given = _request(locals())
    with left_alone():
        try:
            training = _Training(overrides.apply(given))
            return training.run() if training.given.cluster.is_coordinator else training.participate()
        except OrchestraError as error:
            if environment.is_told_by_another(error):
                environment.hush(error)
            # It says what is wrong and what to do; the way through these files would only hide that.
            raise error.with_traceback(None) from None


def problems_of(**arguments: Any) -> list[Problem]:
    """What `train` would say to these arguments at once, before it makes a model or reads any data."""
    asked = inspect.signature(train).bind(**arguments)
    asked.apply_defaults()
    given = _request(asked.arguments)
    strategy, problems = read_strategy(given)
    return [*problems, *check_arguments(placed(given, strategy), strategy)]


def _request(asked: Mapping[str, Any]) -> Request:
    cluster = Attached() if environment.launched() else Local()
    defaults: dict[str, Any] = {"cluster": cluster, "budget": Epochs(1), "evaluate_every": Epochs(1), "note": {}}
    given: dict[str, Any] = {n: defaults.get(n) if value is None else value for n, value in asked.items()}
    return Request(**given)


class _Training:
    """One call of `train`, from the arguments to the result."""

    def __init__(self, asked: Request) -> None:
        strategy, problems = read_strategy(asked)
        given = placed(asked, strategy)
        refuse([*problems, *check_arguments(given, strategy)])
        assert strategy is not None
        self.strategy = strategy
        together = given.batch * given.cluster.workers
        given = replace(given, schedule=schedules.settle(given.schedule, together))
        seed_everything(given.seed)
        self.module = given.model()
        self.data = samples.read(given.data())
        self.doubts: list[str] = []
        refuse(check_model_and_data(given, self.strategy, self.module, self.data, self.doubts.append))
        self.given = replace(given, cluster=given.cluster.resolved(given, self.strategy, self.module, self.data))
        if not given.cluster.trains:
            self.given = replace(self.given, evaluate=None)
        self.targets = [p for p in budgets.parts(given.budget) if isinstance(p, Target)]
        self.folder = Path(given.out) if given.out is not None else _new_folder(expression.show(self.strategy))
        self.saved: checkpoint.Checkpoint | None = None

    # The run.

    def run(self) -> Result:
        """Open the folder, train, put the result together."""
        given = self.given
        job, resumed_at, budget = self._job(), 0.0, fingerprint.budget_of(given)
        if given.resume:
            course = self.folder, self._about(job), given.cluster
            if (ended := resuming.as_it_ended(*course, job, given.budget, budget)) is not None:
                return self._as_it_ended(job, ended)
            self.saved = resuming.find(*course)
            job, resumed_at = self._job(), resuming.clock(self.saved)
            resuming.look_at_budget(self.folder, self.saved, job, given.budget, resumed_at)
            resuming.forget_after(self.folder, self.saved)
            resuming.remember(self.folder, budget=budget, note=given.note)
        scorer = self._scorer()
        if self.saved is None:
            metrics = scorer.initial()
            self.folder.mkdir(parents=True, exist_ok=True)
            run_lock.make_room(self.folder)
        with run_lock.holding(self.folder):
            if self.saved is None:
                self._write_config(job, scorer)
                scorer.begin(metrics)
            result = self._carry_out(job, scorer, resumed_at)
        if "recipe" not in given.note:  # else the command line prints the warnings
            warnings.say(result.summary.warning)
        return result

    def _carry_out(self, job: Job, scorer: Scorer, resumed_at: float) -> Result:
        given = self.given
        doubts = warnings.say(*self.doubts, *self._cautions(job)) if given.cluster.trains else []
        seconds = next((p.count for p in budgets.parts(given.budget) if isinstance(p, Seconds)), None)
        display = given.progress if callable(given.progress) else progress.auto(given.progress, seconds)
        order = Order(
            job=job, x0=flatten(self.module), module=self.module, data=self.data, about=self._about(job),
            seconds=seconds, resumed_at=resumed_at, resumed_from=0 if self.saved is None else self.saved.step,
            how_to_resume=self._how_to_resume(), show=display, scorer=scorer, has_target=bool(self.targets),
            fingerprint=self._fingerprint(job),
        )  # fmt: skip
        shown = display if isinstance(display, progress.Display) else progress.Display(None)
        try:
            ending = given.cluster.carry_out(order)
            scorer.stop()
        except BaseException:
            scorer.stop(wait=False)
            raise
        finally:
            shown.close()
        with closing(ending), shown:
            ending.warnings[:0] = doubts
            conclusion = Conclusion(
                self.folder, job.launch, self.module, scorer, given.keep_snapshots, order.how_to_resume
            )
            metrics, facts = conclusion.conclude(ending, partial(shown.count, "scoring snapshots"))
            result = Result(self.module, metrics, facts, self.folder)
            model = (self.folder / "model.safetensors").read_bytes
            ending.tell(lambda: RunOutcome(str(result.run), result.metrics, result.summary.as_dict(), model()))
        return result

    def _as_it_ended(self, job: Job, facts: Facts) -> Result:
        """The result of a run that is over, for the other processes as well."""
        x0, about = flatten(self.module), self._fingerprint(job)
        model = (self.folder / "model.safetensors").read_bytes()
        try:
            adopt(self.module, model)
        except (SafetensorError, RuntimeError) as error:
            raise resuming.damaged(self.folder, error) from None
        if callable(show := self.given.progress):  # which remembers the folder
            show(RunStatus(job.run, facts.strategy, job.workers, job.servers, job.last_step, False, facts.seconds, ()))
        told = RunOutcome(str(self.folder), facts.metrics, facts.as_dict(), model)
        self.given.cluster.announce_finished(job, x0, about, told)
        self.module.eval()
        return Result(self.module, facts.metrics, facts, self.folder)

    def participate(self) -> Result:
        """Take part in a run that another process keeps."""
        job = self._job()
        show = given if callable(given := self.given.progress) else lambda watch: None
        told = self.given.cluster.participate(job, flatten(self.module), self._fingerprint(job), show)
        adopt(self.module, told.model)
        self.module.eval()
        return Result(self.module, told.metrics, Facts.of(told.summary), Path(told.run))

    def _cautions(self, job: Job) -> Iterator[str | None]:
        yield warnings.about_shards(job.shards, self.given.partition)
        optimizer = self.given.optimizer(list(trainable(self.module).values()))
        yield warnings.about_momentum(self.strategy, optimizer, job.workers)

    def _how_to_resume(self) -> str:
        """What to type: the command line can only repeat a call that it knows."""
        if "recipe" in self.given.note:
            return self.given.cluster.how_to_resume(self.folder)
        return f'the same train(..., out="{self.folder}", resume=True)'

    def _job(self) -> Job:
        given, cluster = self.given, self.given.cluster
        feed = make_feed(
            self.data, batch=given.batch, seed=given.seed, rank=0, size=cluster.workers, partition=given.partition
        )
        per_epoch, streamed = feed.steps_per_epoch, isinstance(self.data, IterableDataset)
        return Job(
            model=given.model, data=given.data, loss=given.loss, optimizer=given.optimizer, strategy=self.strategy,
            workers=cluster.workers, batch=given.batch, seed=given.seed, trace=given.trace,
            device=cluster.resolve_device(),
            one_memory=cluster.one_memory,
            torch_means=cluster.means_by_torch(),
            run=self.folder.absolute(),
            launch=uuid.uuid4().hex[:8],
            last_step=budgets.last_step(given.budget, per_epoch, given.batch * cluster.workers),
            last_epoch=budgets.last_epoch(given.budget) if streamed else None,
            schedule=given.schedule,
            validation=given.validation_data,
            partition=given.partition,
            clip=given.clip,
            accumulate=given.accumulate,
            bf16=given.precision == "bf16",
            tolerate=given.tolerate,
            snapshot_every=_steps(given.evaluate_every, per_epoch) if given.evaluate is not None else None,
            checkpoint_every=_steps(given.checkpoint_every, per_epoch),
            steps_per_epoch=per_epoch,
            shards=feed.shards,
            samples_per_epoch=None if streamed else len(SampleStore(self.data)),
            names=tuple(trainable(self.module)),
            layers=tuple(tuple(p.shape) for p in trainable(self.module).values()),
            layerwise=not elementwise(given.optimizer, list(trainable(self.module).values())),
            resume=None if self.saved is None else self.saved.path.absolute(),
            threads=cluster.threads_for(cluster.workers + self.strategy.layout.servers),
            delay=delay.at(given.batch) if (delay := cluster.get_delay()) is not None else None,
        )  # fmt: skip

    def _scorer(self) -> Scorer:
        given = self.given
        data = given.evaluation_data() if given.evaluate is not None and given.evaluation_data is not None else None
        return Scorer(
            self.folder, self.module, given.evaluate, data, self.strategy, given.cluster.workers, self.targets,
            given.keep_snapshots,
            given.score_afterwards,
        )  # fmt: skip

    def _about(self, job: Job) -> dict[str, Any]:
        return fingerprint.about(self.given, self.strategy, self.module, job)

    def _fingerprint(self, job: Job) -> dict[str, Any]:
        """What other processes must have in common with this one, where there are any."""
        if self.given.cluster.one_memory:
            return {}
        seed_everything(self.given.seed)  # samples may be drawn
        given, about = self.given, self._about(job)
        return fingerprint.fingerprint(__version__, given, self.strategy, self.module, self.data, about)

    def _write_config(self, job: Job, scorer: Scorer) -> None:
        seed_everything(self.given.seed)  # samples may be drawn
        config = self._about(job) | {
            "defining": row_of(self.strategy).must_log,
            "stale": self.strategy.layout.sees_stale_gradients,
            "labels": distribution(scorer.data) or distribution(self.data),
            "parameters": job.parameters,
            "initial": fingerprint.initial(flatten(self.module)),
            "samples": fingerprint.samples(self.data) if self.given.cluster.trains else None,
            "budget": fingerprint.budget_of(self.given),
            "threads": job.threads,
            "cluster": self.given.cluster.about(),
            "snapshot_every": job.snapshot_every,
            "checkpoint_every": job.checkpoint_every,
            "versions": fingerprint.versions(__version__),
            "note": self.given.note,
        }
        checkpoint.write_text(self.folder / "config.json", json.dumps(config, indent=1))


def _steps(every: Steps | Epochs | None, per_epoch: int | None) -> int | None:
    """An interval in steps; of a stream, whose length nobody knows, every hundred."""
    if every is None:
        return None
    if isinstance(every, Steps):
        return every.count
    return max(1, round(every.count * per_epoch)) if per_epoch else 100


def _new_folder(name: str) -> Path:
    """A run folder of today that does not exist yet."""
    slug = "".join(c if c.isalnum() else "-" for c in name).strip("-")
    stem = f"{time.strftime('%Y-%m-%d-%H%M%S')}-{slug}"
    for suffix in ("", *(f"-{i}" for i in range(2, 1000))):
        path = Path("runs") / (stem + suffix)
        if not path.exists():
            return path
    raise ConfigError([Problem("out", stem, "all such run folders exist: name one with out=")])
