# SPDX-License-Identifier: Apache-2.0
"""Which process of a run becomes which node, by the speed of their connections.

    cost(i, j)    seconds that a part of the model takes between i and j: latency and bytes / rate, the slower direction
    servers       the processes i of least Σ_j cost(i, j): all traffic passes through them
    ring          a short cycle through the others: from every start, always on to the nearest that is left, improved by
                  reversing pieces (2-opt); the shortest of these

Process 0 keeps the run folder and is always worker 0. Finding the best cycle is the travelling salesman's problem; this
heuristic is within a few per cent of the best for as many machines as runs have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Cost = Sequence[Sequence[float]]  # seconds from each process to each other


@dataclass(frozen=True)
class MeasuredLinks:
    """Latencies and rates measured between processes."""

    latency: tuple[tuple[float, ...], ...]  # seconds, one way
    rate: tuple[tuple[float, ...], ...]  # bytes a second

    def cost(self, nbytes: float) -> list[list[float]]:
        """Return the seconds that `nbytes` take between each pair, in the slower direction."""
        size = range(len(self.latency))

        def one_way(i: int, j: int) -> float:
            return self.latency[i][j] + nbytes / self.rate[i][j]

        return [[0.0 if i == j else max(one_way(i, j), one_way(j, i)) for j in size] for i in size]


def arrange(cost: Cost, servers: int) -> list[int]:
    """Return the process of every node: worker 0 first, the other workers along the ring, then the servers.

    >>> near, far = 0.001, 0.1  # two sites, 0 and 2, 1 and 3
    >>> arrange([[0, far, near, far], [far, 0, far, near], [near, far, 0, far], [far, near, far, 0]], servers=0)
    [0, 2, 1, 3]
    """
    others = sorted(range(1, len(cost)), key=lambda i: (sum(cost[i]), i))
    chosen = sorted(others[:servers])
    workers = [0, *sorted(others[servers:])]
    return [*ring(cost, workers), *chosen]


def ring(cost: Cost, members: Sequence[int]) -> list[int]:
    """Return a short cycle through the members, beginning with the first."""
    if len(members) < 4:
        return list(members)
    cycles = [_improved(cost, _nearest_first(cost, members, start)) for start in members]
    best = min([_improved(cost, list(members)), *cycles], key=lambda cycle: length(cost, cycle))
    at = best.index(members[0])
    return best[at:] + best[:at]


def length(cost: Cost, cycle: Sequence[int]) -> float:
    """Return the cost of a cycle."""
    return sum(cost[a][b] for a, b in zip(cycle, [*cycle[1:], cycle[0]], strict=True))


def _nearest_first(cost: Cost, members: Sequence[int], start: int) -> list[int]:
    cycle, left = [start], [m for m in members if m != start]
    while left:
        nearest = min(left, key=lambda m: (cost[cycle[-1]][m], m))
        left.remove(nearest)
        cycle.append(nearest)
    return cycle


def _improved(cost: Cost, cycle: list[int]) -> list[int]:
    """Reverse pieces of a cycle for as long as that makes it shorter (2-opt)."""
    improved = True
    while improved:
        improved = False
        for i in range(1, len(cycle) - 1):
            for j in range(i + 1, len(cycle)):
                a, b, c, d = cycle[i - 1], cycle[i], cycle[j], cycle[(j + 1) % len(cycle)]
                if cost[a][c] + cost[b][d] < cost[a][b] + cost[c][d] - 1e-12:
                    cycle[i : j + 1] = reversed(cycle[i : j + 1])
                    improved = True
    return cycle


def describe(order: Sequence[int], workers: int, links: MeasuredLinks | None) -> str:
    """Describe an order in one line, for messages."""
    cycle = " → ".join(map(str, order[:workers]))
    servers = f"; servers are {', '.join(map(str, order[workers:]))}" if len(order) > workers else ""
    if links is None:
        return f"processes {cycle}{servers}"
    pairs = [(i, j) for i in range(len(order)) for j in range(len(order)) if i != j]
    latencies, rates = [links.latency[i][j] * 1e3 for i, j in pairs], [links.rate[i][j] * 8e-6 for i, j in pairs]
    return (
        f"processes {cycle}{servers}, as connections have {min(latencies):.2g} to {max(latencies):.2g} ms "
        f"and {min(rates):.3g} to {max(rates):.3g} Mbit/s (--order given leaves them as they were started)"
    )
