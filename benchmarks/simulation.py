# SPDX-License-Identifier: Apache-2.0
"""How fast are simulations: a thousand workers without numbers, 64 with?"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

import orchestra
from benchmarks.common import ROOT, Outcome, main, scratch
from benchmarks.workloads import LENET, loss

PARAMETERS = 61_706  # as many as LeNet-5
STEPS, WITH_NUMBERS = 100, 300
ASYNCHRONOUS = "ps(consistency=asp(), servers=8)"
# What the nodes ask of the world in a worker's step: a mini-batch, a gradient, sends and receives at both ends.
OPERATIONS = {"allreduce": 3, ASYNCHRONOUS: 2 + 4 * 8}


def measure(rounds: int) -> Outcome:
    """Real seconds, operations a second and memory, each run in a process of its own."""
    outcome = Outcome(
        "Simulation",
        f"Timing only: {STEPS} steps of each worker, {PARAMETERS:,} parameters, 1 Gbit/s and 50 µs, log-normal delays; "
        "set-up, event files and their evaluation included. Real seconds of the best round: everything but the program "
        "itself can only slow it down.",
    )
    rows = []
    seconds = {}
    for strategy, workers in (("allreduce", 1000), (ASYNCHRONOUS, 250), (ASYNCHRONOUS, 500), (ASYNCHRONOUS, 1000)):
        found = [_apart(strategy, workers) for _ in range(rounds)]
        best = min(found, key=lambda each: float(each["seconds"]))
        seconds[strategy, workers] = best["seconds"]
        operations = OPERATIONS[strategy] * workers * STEPS
        rows.append(
            [f"{strategy}, {workers:,} workers", f"{best['seconds']:.1f}", f"{operations / best['seconds']:,.0f}",
             f"{best['memory'] / 2**20:,.0f}"]
        )  # fmt: skip
    outcome.table(["simulation", "real seconds", "operations a second", "memory, MiB"], rows)
    numbers = {strategy: _apart(strategy, 64, "--numbers") for strategy in ("allreduce", "ps(consistency=asp())")}
    outcome.say(
        f"With numbers, one run each: {WITH_NUMBERS} steps of 64 workers, LeNet-5, batch 32: "
        + ", ".join(f"{strategy} {found['seconds']:.0f} s" for strategy, found in numbers.items())
        + "."
    )
    for strategy in ("allreduce", ASYNCHRONOUS):
        outcome.goal(f"{strategy}, 1,000 workers, in less than 60 s", seconds[strategy, 1000] < 60)
    rate = OPERATIONS[ASYNCHRONOUS] * 1000 * STEPS / seconds[ASYNCHRONOUS, 1000]
    outcome.goal("at least 60,000 operations a second", rate >= 60_000)
    slowest = max(found["seconds"] for found in numbers.values())
    outcome.goal("64 workers with numbers in less than 10 minutes", slowest < 600)
    return outcome


def _apart(strategy: str, workers: int, *options: str) -> dict[str, Any]:
    """One run in a new process, whose memory is its own."""
    command = [sys.executable, "-m", "benchmarks.simulation", "--one", strategy, str(workers), *options]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return found


def _data() -> tuple[Tensor, Tensor]:
    return torch.zeros(64_000, 1), torch.zeros(64_000, 1)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def one(strategy: str, workers: int, *, numbers: bool = False) -> None:
    """Simulate once; print seconds and memory."""
    import resource

    began = time.perf_counter()
    with scratch() as folder:
        orchestra.train(
            model=LENET.module if numbers else functools.partial(nn.Linear, 1, PARAMETERS // 2),
            data=LENET.data if numbers else _data,
            loss=loss if numbers else _loss,
            optimizer=functools.partial(torch.optim.SGD, lr=0.001),
            strategy=strategy,
            cluster=orchestra.Simulated(
                workers=workers,
                numerics="auto" if numbers else "off",
                network="1gbit,50us",
                compute_time="lognormal:0.05,0.3",
            ),
            batch=32,
            budget=orchestra.Steps(WITH_NUMBERS if numbers else STEPS),
            out=folder / "run",
            progress=False,
        )
        seconds = time.perf_counter() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "memory": memory}))


if __name__ == "__main__":
    if "--one" in sys.argv:
        one(sys.argv[2], int(sys.argv[3]), numbers="--numbers" in sys.argv)
    else:
        main(measure, rounds=1)
