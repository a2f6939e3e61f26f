# SPDX-License-Identifier: Apache-2.0
"""One process of a race, on a host of a lab: DistributedDataParallel as its documentation has it, or a worker of ours.

python -m benchmarks.race_peer CONTESTANT RATE SEED STEPS EVERY FOLDER, with CONTESTANT a strategy of ours, or

    ddp              DistributedDataParallel on Gloo
    ddp-fp16         with the hook that halves the gradient's bytes
    ddp-powersgd-R   with the PowerSGD hook of rank R
    ddp-local-T      with the hook and optimizer of post-local SGD, a mean of the models every T steps

Every so many steps the model is set aside, and scored when all steps are done: process 0 leaves a line for each model
in FOLDER, with the samples that all used, the seconds since training began, and the accuracy on the test set.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import orchestra
from orchestra.data import fashion_mnist
from orchestra.engine.cluster import Cluster
from orchestra.metrics import accuracy
from orchestra.recipes.models import LeNet5
from orchestra.runs.facts import scores_of

BATCH = 32  # of each host
MOMENTUM = 0.9
RESULT = "scores.json"

Score = tuple[int, float, float]  # samples, seconds, accuracy


def sgd(rate: float) -> functools.partial[torch.optim.SGD]:
    """The optimizer of all contestants."""
    return functools.partial(torch.optim.SGD, lr=rate, momentum=MOMENTUM)


# Ours.


def train(
    strategy: str, rate: float, seed: int, every: int, cluster: Cluster, budget: orchestra.Budget, run: Path
) -> list[Score]:
    """Scores of a run of ours, in whatever world."""
    orchestra.train(
        model=LeNet5,
        data=functools.partial(fashion_mnist, "train"),
        loss=F.cross_entropy,
        optimizer=sgd(rate),
        strategy=strategy,
        cluster=cluster,
        batch=BATCH,
        budget=budget,
        evaluate=accuracy,
        evaluation_data=functools.partial(fashion_mnist, "test"),
        evaluate_every=orchestra.Steps(every),
        seed=seed,
        out=run,
        progress=False,
    )
    return [(score.samples, score.t, score.metrics["accuracy"]) for score in scores_of(run)]


# The peer.


def ddp(kind: str, rate: float, seed: int, steps: int, every: int, folder: Path) -> NoReturn:
    """A run of DistributedDataParallel, to the end of the process."""
    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    module = LeNet5()
    model = DistributedDataParallel(module, gradient_as_bucket_view=True, static_graph=True)
    optimizer = hooked(kind, model, sgd(rate)(model.parameters()))
    aside, samples = [], 0
    feed, test = batches(TensorDataset(*fashion_mnist("train")), seed), fashion_mnist("test")
    dist.barrier()
    began = time.perf_counter()
    for step in range(1, steps + 1):
        inputs, target = next(feed)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), target).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        samples += len(target) * dist.get_world_size()
        if step % every == 0 and dist.get_rank() == 0:
            aside.append((samples, time.perf_counter() - began, copy.deepcopy(module.state_dict())))
    dist.barrier()
    scores: list[Score] = []
    for used, seconds, state in aside:
        module.load_state_dict(state)
        scores.append((used, seconds, accuracy(module, test)["accuracy"]))
    leave(folder, scores)
    os._exit(0)  # to destroy the process group may block for ever: its thread waits for Python's lock


def hooked(kind: str, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Have the model communicate in that way; gives the optimizer to use with it."""
    match kind.split("-")[1:]:
        case ["fp16"]:
            model.register_comm_hook(None, fp16_compress_hook)
        case ["powersgd", rank]:
            # As early as it may be: every step before costs as much as dozens after.
            state = PowerSGDState(None, matrix_approximation_rank=int(rank), start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook)
        case ["local", period]:
            alone = PostLocalSGDState(None, None, start_localSGD_iter=0, post_local_gradient_allreduce=False)  # type: ignore[no-untyped-call]
            model.register_comm_hook(alone, post_localSGD_hook)
            # It counts from 0 and takes its first mean when the warm-up is over: after `period` steps, as ours does.
            averager = PeriodicModelAverager(period=int(period), warmup_steps=int(period) - 1)
            return PostLocalSGDOptimizer(optimizer, averager)
    return optimizer


def batches(dataset: TensorDataset, seed: int) -> Iterator[list[Tensor]]:
    """Epoch after epoch. Batches are taken from the tensors whole: sample by sample it would take longer."""
    sampler: DistributedSampler[int] = DistributedSampler(dataset, seed=seed)
    loader = DataLoader(dataset, sampler=BatchSampler(sampler, BATCH, drop_last=False), batch_size=None)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def leave(folder: Path, scores: list[Score]) -> None:
    """Process 0 speaks for all."""
    if os.environ["RANK"] == "0":
        (folder / RESULT).write_text(json.dumps(scores), encoding="utf-8")


def main() -> None:
    """Live as one process."""
    name, rate, seed, steps, every, folder = sys.argv[1:]
    torch.set_num_threads(1)
    if name.startswith("ddp"):
        ddp(name, float(rate), int(seed), int(steps), int(every), Path(folder))
    cluster = orchestra.Attached(order="given", trusted=True, threads=1)
    run = Path(folder) / "run"
    leave(Path(folder), train(name, float(rate), int(seed), int(every), cluster, orchestra.Steps(int(steps)), run))


if __name__ == "__main__":
    main()
