# SPDX-License-Identifier: Apache-2.0
"""How much goes through the asynchronous server, against plain copying and against PyTorch's RPC parameter server?"""

from __future__ import annotations

import statistics

from benchmarks.common import Outcome, interleave, main
from benchmarks.groups import Ours, Peers
from benchmarks.workloads import WORKLOADS

STEPS, WARMUP = 14, 2
MANY, SETTLED = 100, 20  # for what takes milliseconds: steps, and how many of them are dropped
WORKLOAD, SMALL = "mlp10m", "mlp10m, batch 4"
ASYNCHRONOUS = "ps(consistency=asp())"
COPIED = 4 * 10_000_000  # bytes of one copy by the memcpy peer
EXCHANGED = 2 * 4 * 10_020_874  # bytes a worker pushes and pulls in a step


def measure(rounds: int) -> Outcome:
    """Bytes against memcpy, samples against RPC."""
    outcome = Outcome(
        "Asynchronous server, 10 M parameters",
        f"One thread each; {rounds} rounds of {MANY} exchanges ({SETTLED} dropped) or {STEPS} training steps ({WARMUP} "
        "dropped); median of the rounds (least to most).",
    )
    _exchange(outcome, rounds)
    outcome.say(
        "Training: the MLP, SGD with momentum, 2 workers and 1 server. Samples a second of both workers together. RPC "
        "is torch.distributed.rpc on TensorPipe, one call a step that takes gradients and gives parameters. *As in the "
        "tutorial* (on batch RPC processing): the server waits for both workers' gradients, and answers with the "
        "module. *Tensors* is kinder: asynchronous, answers with a list of tensors that the worker takes over without "
        "a copy. The other tutorial's server, which computes for its workers by distributed autograd, fails with two "
        "of them on this torch: one's update modifies what the other's backward needs."
    )
    for workload in (WORKLOAD, SMALL):
        _training(outcome, rounds, workload)
    return outcome


def _exchange(outcome: Outcome, rounds: int) -> None:
    free = ("--without-gradient", "--plain-sgd")
    with (
        Peers("memcpy", WORKLOAD, 1, MANY) as copy,
        Peers("memcpy", WORKLOAD, 2, MANY) as copies,
        Ours(WORKLOAD, ASYNCHRONOUS, 1, MANY, *free) as ours1,
        Ours(WORKLOAD, ASYNCHRONOUS, 2, MANY, *free) as ours2,
        Peers("rpc", WORKLOAD, 3, MANY // 2, *free) as rpc,
    ):
        turns = interleave(
            {
                "memcpy, 1 process": lambda: copy.steps(SETTLED),
                "memcpy, 2 processes at once": lambda: copies.steps(SETTLED),
                "ours, 1 worker + server": lambda: ours1.steps(SETTLED),
                "ours, 2 workers + server": lambda: ours2.steps(SETTLED),
                "RPC, 2 workers + server": lambda: rpc.steps(SETTLED),
            },
            rounds,
        )
    seconds = turns.by(statistics.fmean)
    sizes = [COPIED, 2 * COPIED, EXCHANGED, 2 * EXCHANGED, 2 * EXCHANGED]
    rates = turns.by(statistics.fmean)
    for (name, figure), size in zip(seconds.figures.items(), sizes, strict=True):
        rates.figures[name].values = [size / value for value in figure.values]
    outcome.say(
        "The exchange alone: workers whose gradient costs nothing push 40 MB and pull 40 MB a step, the server applies "
        "plain SGD. GB/s pushed and pulled, all workers together, against the bytes that plain `copy_` moves."
    )
    outcome.table(["contestant", "GB/s"], [[name, f.show(2, 1e-9)] for name, f in rates.figures.items()])
    outcome.say(turns.disturbance())
    share = rates.ratio("ours, 2 workers + server", "memcpy, 1 process")
    outcome.say(
        f"2 workers against memcpy of one process: {share.show(2)}; of two at once, summed: "
        f"{rates.ratio('ours, 2 workers + server', 'memcpy, 2 processes at once').show(2)}. 1 worker against memcpy of "
        f"one process: {rates.ratio('ours, 1 worker + server', 'memcpy, 1 process').show(2)}."
    )
    outcome.goal("at least half of memcpy", share.median >= 0.5, quiet=turns.quiet)
    factor = rates.ratio("ours, 2 workers + server", "RPC, 2 workers + server")
    outcome.say(f"Exchange alone, ours against RPC: {factor.show(1)} times.")


def _training(outcome: Outcome, rounds: int, workload: str) -> None:
    batch = WORKLOADS[workload].batch
    with (
        Peers("solo", workload, 2, STEPS) as solo,
        Peers("rpc", workload, 3, STEPS) as rpc,
        Peers("rpc", workload, 3, STEPS, "--as-in-the-tutorial") as tutorial,
        Ours(workload, ASYNCHRONOUS, 2, STEPS) as ours,
    ):
        turns = interleave(
            {
                "no exchange, 2 processes": lambda: solo.steps(WARMUP),
                "RPC, tensors": lambda: rpc.steps(WARMUP),
                "RPC, as in the tutorial": lambda: tutorial.steps(WARMUP),
                "ours": lambda: ours.steps(WARMUP),
            },
            rounds,
        )
    rates = turns.by(lambda steps: 2 * batch / statistics.fmean(steps))
    outcome.part(f"Batch {batch}")
    processor = turns.processor_by(STEPS)
    outcome.table(
        ["contestant", "samples/s", "processor, ms a step of both workers"],
        [[name, f.show(0), processor[name].show(0, 1e3)] for name, f in rates.figures.items()],
    )
    outcome.say(turns.disturbance())
    factors = {name: rates.ratio("ours", name) for name in ("RPC, tensors", "RPC, as in the tutorial")}
    for name, factor in factors.items():
        limit = rates.ratio("no exchange, 2 processes", name)
        outcome.say(
            f"Ours against {name}: {factor.show(2)}; workers that exchange nothing, the ceiling: {limit.show(2)}."
        )
    base = "no exchange, 2 processes"
    added = {name: processor.minus(name, base).median * 1e3 for name in processor.figures if name != base}
    outcome.say(
        "Processor time that the exchange adds to a step of both workers, in ms: "
        + ", ".join(f"{name} {value:.0f}" for name, value in added.items())
        + "."
    )
    outcome.goal(
        f"at least 5 times the samples/s of the RPC parameter server, batch {batch}",
        factors["RPC, as in the tutorial"].median >= 5,
        quiet=turns.quiet,
    )


if __name__ == "__main__":
    main(measure, rounds=8)
