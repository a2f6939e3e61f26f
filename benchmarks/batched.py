# SPDX-License-Identifier: Apache-2.0
"""How much faster is a rehearsal whose gradients are taken together? Whole runs, on the CPU or on one GPU."""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import orchestra
from orchestra.models import LeNet5, mlp

SAMPLES, BATCH = 16_384, 32


def data(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Noise with random labels."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, *shape, generator=generator), torch.randint(10, (SAMPLES,), generator=generator)


WORKLOADS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "LeNet-5": (LeNet5, (1, 28, 28)),
    "MLP 784-256-10": (functools.partial(mlp, 784, 256, 10), (784,)),
}


def seconds(model: Any, shape: tuple[int, ...], numerics: Any, *, workers: int, steps: int, device: Any) -> float:
    """Of real time, for one asynchronous rehearsal."""
    cluster = orchestra.Simulated(
        workers=workers, device=device, numerics=numerics, network="10gbit,50us", delay="lognormal:0.05,0.3"
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


def main() -> None:
    """Print a line for each model: whole runs, in turn, several times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    for name, (model, shape) in WORKLOADS.items():
        run = functools.partial(seconds, model, shape, workers=given.workers, device=given.device)
        took: dict[str, list[float]] = {"real": [], "batched": []}
        for numerics in took:
            run(numerics, steps=1)  # the first calls of a process choose kernels
        for _ in range(given.rounds):
            for numerics, found in took.items():
                found.append(run(numerics, steps=given.steps) / (given.steps * given.workers) * 1e3)
        each = ", ".join(f"{numerics} {_show(found)} ms" for numerics, found in took.items())
        ratios = [real / batched for real, batched in zip(took["real"], took["batched"], strict=True)]
        print(
            f"{name}, {given.workers} workers x {given.steps} steps on {given.device}, set-up included: {each} a "
            f"gradient; {_show(ratios)} times",
            flush=True,
        )


def _show(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
