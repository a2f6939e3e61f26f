# SPDX-License-Identifier: Apache-2.0
"""Is a small model's step as quick as with DDP, and the asynchronous server's as quick as all-reduce?"""

from __future__ import annotations

import statistics

from benchmarks.common import Outcome, interleave, main
from benchmarks.groups import Ours, Peers
from benchmarks.workloads import BATCH

STEPS, WARMUP = 80, 10
WORKLOAD = "lenet"
ASYNCHRONOUS = "ps(consistency=asp())"


def measure(rounds: int) -> Outcome:
    """DDP, all-reduce and the asynchronous server, with 2 and 4 workers."""
    outcome = Outcome(
        "LeNet-5 step",
        f"61,706 parameters, batch {BATCH}, synthetic 1x28x28, one thread each; {rounds} rounds of {STEPS} steps "
        f"({WARMUP} dropped). The server is one process more than the workers. Milliseconds of a worker's step, and "
        "samples a second of all workers together (from the mean step, since steps of workers that share a core vary a "
        "lot): median of the rounds (least to most). Processor time is that of all processes together.",
    )
    for workers in (2, 4):
        _compare(outcome, workers, rounds)
    return outcome


def _compare(outcome: Outcome, workers: int, rounds: int) -> None:
    with (
        Peers("solo", WORKLOAD, workers, STEPS) as solo,
        Peers("ddp", WORKLOAD, workers, STEPS) as ddp,
        Peers("ddp", WORKLOAD, workers, STEPS, "--gradient-as-bucket-view") as view,
        Ours(WORKLOAD, "allreduce", workers, STEPS) as all_reduce,
        Ours(WORKLOAD, ASYNCHRONOUS, workers, STEPS) as server,
    ):
        turns = interleave(
            {
                "solo, no exchange": lambda: solo.steps(WARMUP),
                "DDP": lambda: ddp.steps(WARMUP),
                "DDP, bucket view": lambda: view.steps(WARMUP),
                "ours, all-reduce": lambda: all_reduce.steps(WARMUP),
                "ours, asynchronous server": lambda: server.steps(WARMUP),
            },
            rounds,
        )
    result = turns.by(statistics.median)
    processor = turns.processor_by(STEPS)
    totals = turns.by(lambda steps: workers * BATCH / statistics.fmean(steps))
    outcome.part(f"{workers} workers")
    outcome.table(
        ["contestant", "step, ms", "samples/s, all", "processor, ms a step"],
        [
            [name, figure.show(2, 1e3), totals[name].show(0), processor[name].show(1, 1e3)]
            for name, figure in result.figures.items()
        ],
    )
    outcome.say(turns.disturbance())
    better = max("DDP", "DDP, bucket view", key=lambda name: totals[name].median)
    step, rate = result.ratio("ours, all-reduce", better), totals.ratio("ours, all-reduce", better)
    outcome.say(f"All-reduce against {better}: step {step.show(2)}, samples/s {rate.show(2)}.")
    met = step.median <= 1.0 and rate.median >= 1.0
    outcome.goal(f"all-reduce with {workers} workers no slower than DDP", met, quiet=turns.quiet)
    step = result.ratio("ours, asynchronous server", "ours, all-reduce")
    rate = totals.ratio("ours, asynchronous server", "ours, all-reduce")
    outcome.say(
        f"Asynchronous server ({workers} + 1 processes) against all-reduce ({workers}): step {step.show(2)}, "
        f"samples/s {rate.show(2)}."
    )
    outcome.goal(
        f"the asynchronous server with {workers} workers no slower than all-reduce",
        step.median <= 1.0 and rate.median >= 1.0,
        quiet=turns.quiet,
    )


if __name__ == "__main__":
    main(measure, rounds=10)
