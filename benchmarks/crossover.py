# SPDX-License-Identifier: Apache-2.0
"""Which all-reduce is fastest, by the length of the vector and the number of workers?"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from benchmarks.common import Outcome, main
from orchestra.collectives import ALGORITHMS, Sum, mean_
from orchestra.collectives.butterfly import butterfly
from orchestra.core.comm import Comm
from orchestra.core.ops import Group
from orchestra.core.view import View
from orchestra.worlds.simulated import networks
from orchestra.worlds.simulated.kernel import Kernel
from orchestra.worlds.simulated.network import VirtualNetwork
from orchestra.worlds.simulated.networks import Network
from orchestra.worlds.simulated.transport import connect

NETWORKS = ("10gbit,50us", "100mbit,1ms")
WORKERS = (4, 8, 16, 64)
SIZES = tuple(round(10 ** (3 + i / 2)) // 4 * 4 for i in range(11))  # bytes, 1 kB to 100 MB
ONE_CHUNK = "butterfly, one chunk"
CHUNKS = "butterfly"
WAYS: dict[str, Sum] = ALGORITHMS | {ONE_CHUNK: partial(butterfly, chunks=1)}


def measure(rounds: int) -> Outcome:
    """Simulations of every algorithm, which need no rounds: virtual time is the same on every machine."""
    outcome = Outcome(
        "All-reduce: which algorithm when",
        "Virtual seconds of one mean without numbers, the same on every machine.",
    )
    errors = [error for network in NETWORKS for error in _winners(outcome, network)]
    outcome.goal(
        "simulated crossovers of the ring and the butterfly in one chunk within 1 % of the formula", max(errors) <= 0.01
    )
    return outcome


def simulated(add_up: Sum, workers: int, nbytes: int, network: Network) -> float:
    """Virtual seconds of one mean."""
    kernel = Kernel()
    ends, group = connect(VirtualNetwork(kernel, network, workers, workers), workers), Group(tuple(range(workers)))
    for end in ends:
        x = torch.empty(nbytes // 4, device="meta")
        kernel.spawn(f"worker {end.rank}", partial(_average, Comm(end, View(0, group, Group(()))), x, add_up))
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
        whole, chunked = (_crossover(WAYS[name], workers, network, expected) for name in (ONE_CHUNK, CHUNKS))
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
    main(measure, rounds=1)
