# SPDX-License-Identifier: Apache-2.0
"""Which all-reduce is fastest, by the length of the vector and the number of workers?"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

import orchestra
from benchmarks.common import DISTURBED, Outcome, Rounds, main, scratch, watched
from orchestra import Node
from orchestra.collectives import ALGORITHMS, Sum, mean_
from orchestra.collectives.butterfly import butterfly
from orchestra.core.comm import Comm
from orchestra.core.ops import Group
from orchestra.core.strategy import Strategy
from orchestra.runs.events import Logged, read
from orchestra.worlds.simulated import networks
from orchestra.worlds.simulated.kernel import Kernel
from orchestra.worlds.simulated.network import VirtualNetwork
from orchestra.worlds.simulated.networks import Host, Network
from orchestra.worlds.simulated.transport import connect

NETWORKS = ("10gbit,50us", "100mbit,1ms")
WORKERS = (4, 8, 16, 64)
SIZES = tuple(round(10 ** (3 + i / 2)) // 4 * 4 for i in range(11))  # bytes, 1 kB to 100 MB
ONE_CHUNK = "butterfly, one chunk"
ONE, CHUNKS = "one_device", "butterfly"
ADDING = {"1 ns": 1e-9, "3.2 ns, as long as it takes to send it": 3.2e-9, "10 ns": 1e-8}  # a number

REAL_WORKERS = (2, 4)
REAL_SIZES = tuple(10**k for k in range(3, 9))  # bytes
REAL: dict[str, Sum] = ALGORITHMS | {ONE_CHUNK: partial(butterfly, chunks=1)}
WARM = 1  # rounds that do not count


def measure(rounds: int) -> Outcome:
    """Simulations of every algorithm, then real processes that run them in turn."""
    outcome = Outcome(
        "All-reduce: which algorithm when",
        "Simulated: virtual seconds of one mean without numbers, the same on every machine. Real: seconds of one mean "
        f"among processes of this machine, {rounds} rounds in which every algorithm takes its turn, every other round "
        "backwards, as many means as make 30 MB in a turn (1 to 100). The cores that they may use: "
        f"{len(os.sched_getaffinity(0))}. Where there are more processes than cores, a message costs a change of "
        "processes and nothing overlaps.",
    )
    errors = [error for network in NETWORKS for error in _winners(outcome, network)]
    _simulated_split(outcome)
    for workers in REAL_WORKERS:
        _real(outcome, workers, rounds)
    outcome.goal(
        "simulated crossovers of the ring and the butterfly in one chunk within 1 % of the formula", max(errors) <= 0.01
    )
    return outcome


# Simulated.


def simulated(add_up: Sum, workers: int, nbytes: int, network: Network) -> float:
    """Virtual seconds of one mean."""
    kernel = Kernel()
    ends, group = connect(VirtualNetwork(kernel, network, workers, workers), workers), Group(tuple(range(workers)))
    for end in ends:
        x = torch.empty(nbytes // 4, device="meta")
        kernel.spawn(f"worker {end.rank}", partial(_average, Comm(end, group, Group(())), x, add_up))
    kernel.run()
    return kernel.now


def _average(comm: Comm, x: Tensor, add_up: Sum) -> None:
    mean_(comm, x, 1.0, add_up)


def _winners(outcome: Outcome, text: str) -> list[float]:
    """Who wins, and how far the crossovers of ring and butterfly are from the formula."""
    network = networks.parse(text)
    times = {
        (workers, size): {name: simulated(add_up, workers, size, network) for name, add_up in ALGORITHMS.items()}
        for workers in WORKERS
        for size in SIZES
    }
    outcome.say(
        f"Simulated on {text}: the fastest to 0.1 %, its milliseconds, and how many times as long the slowest takes."
    )
    outcome.table(
        ["vector", *(f"{workers} workers" for workers in WORKERS)],
        [[_bytes(size), *(_best(times[workers, size]) for workers in WORKERS)] for size in SIZES],
    )
    host = network.hosts[0]
    rows, errors = [], []
    for workers in WORKERS:
        expected = formula(workers, 2 * host.latency, 8 / host.up)
        whole, chunked = (_crossover(REAL[name], workers, network, expected) for name in (ONE_CHUNK, CHUNKS))
        errors.append(abs(whole / expected - 1))
        rows.append([str(workers), _bytes(expected), _bytes(whole), _bytes(chunked)])
    outcome.say(f"The ring overtakes the butterfly on {text} from:")
    outcome.table(["workers", "by the formula", "simulated, one chunk", "simulated, as it is"], rows)
    return errors


def _best(times: dict[str, float]) -> str:
    least = min(times.values())
    names = [name for name, seconds in times.items() if seconds < 1.001 * least]
    return f"{', '.join(names)} {_digits(least * 1e3)} (x{max(times.values()) / least:.1f})"


def formula(p: int, alpha: float, beta: float) -> float:
    """Bytes at which a ring and recursive doubling take equally long.

    n β (lg p - 2 (p-1)/p) = α (2 (p-1) - lg p)
    """
    lg = math.log2(p)
    return alpha * (2 * (p - 1) - lg) / (beta * (lg - 2 * (p - 1) / p))


def _crossover(other: Sum, workers: int, network: Network, near: float) -> float:
    """Bytes from which the ring takes less time than another, by bisection."""
    low, high = near / 4, near * 4
    while high / low > 1.002:
        middle = math.sqrt(low * high)
        ring, others = (simulated(add_up, workers, round(middle), network) for add_up in (ALGORITHMS["ring"], other))
        low, high = (middle, high) if ring > others else (low, middle)
    return math.sqrt(low * high)


def _simulated_split(outcome: Outcome) -> None:
    outcome.say(f"The butterfly's speed-up over one device, as a product. {_SPLIT}")
    host = networks.parse(NETWORKS[0]).hosts[0]
    for what, number in ADDING.items():
        network = Network(hosts=(Host(up=host.up, down=host.down, latency=host.latency, number=number),))
        rows = []
        for size in SIZES[2::2]:
            ways = [
                [simulated(REAL[w], workers, size, network) for w in (ONE, ONE_CHUNK, CHUNKS)] for workers in WORKERS
            ]
            rows.append([_bytes(size), *(_split(*seconds) for seconds in ways)])
        outcome.say(f"One device's time over the butterfly's, simulated on {NETWORKS[0]}, adding a number in {what}.")
        outcome.table(["vector", *(f"{workers} workers" for workers in WORKERS)], rows)


_SPLIT = (
    "The first factor is the algorithm's, with one chunk, the second that of overlapping chunks, and in brackets the "
    "first one's share of the speed-up (of its logarithm). Li, Davis and Jarvis report 9 times for 10^8 numbers in "
    "Spark, 65 % of it from the algorithm and 35 % from chunks that are serialised while others are under way."
)


def _split(one: float, chunk: float, chunks: float) -> str:
    both_gain = one > 1.01 * chunk and chunk >= chunks
    share = f" ({math.log(one / chunk) / math.log(one / chunks):.0%})" if both_gain else ""
    return f"{one / chunks:.1f} = {one / chunk:.1f} x {chunk / chunks:.2f}{share}"


# Real.


@dataclass(frozen=True, kw_only=True)
class Race(Strategy[None]):
    """Every step is a round: all algorithms in turn, on vectors of all lengths; each worker logs its seconds."""

    sizes: tuple[int, ...]

    def init(self, node: Node) -> None:
        node.g.fill_(1.0)

    def step(self, node: Node, s: None) -> None:
        names = [*REAL, "native"]
        for size in self.sizes:
            for name in names if node.steps % 2 else reversed(names):
                node.log(f"{name} {size}", self._turn(node, name, node.g[: size // 4]))
        node.steps += 1
        node.weight, node.loss = 1.0, 0.0

    def _turn(self, node: Node, name: str, x: Tensor) -> float:
        """Seconds of one mean."""
        repeat = max(1, min(100, 30_000_000 // (4 * x.numel())))
        node.comm.mean(x[:1])  # begin together
        began = time.perf_counter()
        for _ in range(repeat):
            node.comm.mean_(x) if name == "native" else mean_(node.comm, x, 1.0, REAL[name])
        return (time.perf_counter() - began) / repeat


def _real(outcome: Outcome, workers: int, rounds: int) -> None:
    result = Rounds()
    strangers, _, _ = watched(lambda: _race(result, workers, rounds))
    outcome.say(
        f"Real, {workers} processes: milliseconds of one mean, median of the rounds (least to most). Other programs "
        f"used {strangers:.0%} of the cores meanwhile. `native` is what `AllReduce` does if it is not told otherwise."
    )
    if strangers > DISTURBED:
        outcome.say("The machine was busy with other programs: these figures are worth little, and are to be repeated.")
    names = [*REAL, "native"]
    rows = []
    for size in REAL_SIZES:
        figures = {name: result[f"{name} {size}"] for name in names}
        best = min(REAL, key=lambda name: figures[name].median)
        rows.append([_bytes(size), best, *(figures[name].show(2, 1e3) for name in names)])
    outcome.table(["vector", "fastest of messages", *names], rows)
    medians = {name: [result[f"{name} {size}"].median for size in REAL_SIZES] for name in REAL}
    alpha = medians[CHUNKS][0] / math.log2(workers)
    beta = medians["ring"][-1] / REAL_SIZES[-1] / (2 * (workers - 1) / workers)
    outcome.say(
        f"The ring overtakes the butterfly {_overtaken(medians)}; by the formula, with {alpha * 1e6:.0f} µs for a "
        f"message (the butterfly of {_bytes(REAL_SIZES[0])}) and {1e-9 / beta:.2g} GB/s (the ring of "
        f"{_bytes(REAL_SIZES[-1])}), "
        + (f"from {_bytes(formula(workers, alpha, beta))}." if workers > 2 else "never: both send n bytes at once.")
    )
    splits = zip(*(medians[name] for name in (ONE, ONE_CHUNK, CHUNKS)), strict=True)
    outcome.say(f"One device's time over the butterfly's, {workers} processes, as above.")
    outcome.table([_bytes(size) for size in REAL_SIZES], [[_split(*seconds) for seconds in splits]])


def _race(result: Rounds, workers: int, rounds: int) -> list[float]:
    """Figures of every round: the slowest worker's."""
    with scratch() as folder:
        orchestra.train(
            model=partial(nn.Linear, 1, REAL_SIZES[-1] // 8),
            data=_data,
            loss=_loss,
            optimizer=partial(torch.optim.SGD, lr=1.0),
            strategy=Race(sizes=REAL_SIZES),
            cluster=orchestra.Local(workers=workers, threads=1, patience=600.0),
            batch=1,
            budget=orchestra.Steps(WARM + rounds),
            out=folder / "run",
            progress=False,
        )
        by_worker = [
            [event for event in read(folder / "run" / f"events-{rank}.jsonl") if isinstance(event, Logged)]
            for rank in range(workers)
        ]
    for turn in zip(*by_worker, strict=True):
        if turn[0].step >= WARM:
            result.add(turn[0].name, max(event.value for event in turn))
    return []


def _data() -> tuple[Tensor, Tensor]:
    return torch.zeros(1024, 1), torch.zeros(1024, 1)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def _overtaken(medians: dict[str, list[float]]) -> str:
    """Where the ratio of their times crosses one, between two lengths."""
    ratios = [math.log(b / r) for r, b in zip(medians["ring"], medians[CHUNKS], strict=True)]
    found = [
        math.exp(math.log(size) - math.log(after / size) * low / (high - low))
        for (size, after), (low, high) in zip(pairwise(REAL_SIZES), pairwise(ratios), strict=True)
        if low < 0 <= high
    ]
    return "from " + " and from ".join(map(_bytes, found)) if found else "never" if ratios[0] < 0 else "always"


def _digits(value: float) -> str:
    """Three digits, or as many as there are before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _bytes(size: float) -> str:
    """A size to three digits.

    >>> _bytes(3160), _bytes(1e8)
    ('3.16 kB', '100 MB')
    """
    unit, factor = next((u, f) for u, f in (("MB", 1e6), ("kB", 1e3), ("B", 1)) if size >= f or f == 1)
    return f"{size / factor:.3g} {unit}"


if __name__ == "__main__":
    # What travels to the workers is named by its module, which must not be __main__.
    from benchmarks import crossover

    main(crossover.measure, rounds=5)
