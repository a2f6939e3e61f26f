# SPDX-License-Identifier: Apache-2.0
"""How much faster is a simulation whose gradients are taken together? Whole runs, on the CPU."""

from __future__ import annotations

import functools
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import orchestra
from benchmarks.common import Outcome, Rounds, main
from orchestra.recipes.models import LeNet5, mlp

SAMPLES, BATCH = 16_384, 32


def data(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Noise with random labels."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, *shape, generator=generator), torch.randint(10, (SAMPLES,), generator=generator)


WORKLOADS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "LeNet-5": (LeNet5, (1, 28, 28)),
    "MLP 784-256-10": (functools.partial(mlp, 784, 256, 10), (784,)),
    "MLP 64-128-64-10": (functools.partial(mlp, 64, 128, 64, 10), (64,)),
}


def seconds(model: Any, shape: tuple[int, ...], numerics: Any, *, workers: int, steps: int, device: Any) -> float:
    """Of real time, for one asynchronous simulation."""
    cluster = orchestra.Simulated(
        workers=workers, device=device, numerics=numerics, network="10gbit,50us", compute_time="lognormal:0.05,0.3"
    )
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        orchestra.train(
            model=model,
            data=functools.partial(data, shape),
            loss=F.cross_entropy,
            optimizer=functools.partial(torch.optim.SGD, lr=0.001, momentum=0.9),
            strategy="ps(consistency=asp())",
            cluster=cluster,
            batch=BATCH,
            budget=orchestra.Steps(steps),
            out=Path(folder) / "run",
            progress=False,
        )
        return time.perf_counter() - began


def compare(device: str, workers: int, steps: int, rounds: int) -> Outcome:
    """Whole runs in turn."""
    outcome = Outcome(
        f"Gradients taken together, {'CPU' if device == 'cpu' else 'one GPU'}",
        f"Simulations of {workers} workers x {steps} steps, batch {BATCH}, an asynchronous server, log-normal delays; "
        f"real time of whole runs, set-up included, by gradient, in ms; {rounds} rounds in turn.",
    )
    rows, goals = [], []
    for name, (model, shape) in WORKLOADS.items():
        run = functools.partial(seconds, model, shape, workers=workers, device=device)
        took = Rounds()
        for numerics in ("real", "batched"):
            run(numerics, steps=1)  # the first calls of a process choose kernels
        for _ in range(rounds):
            for numerics in ("real", "batched"):
                took.add(numerics, run(numerics, steps=steps) / (steps * workers) * 1e3)
        ratio = took.ratio("real", "batched")
        rows.append([name, took["real"].show(2), took["batched"].show(2), ratio.show(2)])
        if device != "cpu" and name in GOALS:
            goals.append((f"{name} at least {GOALS[name]} times as fast", ratio.median >= GOALS[name]))
    outcome.table(["model", "one at a time", "together", "times as fast"], rows)
    for goal in goals:
        outcome.goal(*goal)
    return outcome


GOALS = {"LeNet-5": 15, "MLP 784-256-10": 40}


def measure(rounds: int) -> Outcome:
    """On the CPU."""
    return compare("cpu", 32, 16, rounds)


if __name__ == "__main__":
    main(measure, rounds=5)
