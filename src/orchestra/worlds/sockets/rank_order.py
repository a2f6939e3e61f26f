# SPDX-License-Identifier: Apache-2.0
"""Which process of a run should be which node, by what their connections can do.

    cost(i, j)    seconds that a part of the model takes between i and j: latency and bytes / rate, the slower way
    servers       those for whom Σ_j cost(i, j) is least: everything passes them
    ring          a short way round the others: from every start to the nearest that is left, then turned wherever two
                  edges cross (2-opt), the shortest of these

Process 0 keeps the run folder and is always worker 0. A travelling salesman wants no more than that here: a ring is as
slow as what it passes, and the heuristic is within a few per cent of the best for as many machines as anybody has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Cost = Sequence[Sequence[float]]  # seconds from each process to each other


@dataclass(frozen=True)
class MeasuredLinks:
    """What was measured between processes."""

    latency: tuple[tuple[float, ...], ...]  # seconds, one way
    rate: tuple[tuple[float, ...], ...]  # bytes a second

    def cost(self, nbytes: float) -> list[list[float]]:
        """Seconds from each to each other, the slower way of the two."""
        size = range(len(self.latency))

        def one_way(i: int, j: int) -> float:
            return self.latency[i][j] + nbytes / self.rate[i][j]

        return [[0.0 if i == j else max(one_way(i, j), one_way(j, i)) for j in size] for i in size]


def arrange(cost: Cost, servers: int) -> list[int]:
    """The process of every node: worker 0 first, the other workers along the ring, then the servers.

    >>> near, far = 0.001, 0.1  # two sites, 0 and 2, 1 and 3
    >>> arrange([[0, far, near, far], [far, 0, far, near], [near, far, 0, far], [far, near, far, 0]], servers=0)
    [0, 2, 1, 3]
    """
    others = sorted(range(1, len(cost)), key=lambda i: (sum(cost[i]), i))
    chosen = sorted(others[:servers])
    workers = [0, *sorted(others[servers:])]
    return [*ring(cost, workers), *chosen]


def ring(cost: Cost, members: Sequence[int]) -> list[int]:
    """A short way round, beginning with the first member."""
    if len(members) < 4:
        return list(members)
    ways = [_untangled(cost, _nearest_first(cost, members, start)) for start in members]
    best = min([_untangled(cost, list(members)), *ways], key=lambda way: length(cost, way))
    at = best.index(members[0])
    return best[at:] + best[:at]


def length(cost: Cost, way: Sequence[int]) -> float:
    """Once round."""
    return sum(cost[a][b] for a, b in zip(way, [*way[1:], way[0]], strict=True))


def _nearest_first(cost: Cost, members: Sequence[int], start: int) -> list[int]:
    way, left = [start], [m for m in members if m != start]
    while left:
        nearest = min(left, key=lambda m: (cost[way[-1]][m], m))
        left.remove(nearest)
        way.append(nearest)
    return way


def _untangled(cost: Cost, way: list[int]) -> list[int]:
    """Turn a piece of the way around for as long as that makes it shorter."""
    improved = True
    while improved:
        improved = False
        for i in range(1, len(way) - 1):
            for j in range(i + 1, len(way)):
                a, b, c, d = way[i - 1], way[i], way[j], way[(j + 1) % len(way)]
                if cost[a][c] + cost[b][d] < cost[a][b] + cost[c][d] - 1e-12:
                    way[i : j + 1] = reversed(way[i : j + 1])
                    improved = True
    return way


def describe(order: Sequence[int], workers: int, links: MeasuredLinks | None) -> str:
    """In a line, for people."""
    way = " → ".join(map(str, order[:workers]))
    servers = f"; servers are {', '.join(map(str, order[workers:]))}" if len(order) > workers else ""
    if links is None:
        return f"processes {way}{servers}"
    pairs = [(i, j) for i in range(len(order)) for j in range(len(order)) if i != j]
    latencies, rates = [links.latency[i][j] * 1e3 for i, j in pairs], [links.rate[i][j] * 8e-6 for i, j in pairs]
    return (
        f"processes {way}{servers}, as connections have {min(latencies):.2g} to {max(latencies):.2g} ms "
        f"and {min(rates):.3g} to {max(rates):.3g} Mbit/s (--order given leaves them as they were started)"
    )
