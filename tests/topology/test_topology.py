# SPDX-License-Identifier: Apache-2.0
"""Who is which node, by what the connections can do."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestra.worlds.sockets.link_probe import rounds
from orchestra.worlds.sockets.rank_order import MeasuredLinks, arrange, length, ring


def between_places(size: int, seed: int) -> list[list[float]]:
    """Seconds between machines somewhere on a map."""
    draw = random.Random(seed)
    places = [(draw.random(), draw.random()) for _ in range(size)]
    return [[((a - c) ** 2 + (b - d) ** 2) ** 0.5 for c, d in places] for a, b in places]


@settings(deadline=None, max_examples=60)
@given(size=st.integers(4, 7), seed=st.integers(0, 10**6))
def test_the_ring_is_nearly_the_shortest_there_is(size: int, seed: int) -> None:
    cost = between_places(size, seed)
    way = ring(cost, range(size))
    shortest = min(length(cost, (0, *rest)) for rest in itertools.permutations(range(1, size)))
    assert way[0] == 0
    assert sorted(way) == list(range(size))
    assert length(cost, way) <= 1.05 * shortest


def test_machines_of_one_site_are_neighbours() -> None:
    """Two sites, told in turns: a ring crosses between them twice, not eight times."""
    cost = [[0.0 if i == j else 0.001 if i % 2 == j % 2 else 0.05 for j in range(8)] for i in range(8)]
    way = arrange(cost, servers=0)
    crossings = sum((a - b) % 2 for a, b in zip(way, [*way[1:], way[0]], strict=True))
    assert crossings == 2


def test_servers_are_where_everything_passes_fastest() -> None:
    rate = {0: 1e6, 1: 1e7, 2: 1e6, 3: 1e7, 4: 1e6}
    links = MeasuredLinks(
        tuple((1e-3,) * 5 for _ in range(5)),
        tuple(tuple(min(rate[i], rate[j]) for j in range(5)) for i in range(5)),
    )
    assert arrange(links.cost(1e5), servers=2) == [0, 2, 4, 1, 3]
    assert arrange(links.cost(1e5), servers=1)[-1] in (1, 3)


def test_process_0_is_never_a_server() -> None:
    cost = [[0.0 if i == j else 1e-3 if 0 in (i, j) else 1.0 for j in range(4)] for i in range(4)]
    assert arrange(cost, servers=3)[0] == 0


@given(st.integers(2, 24))
def test_every_pair_meets_once(size: int) -> None:
    met = [pair for pairs in rounds(size) for pair in pairs]
    assert sorted(met) == list(itertools.combinations(range(size), 2))
    for pairs in rounds(size):
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy))
