# SPDX-License-Identifier: Apache-2.0
"""Every all-reduce gives every worker the same bits of the weighted mean, and sends exactly what its page says."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tests.laws.examples import numbers_sent
from torch import Tensor

from orchestra.collectives import ALGORITHMS, mean_
from orchestra.collectives.double_tree import trees
from orchestra.networks import Host, Network
from orchestra.node import Comm
from orchestra.ops import Group
from orchestra.sim.kernel import Kernel
from orchestra.sim.transport import SimTransport, connect
from orchestra.sim.world import World

LATENCY, RATE = 1e-3, 1e6  # seconds, bytes per second
every = pytest.mark.parametrize("algorithm", ALGORITHMS)


def vectors(p: int, n: int) -> list[Tensor]:
    return [torch.randn(n, generator=torch.Generator().manual_seed(i)) for i in range(p)]


def carry_out(
    algorithm: str, xs: list[Tensor], weights: list[float], ties: int | None = None
) -> tuple[float, list[float], list[SimTransport]]:
    """Seconds, what each worker was told of the weights, and what was sent."""
    p = len(xs)
    kernel = Kernel(ties=ties)
    network = Network(hosts=(Host(up=8 * RATE, down=8 * RATE, latency=LATENCY / 2),))
    ends = connect(World(kernel, network, p, p), p)
    totals = [math.nan] * p

    def worker(r: int) -> Callable[[], None]:
        def body() -> None:
            comm = Comm(ends[r], Group(tuple(range(p))), Group(()))
            totals[r] = mean_(comm, xs[r], weights[r], ALGORITHMS[algorithm])

        return body

    for r in range(p):
        kernel.spawn(f"worker {r}", worker(r))
    kernel.run()
    return kernel.now, totals, ends


@every
@pytest.mark.parametrize("n", [1, 7, 1000, 40_000])
@pytest.mark.parametrize("p", [*range(1, 10), 13, 16])
def test_the_same_mean_everywhere(algorithm: str, p: int, n: int) -> None:
    xs, weights = vectors(p, n), [float(i % 4) for i in range(1, p + 1)]  # some of weight zero
    expected = sum((w * x.double() for w, x in zip(weights, xs, strict=True)), torch.zeros(n).double()) / sum(weights)
    _, totals, ends = carry_out(algorithm, xs, weights, ties=p)
    assert totals == [sum(weights)] * p
    assert all(torch.equal(x, xs[0]) for x in xs)
    assert torch.allclose(xs[0].double(), expected, atol=1e-6 * p)
    assert [end.traffic.sent // 4 for end in ends] == numbers_sent(algorithm, p, n)
    assert sum(end.traffic.sent for end in ends) == sum(end.traffic.received for end in ends)


@every
def test_nothing_to_average(algorithm: str) -> None:
    xs = vectors(3, 50)
    xs[1].fill_(math.nan)  # what has weight zero is not looked at
    _, totals, _ = carry_out(algorithm, xs, [2.0, 0.0, 1.0])
    assert totals == [3.0] * 3
    assert torch.isfinite(xs[1]).all()
    _, totals, _ = carry_out(algorithm, xs, [0.0] * 3)
    assert totals == [0.0] * 3
    assert not any(x.any() for x in xs)


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize(
    ("algorithm", "formula"),
    [
        ("ring", lambda p, s: 2 * (p - 1) * (LATENCY + s / p / RATE)),
        ("halving_doubling", lambda p, s: 2 * math.log2(p) * LATENCY + 2 * (p - 1) / p * s / RATE),
        ("butterfly", lambda p, s: math.log2(p) * (LATENCY + s / RATE)),
        ("tree", lambda p, s: 2 * math.log2(p) * LATENCY + math.log2(p) * (math.log2(p) + 3) / 2 * s / RATE),
        ("one_device", lambda p, s: 2 * (LATENCY + (p - 1) * s / RATE)),
    ],
)
def test_it_takes_as_long_as_its_page_says(algorithm: str, formula: Callable[[int, float], float], p: int) -> None:
    seconds, _, _ = carry_out(algorithm, vectors(p, 2048), [1.0] * p)
    assert seconds == pytest.approx(formula(p, 4 * 2048), rel=1e-9)


def test_chunks_overlap() -> None:
    """Of a long vector both trees and all stages are busy at once: far less than one chunk after the other."""
    size = 4 * 400_000
    seconds, _, _ = carry_out("double_tree", vectors(8, 400_000), [1.0] * 8)
    alone, _, _ = carry_out("tree", vectors(8, 400_000), [1.0] * 8)
    assert seconds < 4.1 * size / RATE < 0.5 * alone


@pytest.mark.parametrize("p", range(2, 20))
def test_hardly_anybody_is_inside_both_trees(p: int) -> None:
    a, b = trees(p)
    for tree in (a, b):
        assert sorted(tree) == list(range(p))
        assert sum(place.above is None for place in tree.values()) == 1
        assert all(tree[child].above == worker for worker, place in tree.items() for child in place.below)
    assert sum(bool(a[worker].below) and bool(b[worker].below) for worker in range(p)) <= 1
