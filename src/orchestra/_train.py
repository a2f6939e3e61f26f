# SPDX-License-Identifier: Apache-2.0
"""The call `orchestra.train`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from orchestra.clusters.attached import Attached
from orchestra.clusters.local import Local
from orchestra.clusters.runners import runner_of
from orchestra.core.strategy import Strategy
from orchestra.data.batches import Loss
from orchestra.data.partitions import Partition
from orchestra.data.random_state import left_alone
from orchestra.engine import environment, overrides, tracebacks
from orchestra.engine.cluster import Cluster
from orchestra.engine.scoring import Evaluate
from orchestra.engine.spec import TrainArguments
from orchestra.engine.training import Result, Training
from orchestra.engine.validate import check_arguments, placed, read_strategy
from orchestra.errors import Problem
from orchestra.model.flat_optimizer import Factory, Schedule
from orchestra.runs.budget import Budget, Epochs, Steps
from orchestra.runs.status import RunStatus


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
    """Train a model on several processes with a strategy, and block until the run is complete.

    Samples are dealt out again every epoch, also those of streams; every sample is used once per epoch, by one worker.
    Batch statistics (BatchNorm) are each worker's own; the result, which is in evaluation mode, has their mean,
    weighted by the samples that each worker saw.

    Args:
        model: makes the module. Every process calls it, with the same seed.
        data: makes the training data: a tuple or a dict of tensors or NumPy arrays, a Dataset or an IterableDataset, of
            single samples, not batches. The last entry of a tuple is the target; of a dict, "labels", "label",
            "targets", "target" or "y", else the last. The model gets the others, those of a dict by name.
        loss: `loss(output, target)`, the mean over the batch. None: the model gets the target as well, and computes the
            loss itself, as `output.loss`.
        optimizer: makes the inner optimizer from parameters, e.g. `partial(torch.optim.SGD, lr=0.1)`; it may put them
            into groups.
        strategy: an object, or text such as `"slowmo(tau=12)"`.
        cluster: where to run; by default `Local(workers=2)`, and under torchrun `Attached()`, for several machines.
            `Simulated(workers=64)` simulates the run in virtual time.
        batch: samples of each worker and step.
        budget: how long: `Epochs(3)`, `Steps(1000) | Seconds(60)`, ...; one epoch by default.
        evaluate: `evaluate(model, evaluation_data)` returns a number or a dict of them; called outside the training
            time, on a copy of the model in evaluation mode, on the CPU.
        evaluation_data: makes the data for `evaluate`.
        evaluate_every: how often to take a snapshot of the model for scoring; every epoch by default, and at the end.
        validation_data: makes validation samples, for strategies that use their loss.
        seed: of all random numbers.
        out: the run folder; a new one under `runs/` by default.
        schedule: factor on the learning rate as a function of epochs done.
        clip: largest norm of the gradient: of the mean where gradients are averaged, else of each worker's own.
        accumulate: number of micro-batches per batch, to save memory.
        precision: `"bf16"` computes forward and backward in mixed precision.
        partition: how samples are divided among workers: `IID()`, `LabelSorted()`, `Dirichlet(alpha=0.5)`.
        checkpoint_every: how often to save a checkpoint, besides on Ctrl-C; with it, the end is saved as well if the
            workers are in lockstep.
        resume: continue from the newest checkpoint in `out`; for a complete run, return its result.
        tolerate: how many gradients in a row may be not finite before the run fails.
        keep_snapshots: keep the models that were scored.
        score_afterwards: score snapshots after training instead of during it with low priority.
        trace: record every message and every all-reduce, for a timeline of all nodes (`orchestra trace`).
        progress: True prints a line every few seconds if there is no terminal to draw on, False is silent; a
            function is called several times a second with a `RunStatus`, the state of the run.
        note: further entries for the run's configuration.

    """
    given = _arguments(locals())
    with left_alone():
        try:
            return Training(overrides.apply(given), runner_of).result()
        except Exception as error:
            tracebacks.shorten(error)
            raise


def problems_of(**arguments: Any) -> list[Problem]:
    """Return the problems that `train` would find in these arguments before it makes a model or reads any data."""
    bound = inspect.signature(train).bind(**arguments)
    bound.apply_defaults()
    given = _arguments(bound.arguments)
    strategy, problems = read_strategy(given)
    return [*problems, *check_arguments(placed(given, strategy), strategy)]


def _arguments(given: Mapping[str, Any]) -> TrainArguments:
    cluster = Attached() if environment.launched() else Local()
    defaults: dict[str, Any] = {"cluster": cluster, "budget": Epochs(1), "evaluate_every": Epochs(1), "note": {}}
    arguments: dict[str, Any] = {n: defaults.get(n) if value is None else value for n, value in given.items()}
    return TrainArguments(**arguments)
