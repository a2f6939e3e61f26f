# SPDX-License-Identifier: Apache-2.0
"""What a run is, as text to compare: with a checkpoint, or with what another machine is about to do."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import orchestra.budget as budgets
from orchestra import checkpoint, expression, schedules
from orchestra.budget import Target
from orchestra.data.feed import Samples
from orchestra.job import Job
from orchestra.replica import flatten, trainable
from orchestra.request import Request
from orchestra.strategy import Strategy

_LOOKED_AT = 16  # samples


def about(given: Request, strategy: Strategy[Any], module: nn.Module, job: Job) -> dict[str, Any]:
    """What a checkpoint can be resumed with."""
    shapes = {name: (p.shape, p.dtype) for name, p in trainable(module).items()}
    found = {
        "strategy": expression.show(strategy),
        "workers": job.workers,
        "servers": job.servers,
        "batch": job.batch,
        "seed": job.seed,
        "model": checkpoint.fingerprint(shapes),
        "data": "a stream" if job.samples_per_epoch is None else f"{job.samples_per_epoch} samples",
        "optimizer": settings_of(given.optimizer(list(trainable(module).values()))),
        "schedule": expression.show(s) if isinstance(s := given.schedule, schedules.Curve) else None,
        "precision": given.precision,
        "clip": job.clip,
        "accumulate": job.accumulate,
        "partition": repr(given.partition) if given.partition is not None else "IID()",
        # Who holds which part of x depends on it.
        "device": f"{job.device}, one each" if job.torch_means and job.one_memory else job.device,
    }
    if job.one_memory:
        return found
    return found | {"x": "on every machine", "means": "by torch" if job.torch_means else "by messages"}


def fingerprint(version: str, given: Request, module: nn.Module, data: Any, about: dict[str, Any]) -> dict[str, Any]:
    """What all processes of a run must have in common, the most telling first."""
    return {
        "version of orchestra": version,
        "version of torch": torch.__version__.partition("+")[0],
        **about,
        "cluster": given.cluster.about(),
        "budget": budget_of(given),
        "tolerate": given.tolerate,
        "loss": getattr(given.loss, "__qualname__", type(given.loss).__qualname__),
        "evaluate_every": repr(given.evaluate_every),
        "checkpoint_every": repr(given.checkpoint_every),
        "sum of the initial parameters": _sum([flatten(module)]),
        "sum of some samples": _sum(_some(data)),
    }


def budget_of(given: Request) -> list[str]:
    """A budget as text."""

    def value(part: Any) -> Any:
        return f"{part.metric}:{part.value}" if isinstance(part, Target) else part.count

    return [f"{type(part).__name__.lower()}={value(part)}" for part in budgets.parts(given.budget)]


def _some(data: Any) -> Iterable[Tensor]:
    """Samples from all over the data; none of a stream, which may be read only once."""
    if isinstance(data, IterableDataset):
        return
    samples = Samples(data)
    step = max(1, len(samples) // _LOOKED_AT)
    for field in samples.take(list(range(0, len(samples), step))[:_LOOKED_AT]):
        if isinstance(field, Tensor):
            yield field


def _sum(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def settings_of(optimizer: torch.optim.Optimizer) -> str:
    """An optimizer's class and hyper-parameters."""
    groups = [{k: v for k, v in sorted(group.items()) if k != "params"} for group in optimizer.param_groups]
    return f"{type(optimizer).__name__} {groups}"
