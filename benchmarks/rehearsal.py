# SPDX-License-Identifier: Apache-2.0
"""How fast is virtual time, without numbers: a thousand workers, and a bare heap of events beside it?"""

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
from orchestra.sim.kernel import Kernel, Promise

PARAMETERS = 61_706  # as many as LeNet-5
STEPS = 100
ASYNCHRONOUS = "ps(consistency=asp(), servers=8)"
# Sends and receives of a worker and of the servers, and one computation, in a step.
OPERATIONS = {"allreduce": 2, ASYNCHRONOUS: 4 * 8 + 1}


def measure(rounds: int) -> Outcome:
    """Real seconds, operations a second and memory, each run in a process of its own."""
    outcome = Outcome(
        "Rehearsal, timing only",
        f"{STEPS} steps of each worker, {PARAMETERS:,} parameters, 1 Gbit/s and 50 µs, log-normal delays; set-up, "
        "event files and their evaluation included. Real seconds of the best round: everything but the program itself "
        "can only slow it down.",
    )
    rows = []
    seconds = {}
    for strategy, workers in (("allreduce", 1000), (ASYNCHRONOUS, 250), (ASYNCHRONOUS, 500), (ASYNCHRONOUS, 1000)):
        found = [_apart(strategy, workers) for _ in range(rounds)]
        best = min(found, key=lambda each: float(each["seconds"]))
        seconds[strategy, workers] = best["seconds"]
        operations = OPERATIONS[strategy] * workers * STEPS
        rows.append(
            [strategy, f"{workers:,}", f"{best['seconds']:.1f}", f"{operations / best['seconds']:,.0f}",
             f"{best['memory'] / 2**20:,.0f}"]
        )  # fmt: skip
    outcome.table(["strategy", "workers", "real seconds", "operations a second", "memory, MiB"], rows)
    outcome.say(f"A bare kernel, a hundred tasks that only wait: {_bare():,.0f} waits a second, two events each.")
    for strategy in ("allreduce", ASYNCHRONOUS):
        outcome.goal(f"{strategy}, 1,000 workers, in less than 60 s", seconds[strategy, 1000] < 60)
    rate = OPERATIONS[ASYNCHRONOUS] * 1000 * STEPS / seconds[ASYNCHRONOUS, 1000]
    outcome.goal("at least 60,000 operations a second", rate >= 60_000)
    return outcome


def _apart(strategy: str, workers: int) -> dict[str, Any]:
    """One run in a new process, whose memory is its own."""
    command = [sys.executable, "-m", "benchmarks.rehearsal", "--one", strategy, str(workers)]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return found


def _data() -> tuple[Tensor, Tensor]:
    return torch.zeros(64_000, 1), torch.zeros(64_000, 1)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def one(strategy: str, workers: int) -> None:
    """Rehearse once; print seconds and memory."""
    import resource

    began = time.perf_counter()
    with scratch() as folder:
        orchestra.train(
            model=functools.partial(nn.Linear, 1, PARAMETERS // 2),
            data=_data,
            loss=_loss,
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
            strategy=strategy,
            cluster=orchestra.Simulated(
                workers=workers, numerics="off", network="1gbit,50us", delay="lognormal:0.05,0.3"
            ),
            budget=orchestra.Steps(STEPS),
            out=folder / "run",
            progress=False,
        )
        seconds = time.perf_counter() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "memory": memory}))


def _bare() -> float:
    kernel, tasks, waits = Kernel(), 100, 2000

    def spin() -> None:
        for _ in range(waits):
            promise: Promise[None] = Promise(kernel, lambda: "time to pass")
            kernel.after(1.0, promise.keep, None)
            promise.wait()

    for _ in range(tasks):
        kernel.spawn("spinner", spin)
    began = time.perf_counter()
    kernel.run()
    return tasks * waits / (time.perf_counter() - began)


if __name__ == "__main__":
    if "--one" in sys.argv:
        one(sys.argv[2], int(sys.argv[3]))
    else:
        main(measure, rounds=1)
