# SPDX-License-Identifier: Apache-2.0
"""What does synchronising two processes add to a step of a 10 M parameter model?"""

from __future__ import annotations

import statistics

from benchmarks.common import Figure, Outcome, interleave, main
from benchmarks.groups import Ours, Peers

STEPS, WARMUP = 14, 2
WORKLOAD = "mlp10m"


def measure(rounds: int) -> Outcome:
    """Solo, DDP and ours in turn."""
    with (
        Peers("solo", WORKLOAD, 1, STEPS, keep_memory=True) as one,
        Peers("solo", WORKLOAD, 2, STEPS) as untuned,
        Peers("solo", WORKLOAD, 2, STEPS, keep_memory=True) as two,
        Peers("ddp", WORKLOAD, 2, STEPS, keep_memory=True) as ddp,
        Peers("ddp", WORKLOAD, 2, STEPS, "--gradient-as-bucket-view", keep_memory=True) as view,
        Ours(WORKLOAD, "allreduce", 2, STEPS) as ours,
    ):
        turns = interleave(
            {
                "solo, one process alone": lambda: one.steps(WARMUP),
                "solo, two processes, allocator untuned": lambda: untuned.steps(WARMUP),
                "solo, two processes": lambda: two.steps(WARMUP),
                "DDP": lambda: ddp.steps(WARMUP),
                "DDP, gradient_as_bucket_view": lambda: view.steps(WARMUP),
                "ours": lambda: ours.steps(WARMUP),
            },
            rounds,
        )
    result = turns.by(statistics.median)
    outcome = Outcome(
        "Synchronous step, 10 M parameters, 2 processes",
        f"MLP 784-2048-2048-2048-10, batch 64, SGD with momentum, one thread each; {rounds} rounds of {STEPS} steps "
        f"({WARMUP} dropped). Milliseconds: median of the rounds' medians (least to most). *Adds* is the step minus "
        "the step of two processes that run at the same time and exchange nothing, in the same round. Processor time "
        "is that of all processes of a contestant together; other programs hardly change it. Our workers keep glibc "
        "from giving freed gradients back to the kernel at every step, so all peers but one are run with the same "
        "setting, which makes them faster too.",
    )
    base = "solo, two processes"
    processor = turns.processor_by(STEPS)
    outcome.table(
        ["contestant", "step, ms", "adds, ms", "processor, ms a step"],
        [
            [name, figure.show(1, 1e3), result.minus(name, base).show(1, 1e3), processor[name].show(0, 1e3)]
            for name, figure in result.figures.items()
        ],
    )
    outcome.say(turns.disturbance())
    better = min("DDP", "DDP, gradient_as_bucket_view", key=lambda name: result[name].median)
    added, theirs = result.minus("ours", base), result.minus(better, base)
    share = Figure([a / b for a, b in zip(added.values, theirs.values, strict=True)])
    outcome.say(
        f"Ours adds {added.median / theirs.median:.3f} of what {better} adds (ratio of the medians; round by round "
        f"{share.show(2)}). Step against {better}: {result.ratio('ours', better).show(2)}."
    )
    more = {name: processor.minus(name, base).median for name in ("ours", better)}
    outcome.say(
        f"Processor time added to a step of both processes: ours {more['ours'] * 1e3:.0f} ms, {better} "
        f"{more[better] * 1e3:.0f} ms; ratio {more['ours'] / more[better]:.3f}."
    )
    outcome.goal("ours adds at most 1/8 of what DDP adds", added.median <= theirs.median / 8, quiet=turns.quiet)
    return outcome


if __name__ == "__main__":
    main(measure, rounds=12)
