# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments, the model and the data before any process starts."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from orchestra.core.strategy import Strategy
from orchestra.data import samples
from orchestra.data.batches import place_of_target, target_of
from orchestra.data.feed import SampleStore
from orchestra.data.partitions import IID, Dirichlet, LabelSorted
from orchestra.engine.fields import check_fields
from orchestra.errors import Problem
from orchestra.model import param_groups
from orchestra.model.flat_optimizer import ELEMENTWISE, elementwise
from orchestra.model.replica import trainable


def check_numbers(
    *,
    batch: object,
    seed: object,
    clip: object,
    accumulate: object,
    tolerate: object,
    precision: object,
    optimizer: object,
) -> Iterator[Problem]:
    """Yield plain arguments whose type or range is wrong."""
    for name, value, least in (
        ("batch", batch, 1),
        ("accumulate", accumulate, 1),
        ("tolerate", tolerate, 1),
        ("seed", seed, 0),
    ):
        if not isinstance(value, int) or isinstance(value, bool):
            yield Problem(name, value, "must be a whole number")
        elif value < least:
            yield Problem(name, value, f"must be at least {least}")
        elif value > 2**48:
            yield Problem(name, value, "is too large")
    if clip is not None:
        yield from check_norm("clip", clip)
    if precision not in ("float32", "bf16"):
        yield Problem("precision", precision, 'must be "float32" or "bf16"')
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        message = (
            'encloses the call, and does not reach the workers: leave it out, and use precision="bf16" to compute '
            "forward and backward in bfloat16"
        )
        yield Problem("torch.autocast", True, message)
    if isinstance(batch, int) and isinstance(accumulate, int) and 1 <= batch < accumulate:
        yield Problem(
            "accumulate", accumulate, f"cannot cut a batch of {batch} into {accumulate} parts: at most {batch}"
        )
    if not callable(optimizer):
        yield Problem("optimizer", optimizer, "must be a factory, such as functools.partial(torch.optim.SGD, lr=0.1)")


def check_optimizer(
    optimizer: Callable[..., torch.optim.Optimizer], module: nn.Module, strategy: Strategy[Any]
) -> Iterator[Problem]:
    """Build the optimizer once; yield its problems, unusable learning rates, and misfits with the strategy."""
    try:
        made = optimizer(list(trainable(module).values()))
        rates = [float(group["lr"]) for group in made.param_groups]
    except Exception as error:  # user code may raise anything
        yield Problem("optimizer", optimizer, f"cannot be built: {error}")
        return
    for rate in rates:
        if not math.isfinite(rate) or rate <= 0:
            yield Problem("optimizer.lr", rate, "must be a finite number above zero")
        elif rate > 1e6:
            yield Problem("optimizer.lr", rate, "is far too large: 1e6 at most, and rarely above 1")
    closure = inspect.signature(made.step).parameters.get("closure")
    if isinstance(made, torch.optim.SparseAdam) or (closure is not None and closure.default is closure.empty):
        yield Problem("optimizer", type(made).__name__, "needs a closure or sparse gradients: use SGD, Adam, ...")
    if elementwise(optimizer, list(trainable(module).values())):
        return
    yield from _check_layerwise(made, module, strategy)


def _check_layerwise(made: torch.optim.Optimizer, module: nn.Module, strategy: Strategy[Any]) -> Iterator[Problem]:
    """Yield what does not go with an optimizer that looks at whole layers, or has several groups of them."""
    layers, kind = list(trainable(module).values()), type(made).__name__
    dtypes = sorted({str(p.dtype) for p in trainable(module).values()})
    if len(dtypes) > 1:
        yield Problem(
            "optimizer", kind,
            f"looks at whole layers or has several groups, which goes with one dtype, not with {', '.join(dtypes)}",
        )  # fmt: skip
    if strategy.needs.momenta:
        message = "looks at whole layers or has several groups, and its state for them cannot be transferred: use "
        yield Problem("optimizer", kind, f"{message}momenta=reset")
    layout = strategy.layout
    if layout.servers > 1 and layout.placement == "even" and type(made) not in ELEMENTWISE:
        yield Problem(
            "optimizer", kind,
            f"looks at whole layers, but a server of {type(strategy).__name__} holds a range: cut between layers "
            '(placement="layers"), or use SGD, Adam or another that treats every element alike',
        )  # fmt: skip
    elif layout.servers > 1 and not param_groups.is_one(made, layers):
        try:
            param_groups.like(made, param_groups.members(made, layers), layers)
        except Exception as error:  # user code may raise anything
            message = f"has groups, and cannot be made for some of their layers only: {error}. Use servers=1"
            yield Problem("optimizer", kind, message)


def check_placement(strategy: Strategy[Any], module: nn.Module) -> Iterator[Problem]:
    """Yield a problem if a server would hold no layer."""
    layers, layout = sum(p.numel() > 0 for p in trainable(module).values()), strategy.layout
    if layout.placement == "layers" and layout.servers > layers:
        yield Problem("strategy.servers", layout.servers, f"is more than the {layers} layers, none of which is cut")


def check_layers(module: nn.Module, workers: int, name: str = "") -> Iterator[Problem]:
    """Yield layers that need a process group of torch.distributed; `name` is the module's name in the model."""
    names = [where for where, part in module.named_modules(prefix=name) if isinstance(part, nn.SyncBatchNorm)]
    if workers > 1 and names:
        message = (
            "would normalise each worker's batch alone, as BatchNorm does, because no process group of "
            "torch.distributed belongs to the run: use BatchNorm, whose running statistics are averaged over the "
            "workers, or GroupNorm, which does not depend on the batch"
        )
        yield Problem(f"model.{names[0]}".rstrip("."), "SyncBatchNorm", message)


def check_strategy(strategy: Strategy[Any], workers: int, clip: float | None) -> Iterator[Problem]:
    """Yield wrong fields of a strategy, its own problems, and incompatible arguments."""
    found = [*check_fields(strategy, "strategy")]
    yield from found
    if found:
        return
    if isinstance(workers, int) and workers >= 1:
        yield from strategy.problems(workers)
    if clip is not None:
        yield from check_whole(strategy, "clip", clip)


def check_norm(name: str, most: object) -> Iterator[Problem]:
    """Yield a problem if this is no bound for a norm."""
    if not (isinstance(most, int | float) and math.isfinite(most) and most > 0):
        yield Problem(name, most, "must be the largest allowed norm of the gradient, above zero, or None")


def check_whole(strategy: Strategy[Any], name: str, most: float) -> Iterator[Problem]:
    """Yield a problem if a server that clips sees only a range of the gradient."""
    servers = [phase for phase in strategy.layout.phases() if phase.model_location == "servers"]
    if any(phase.servers > 1 and phase.updates.clip == "mean" for phase in servers):
        message = "needs the norm of the whole mean, but each server sees only its range: use servers=1"
        yield Problem(name, most, message)


def check_data(data: Any, *, batch: int, workers: int, partition: Any) -> Iterator[Problem]:
    """Yield the problems of the data: too few samples, unequal lengths, non-finite values, an impossible partition."""
    if isinstance(data, IterableDataset):
        if partition is not None and not isinstance(partition, IID):
            yield Problem(
                "partition", partition, "needs all labels beforehand, which a stream does not have: use IID()"
            )
        return
    if isinstance(data, DataLoader):
        yield Problem("data", "DataLoader", "give the Dataset itself: batch= says how many samples make a batch")
        return
    unfit = [*samples.problems_of(data)] or [*_columns(data)]
    yield from unfit
    if unfit:
        return
    if not samples.is_columns(data) and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        message = "must give a tuple or a dict of tensors or NumPy arrays, a Dataset or an IterableDataset"
        yield Problem("data", type(data).__name__, message)
        return
    count = len(SampleStore(data))
    if count == 0:
        yield Problem("data", 0, "there is no sample")
    elif count < workers:
        yield Problem("data", count, f"samples are fewer than the {workers} workers: use fewer workers or more data")
    elif batch * workers > count:
        most = count // workers
        yield Problem("batch", batch, f"is more than each of {workers} workers has of {count} samples: at most {most}")
    elif partition is not None and not isinstance(partition, IID):
        yield from _divisible(data, partition, workers)


def _columns(data: Any) -> Iterator[Problem]:
    """Yield tensors without a first dimension, of unequal lengths, or with non-finite values."""
    if not samples.is_columns(data):
        return
    named = dict(data.items() if isinstance(data, Mapping) else enumerate(data))
    if any(t.dim() == 0 for t in named.values()):
        yield Problem("data", "a number", "the tensors must have samples along their first dimension")
        return
    lengths = [len(t) for t in named.values()]
    if len(set(lengths)) > 1:
        shown = dict(zip(named, lengths, strict=True)) if isinstance(data, Mapping) else lengths
        yield Problem("data", shown, "the tensors must have the same number of samples")
        return
    for place, t in named.items():
        if t.is_floating_point() and not bool(torch.isfinite(t).all()):
            bad = int((~torch.isfinite(t.reshape(len(t), -1)).all(1)).nonzero()[0])
            yield Problem(f"data[{place!r}][{bad}]", "nan or inf", "samples must be finite: drop or repair this one")


def _divisible(data: Any, partition: Any, workers: int) -> Iterator[Problem]:
    if isinstance(partition, Dirichlet) and not (math.isfinite(partition.alpha) and partition.alpha > 0):
        yield Problem("partition.alpha", partition.alpha, "must be above zero")
        return
    whole = samples.is_columns(data)
    if whole and not isinstance(partition, LabelSorted | Dirichlet):
        return  # a partition of the user's own need not use labels
    one = data if whole else data[0]
    sample = torch.as_tensor(target_of(one))
    if sample.dim() != int(whole) or sample.is_floating_point():
        entry = f"the entry {place_of_target(one)!r}" if isinstance(one, Mapping) else "the last entry"
        message = f"divides by label, but {entry} of a sample is no class number: use IID()"
        yield Problem("partition", partition, message)
