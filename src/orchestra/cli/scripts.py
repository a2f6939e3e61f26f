# SPDX-License-Identifier: Apache-2.0
"""A script that calls `train`, as a recipe: what `compare`, `sweep` and `recommend` train with each strategy.

The script runs once, up to its first call of `train`. That call does not train: its arguments are the recipe, and
the rest of the script does not run. Strategy, seed, folder, checkpoints and display are those of the command.
"""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from typing import Any

from torch import nn
from torch.utils.data import IterableDataset

import orchestra.runs.budget as budgets
from orchestra.cli import summary
from orchestra.cli.loop_runs import TRAINING_LOSS
from orchestra.cli.options import Options
from orchestra.cli.sources import Source
from orchestra.clusters.local import Local
from orchestra.clusters.simulated import Simulated
from orchestra.data.batches import Loss, Pieces, loss_of, target_of
from orchestra.data.samples import SampleStore, collate, read
from orchestra.engine import overrides
from orchestra.engine.cluster import Cluster
from orchestra.engine.spec import TrainArguments
from orchestra.engine.validate import check_arguments, refuse
from orchestra.errors import ConfigError, Problem
from orchestra.recipes.recipe import Recipe

_MOST, _AT_ONCE = 1024, 128  # samples for the training loss, and for one forward pass
_KEPT = ("clip", "accumulate", "precision", "partition", "validation_data", "tolerate")  # taken from the script


def capture(source: Source) -> Recipe:
    """Return the arguments that a script gives to `train`, as a recipe. The script runs only once."""
    assert source.path is not None
    return _capture(source, source.path.stat().st_mtime_ns)


@lru_cache
def _capture(source: Source, _: int) -> Recipe:
    path, reached = str(source.path), None
    try:
        with overrides.using({}, captures=True):
            runpy.run_path(path, run_name="__main__")
    except overrides.Reached as error:
        reached = error
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    if reached is None:
        why = (
            "neither called orchestra.train(...) or orchestra.prepare(...) nor defined a RECIPE = orchestra.Recipe(...)"
        )
        raise ConfigError([Problem("script", path, why)])
    if reached.arguments is None:
        why = "calls orchestra.prepare in a module that it imports: call it in the script itself, to be compared"
        raise ConfigError([Problem("script", path, why)])
    if (places := source.calls("train")) > 1:
        summary.say(f"note: {source.label}.py calls train() in {places} places: the first one reached counts.")
    return as_recipe(source.label, reached.arguments)


def as_recipe(name: str, asked: TrainArguments) -> Recipe:
    """Return a call of `train` as a recipe. Without `evaluate`, the score is the loss on some training samples."""
    refuse(check_arguments(replace(asked, out=None, resume=False), None))
    targets = [part for part in budgets.parts(asked.budget) if isinstance(part, budgets.Target)]
    scored = asked.evaluate is not None and asked.evaluation_data is not None
    return Recipe(
        name=name,
        about=f"what {name}.py trains",
        model=asked.model,
        data=asked.data,
        loss=asked.loss,
        optimizer=asked.optimizer,
        batch=asked.batch,
        epochs=_epochs(asked),
        evaluate=asked.evaluate if scored and asked.evaluate is not None else partial(_loss_on, asked.loss),
        evaluation_data=asked.evaluation_data if asked.evaluation_data and scored else partial(_some, asked.data),
        target=f"{targets[0].metric}={targets[0].value:g}" if targets else "",
        schedule=asked.schedule,
        more={field: getattr(asked, field) for field in _KEPT} | {"cluster": _place(asked.cluster)},
    )


def _epochs(asked: TrainArguments) -> float:
    """Return how long the script trains, in epochs: all strategies get equally many samples, not steps or seconds."""
    epochs = budgets.last_epoch(asked.budget)
    together = asked.batch * asked.cluster.workers
    last = budgets.last_step(asked.budget, None, together)  # by steps and samples alone
    if last is None:
        return math.nan if epochs is None else float(epochs)
    data = asked.data()
    if isinstance(data, IterableDataset):
        return math.nan if epochs is None else float(epochs)
    return round(min(last * together / len(SampleStore(read(data))), math.inf if epochs is None else epochs), 4)


def _place(cluster: Cluster) -> Cluster:
    """Return the script's cluster, or local processes where a command cannot use that cluster."""
    return cluster if isinstance(cluster, Local | Simulated) else Local(workers=max(2, cluster.workers))


def placed(recipe: Recipe, shared: Options) -> Options:
    """Return the options with the script's workers and simulated machines where the command gives none."""
    cluster = recipe.more.get("cluster")
    workers = shared.workers if shared.workers is not None else 2 if cluster is None else cluster.workers
    if not isinstance(cluster, Simulated):
        return replace(shared, workers=workers)
    network = shared.network or str(cluster.get_network())
    time = shared.compute_time or (cluster.compute_time if isinstance(cluster.compute_time, str) else None)
    return replace(shared, workers=workers, sim=True, network=network, compute_time=time)


# The training loss, for scripts without a score.


def _some(data: Callable[[], Any]) -> list[Pieces]:
    """Return batches of samples evenly spread over the data, or the first samples of a stream."""
    found = data()
    if isinstance(found, IterableDataset):
        stream = list(islice(iter(found), _MOST))
        return [collate(stream[i : i + _AT_ONCE]) for i in range(0, len(stream), _AT_ONCE)]
    samples = SampleStore(read(found))
    chosen = range(0, len(samples), max(1, math.ceil(len(samples) / _MOST)))
    return [samples.take(chosen[i : i + _AT_ONCE]) for i in range(0, len(chosen), _AT_ONCE)]


def _loss_on(loss: Loss | None, model: nn.Module, batches: list[Pieces]) -> dict[str, float]:
    """Return the mean loss over batches."""
    sizes = [len(target_of(batch)) for batch in batches]
    total = sum(float(loss_of(model, batch, loss)) * size for batch, size in zip(batches, sizes, strict=True))
    return {TRAINING_LOSS: total / max(1, sum(sizes))}
