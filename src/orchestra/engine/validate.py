# SPDX-License-Identifier: Apache-2.0
"""The checks of all arguments before anything is started: they list every problem, each with its remedy."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import IterableDataset

import orchestra.runs.budget as budgets
from orchestra.core.strategy import Strategy
from orchestra.engine import checkpoint, checks, expression
from orchestra.engine.cluster import Cluster, resolve_device
from orchestra.engine.fields import check_fields
from orchestra.engine.first_gradient import try_gradient
from orchestra.engine.spec import TrainArguments
from orchestra.errors import ConfigError, Problem
from orchestra.model.replica import problems_of
from orchestra.model.schedules import Curve
from orchestra.runs import reading, run_lock
from orchestra.runs.budget import Epochs, Steps, Target


def read_strategy(given: TrainArguments) -> tuple[Strategy[Any] | None, list[Problem]]:
    """Return the strategy, parsed if it was given as text, or the problems for which there is none."""
    if isinstance(given.strategy, Strategy):
        unfit = [*check_fields(given.strategy, "strategy")]
        return (None if unfit else given.strategy), unfit  # with wrong fields its layout cannot be computed
    if not isinstance(given.strategy, str):
        message = 'must be a strategy such as AllReduce(), or its text "allreduce"'
        return None, [Problem("strategy", given.strategy, message)]
    try:
        return expression.parse(given.strategy), []
    except ConfigError as error:
        return None, list(error.problems)


def placed(given: TrainArguments, strategy: Strategy[Any] | None) -> TrainArguments:
    """Return the arguments with a cluster whose processes are divided into workers and servers."""
    if strategy is None or not isinstance(given.cluster, Cluster):
        return given
    return replace(given, cluster=given.cluster.for_strategy(strategy))


def check_arguments(given: TrainArguments, strategy: Strategy[Any] | None) -> Iterator[Problem]:
    """Yield the problems that can be found without calling any function of the user's."""
    yield from _check_functions(given)
    strategy = yield from _check_cluster(given, strategy)
    yield from budgets.problems_of(given.budget)
    yield from checks.check_numbers(
        batch=given.batch, seed=given.seed, clip=given.clip, accumulate=given.accumulate, tolerate=given.tolerate,
        precision=given.precision, optimizer=given.optimizer,
    )  # fmt: skip
    if isinstance(given.schedule, Curve):
        yield from check_fields(given.schedule, "schedule")
    if given.evaluate is not None and given.evaluation_data is None:
        yield Problem("evaluation_data", None, "must come with evaluate: a function that makes the data to score on")
    if strategy is not None and strategy.needs.validation_loss and given.validation_data is None:
        message = "the strategy needs the validation loss: give a function that makes the validation samples"
        yield Problem("validation_data", None, message)
    if given.evaluate is None and any(isinstance(p, Target) for p in budgets.parts(given.budget)):
        yield Problem("budget", given.budget, "a target needs evaluate= and evaluation_data=")
    if given.partition is not None and (isinstance(given.partition, type) or not hasattr(given.partition, "shards")):
        yield Problem("partition", given.partition, "must be IID(), LabelSorted() or Dirichlet(alpha=...)")
    yield from _check_note(given)
    yield from _check_intervals(given)
    yield from _check_checkpoints(given)
    yield from _check_folder(given)


def _check_cluster(
    given: TrainArguments, strategy: Strategy[Any] | None
) -> Generator[Problem, None, Strategy[Any] | None]:
    """Check the cluster, and whether the strategy can run there; return the strategy if it can be checked further."""
    if not isinstance(given.cluster, Cluster):
        yield Problem("cluster", given.cluster, "must be a cluster such as Local(workers=4)")
        return strategy
    lacking = [*given.cluster.problems()]
    yield from lacking
    # The number of workers may then be unknown.
    if strategy is None or (lacking and not given.cluster.abilities.one_memory):
        return strategy
    unfit = [*checks.check_strategy(strategy, given.cluster.workers, given.clip)]
    yield from unfit
    if unfit:
        return None  # its layout may raise
    shared = strategy.layout.model_location == "shared"
    if shared and not given.cluster.abilities.one_memory:
        message = "its workers share one x in the memory of one machine: use Local(...), without torchrun"
        yield Problem("strategy", type(strategy).__name__, message)
    elif shared and resolve_device(given.cluster.device) != "cpu":
        message = f'workers of {type(strategy).__name__} share one x in the memory of the machine: use "cpu"'
        yield Problem("cluster.device", given.cluster.device, message)
    return strategy


def _check_functions(given: TrainArguments) -> Iterator[Problem]:
    for name, example in (("model", "lambda: Net()"), ("data", "lambda: (x, y)"), ("loss", "F.cross_entropy")):
        value = getattr(given, name)
        if not callable(value) and (name, value) != ("loss", None):
            message = f"must be a function, so that every process can make its own: {name}={example}"
            yield Problem(name, type(value).__name__, message)
    if isinstance(given.model, nn.Module):
        message = "is a module: give the function that makes it, e.g. model=lambda: Net()"
        yield Problem("model", type(given.model).__name__, message)
    if isinstance(given.loss, type):
        yield Problem("loss", given.loss.__name__, f"is a class: give an instance, loss={given.loss.__name__}()")
    for name in ("evaluate", "evaluation_data", "validation_data", "schedule"):
        value = getattr(given, name)
        if value is not None and not callable(value):
            yield Problem(name, type(value).__name__, "must be a function, or None")
    if given.progress is not None and not isinstance(given.progress, bool) and not callable(given.progress):
        yield Problem("progress", type(given.progress).__name__, "must be True, False, a function, or None")


def _check_note(given: TrainArguments) -> Iterator[Problem]:
    try:
        json.dumps(given.note)
    except (TypeError, ValueError) as error:
        yield Problem("note", given.note, f"must be something that JSON can hold: {error}")


def _check_intervals(given: TrainArguments) -> Iterator[Problem]:
    for name in ("evaluate_every", "checkpoint_every"):
        every = getattr(given, name)
        if every is not None and not isinstance(every, Steps | Epochs):
            yield Problem(name, every, "must be Steps(n) or Epochs(n)")
        elif every is not None:
            for problem in budgets.problems_of(every):
                yield Problem(name, problem.value, problem.message)


def _check_checkpoints(given: TrainArguments) -> Iterator[Problem]:
    if isinstance(given.cluster, Cluster) and not given.cluster.abilities.checkpoints:
        for name in ("checkpoint_every", "resume"):
            if getattr(given, name):
                yield Problem(name, getattr(given, name), "a simulation is repeated, not resumed: leave it out")


def _check_folder(given: TrainArguments) -> Iterator[Problem]:
    out = given.out
    if isinstance(given.cluster, Cluster) and not given.cluster.is_coordinator:
        return  # process 0 keeps the run folder
    if out is not None and not isinstance(out, str | Path):
        yield Problem("out", out, "must be a path")
        return
    if out is not None:
        above = next(p for p in Path(out).absolute().parents if p.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            yield Problem("out", str(out), f"cannot be created: {above} is not a writable directory")
            return
    if given.resume and out is None:
        yield Problem("out", out, "must name the run folder to resume")
    elif given.resume and out is not None and not (Path(out) / "config.json").exists():
        why = "holds no config.json: it is no run folder" if Path(out).exists() else "there is no such folder"
        yield Problem("out", str(out), f"{why}, so nothing can be resumed")
    if out is not None and not given.resume and Path(out).exists():
        if not Path(out).is_dir():
            yield Problem("out", str(out), "is a file: choose a folder")
        elif any(Path(out).iterdir()) and not run_lock.never_began(Path(out)):
            yield Problem("out", str(out), f"is not empty: choose a new folder{_or_resume(Path(out))}")


def _or_resume(folder: Path) -> str:
    """Return how the run in a folder is resumed, as the second of two choices; nothing if it has no checkpoint."""
    try:
        note = reading.config_of(folder)["note"]
    except reading.Unreadable:
        return ""
    if not checkpoint.found_in(folder / "checkpoints"):
        return ""
    how = f"`{shlex.join(['orchestra', 'resume', str(folder)])}`" if "recipe" in note else "resume=True in this call"
    return f", or go on from its checkpoint with {how}"


def check_model_and_data(
    given: TrainArguments, strategy: Strategy[Any], module: nn.Module, data: Any, warn: Callable[[str], object]
) -> Iterator[Problem]:
    """Yield the problems that can be found with the model and the data; call `warn` about probable mistakes."""
    unfit = [*problems_of(module)]
    yield from unfit
    if not unfit:
        yield from checks.check_optimizer(given.optimizer, module, strategy)
        yield from checks.check_placement(strategy, module)
        yield from checks.check_layers(module, given.cluster.workers)
    if given.schedule is not None and not 0 <= (factor := given.schedule(0.0)) < math.inf:
        yield Problem("schedule(0.0)", factor, "must be a factor on the learning rate: finite, at least 0")
    if given.schedule is not None and strategy.layout.servers and isinstance(data, IterableDataset):
        message = "cannot be followed by servers, which do not see where a stream ends: use a map-style Dataset"
        yield Problem("schedule", given.schedule, message)
    if strategy.layout.promotes and isinstance(data, IterableDataset):
        message = "cannot give the samples of a stream to other workers: use a map-style Dataset"
        yield Problem("strategy.promote", True, message)
    per_epoch = None if isinstance(data, IterableDataset) else 1
    if strategy.needs.budget and budgets.last_step(given.budget, per_epoch, 1) is None:
        message = "has no share that could be spent, by which the strategy switches: add an end, such as | Steps(1000)"
        yield Problem("budget", given.budget, message)
    # Without numerics no sample is used, so there may be fewer samples than workers.
    batch, workers = (given.batch, given.cluster.workers) if given.cluster.abilities.trains else (1, 1)
    found = [*checks.check_data(data, batch=batch, workers=workers, partition=given.partition)]
    yield from found
    if not found and not unfit:
        found = [*try_gradient(module, data, given.loss, given.batch, warn)]
        yield from found or given.cluster.check_model(given, module, data)


def refuse(problems: Iterable[Problem]) -> None:
    """Raise all problems at once, if there are any."""
    found = list(problems)
    if found:
        raise ConfigError(found)
