# SPDX-License-Identifier: Apache-2.0
"""Every all-reduce gives every worker the same bits of the weighted mean, and sends exactly what its page says."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import pytest
import torch
from tests.transports.world import World as Processes
from torch import Tensor

from orchestra.collectives import ALGORITHMS, Sum, hierarchical, mean_
from orchestra.collectives.butterfly import butterfly
from orchestra.collectives.double_tree import trees
from orchestra.collectives.volume import numbers_sent
from orchestra.core.comm import Comm
from orchestra.core.ops import Group, Handle, Op, Send
from orchestra.core.view import View
from orchestra.engine.middleware import TransportWrapper
from orchestra.worlds.simulated.kernel import Kernel
from orchestra.worlds.simulated.network import VirtualNetwork
from orchestra.worlds.simulated.networks import Host, Network
from orchestra.worlds.simulated.transport import connect

T = TypeVar("T")
LATENCY, RATE = 1e-3, 1e6  # seconds, bytes per second
HOST = Host(up=8 * RATE, down=8 * RATE, latency=LATENCY / 2)
PLAIN = Network(hosts=(HOST,))
CASES: list[tuple[str, int | None]] = [(name, None) for name in ALGORITHMS]
CASES += [("hierarchical", g) for g in (2, 3, 5, 20)]  # which leave some over for most p
every = pytest.mark.parametrize(("algorithm", "group"), CASES)


def algorithm_of(name: str, group: int | None) -> Sum:
    return ALGORITHMS[name] if group is None else partial(hierarchical, group=group)


def vectors(p: int, n: int) -> list[Tensor]:
    return [torch.randn(n, generator=torch.Generator().manual_seed(i)) for i in range(p)]


class Counting(TransportWrapper):
    """Counts messages; what a transport counts itself are bytes."""

    messages = 0

    def start(self, op: Op[T]) -> Handle[T]:
        self.messages += isinstance(op, Send)
        return self.inner.start(op)


@dataclass
class Outcome:
    seconds: float
    totals: list[float]  # of the weights, as each worker was told
    ends: list[Counting]


def carry_out(
    add_up: Sum, xs: Sequence[Tensor], weights: Sequence[float] = (), *, ties: int | None = None, on: Network = PLAIN
) -> Outcome:
    p = len(xs)
    kernel = Kernel(ties=ties)
    ends = [Counting(end) for end in connect(VirtualNetwork(kernel, on, p, p), p)]
    totals = [math.nan] * p

    def worker(r: int) -> None:
        comm = Comm(ends[r], View(0, Group(tuple(range(p))), Group(())))
        totals[r] = mean_(comm, xs[r], weights[r] if weights else 1.0, add_up)

    for r in range(p):
        kernel.spawn(f"worker {r}", partial(worker, r))
    kernel.run()
    return Outcome(kernel.now, totals, ends)


def messages_sent(algorithm: str, p: int, n: int, group: int | None) -> list[int]:
    """Messages that every worker sends, from the pages."""
    if p == 1:
        return [0]
    q = 1 << (p.bit_length() - 1)
    e, lg = p - q, q.bit_length() - 1
    match algorithm:
        case "ring":
            return [2 * (p - 1) * max(1, min(2, n // p // 16384))] * p
        case "halving_doubling" | "butterfly":
            own = 2 * lg if algorithm == "halving_doubling" else max(1, min(8, n // 16384)) * lg
            return [1, 1 + own] * e + [own] * (p - 2 * e)
        case "tree":
            below = [sum(r % (2 << k) == 0 and r + (1 << k) < p for k in range(p.bit_length())) for r in range(p)]
            return [0 + below[0], *(1 + b for b in below[1:])]
        case "double_tree":
            c = max(1, min(64, n // 2 // 16384))
            edges = [(tree[r].parent is not None) + len(tree[r].children) for tree in trees(p) for r in range(p)]
            return [c * (one + other) for one, other in zip(edges[:p], edges[p:], strict=True)]
        case "hierarchical":
            g = group or max(g for g in range(1, p + 1) if p % g == 0 and g * g <= p)
            m, found = -(-p // g), []
            for r in range(p):
                s = min(g, p - r // g * g)
                held = g // s + ((r % g + 1) % s < g % s)
                found.append(2 * (s - 1) + 2 * (m - 1) * held)
            return found
        case "one_device":
            return [p - 1, *[1] * (p - 1)]
    raise AssertionError(f"give the formula of {algorithm} here, as on its page")


@every
@pytest.mark.parametrize("n", [1, 7, 1000, 140_000])
@pytest.mark.parametrize("p", [*range(1, 10), 13, 16])
def test_the_same_mean_everywhere(algorithm: str, group: int | None, p: int, n: int) -> None:
    xs, weights = vectors(p, n), [float(i % 4) for i in range(1, p + 1)]  # some of weight zero
    expected = sum((w * x.double() for w, x in zip(weights, xs, strict=True)), torch.zeros(n).double()) / sum(weights)
    done = carry_out(algorithm_of(algorithm, group), xs, weights, ties=p)
    assert done.totals == [sum(weights)] * p
    assert all(torch.equal(x, xs[0]) for x in xs)
    assert torch.allclose(xs[0].double(), expected, atol=1e-6 * p)
    assert [end.traffic.sent // 4 for end in done.ends] == numbers_sent(algorithm, p, n, group)
    assert [end.messages for end in done.ends] == messages_sent(algorithm, p, n, group)
    assert sum(end.traffic.sent for end in done.ends) == sum(end.traffic.received for end in done.ends)


@every
@pytest.mark.parametrize("p", [2, 5, 8])
def test_real_mailboxes_hold_few_messages_and_give_the_same_bits(algorithm: str, group: int | None, p: int) -> None:
    """What is under way between two processes is bounded; in virtual time it is not."""
    n, add_up = 140_000, algorithm_of(algorithm, group)
    world, real, computed = Processes(p, numel=n), vectors(p, n), vectors(p, n)
    world.run(lambda rank, comm: [mean_(comm, real[rank], 1.0, add_up) for _ in range(3)])
    for _ in range(3):
        carry_out(add_up, computed)
    assert all(torch.equal(a, b) for a, b in zip(real, computed, strict=True))


@every
def test_nothing_to_average(algorithm: str, group: int | None) -> None:
    xs, add_up = vectors(3, 50), algorithm_of(algorithm, group)
    xs[1].fill_(math.nan)  # what has weight zero is not looked at
    assert carry_out(add_up, xs, [2.0, 0.0, 1.0]).totals == [3.0] * 3
    assert torch.isfinite(xs[1]).all()
    assert carry_out(add_up, xs, [0.0] * 3).totals == [0.0] * 3
    assert not any(x.any() for x in xs)


@pytest.mark.parametrize("gamma", [0.0, 3e-7])
@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize(
    ("algorithm", "formula"),
    [
        ("ring", lambda p, lg, n: (2 * (p - 1), 2 * (p - 1) / p * n, (p - 1) / p * n)),
        ("halving_doubling", lambda p, lg, n: (2 * lg, 2 * (p - 1) / p * n, (p - 1) / p * n)),
        ("butterfly", lambda p, lg, n: (lg, lg * n, lg * n)),
        ("tree", lambda p, lg, n: (2 * lg, lg * (lg + 3) / 2 * n, lg * n)),
        ("hierarchical", lambda p, lg, n: (2 * (2 + p / 2 - 2), 2 * (p - 1) / p * n, (p - 1) / p * n)),
        ("one_device", lambda p, lg, n: (2, 2 * (p - 1) * n, (p - 1) * n)),
    ],
)
def test_all_reduce_takes_as_long_as_its_formula(
    algorithm: str, formula: Callable[[int, float, int], tuple[float, float, float]], p: int, gamma: float
) -> None:
    """α, β and γ of the table; 2048 numbers, which travel in one chunk."""
    latencies, moved, added = formula(p, math.log2(p), 4 * 2048)
    network = Network(hosts=(Host(up=8 * RATE, down=8 * RATE, latency=LATENCY / 2, number=4 * gamma),))
    group = 2 if algorithm == "hierarchical" else None
    done = carry_out(algorithm_of(algorithm, group), vectors(p, 2048), on=network)
    assert done.seconds == pytest.approx(latencies * LATENCY + moved / RATE + added * gamma, rel=1e-9)


@pytest.mark.parametrize("p", [8, 16])
def test_both_trees_keep_all_links_full(p: int) -> None:
    """Of a long vector, in 64 chunks of each half: 2 n β, and filling and emptying the trees."""
    n = 1 << 22
    done = carry_out(ALGORITHMS["double_tree"], [torch.empty(n, device="meta") for _ in range(p)])
    least = 2 * 4 * n / RATE
    assert least < done.seconds < (1 + math.log2(p) / 64) * least + 2 * math.log2(p) * LATENCY < 1.1 * least


@pytest.mark.parametrize("p", [4, 8])
def test_chunks_of_a_butterfly_are_added_up_while_others_are_under_way(p: int) -> None:
    """Where adding takes as long as sending: nearly half the time of one chunk, which does one after the other."""
    n, network = 1 << 20, Network(hosts=(Host(up=8 * RATE, down=8 * RATE, latency=LATENCY / 2, number=4 / RATE),))
    xs = [torch.empty(n, device="meta") for _ in range(p)]
    whole = carry_out(partial(butterfly, chunks=1), xs, on=network).seconds
    least = math.log2(p) * 4 * n / RATE
    assert whole == pytest.approx(2 * least + math.log2(p) * LATENCY, rel=1e-9)
    assert least < carry_out(butterfly, xs, on=network).seconds < 1.2 * least


@pytest.mark.parametrize("p", [2, 3, 8])
@pytest.mark.parametrize("gamma", [0.0, 0.1 / RATE])
def test_pieces_of_a_ring_are_added_up_while_others_are_under_way(p: int, gamma: float) -> None:
    """Of a long vector: links are always busy, so that neither latency nor adding is seen but once, at the end."""
    n, network = 3 << 20, Network(hosts=(Host(up=8 * RATE, down=8 * RATE, latency=LATENCY / 2, number=4 * gamma),))
    done = carry_out(ALGORITHMS["ring"], [torch.empty(n, device="meta") for _ in range(p)], on=network)
    assert done.seconds == pytest.approx(2 * (p - 1) / p * 4 * n / RATE + LATENCY, rel=1e-9)


# Racks of 4 hosts, whose links to each other are `times` too small for them.


def seconds_on_racks(add_up: Sum, n: int, times: float) -> float:
    racks = Network(hosts=(HOST,), rack=4, oversubscription=times)
    return carry_out(add_up, [torch.empty(n, device="meta") for _ in range(8)], on=racks).seconds


@pytest.mark.parametrize(("n", "times", "wins"), [(1 << 20, 16, True), (1 << 20, 4, False), (1 << 10, 4, True)])
def test_groups_that_are_racks_pay_where_their_page_says(n: int, times: float, wins: bool) -> None:
    p, g, m, moved = 8, 4, 2, 4 * n / RATE
    grouped = seconds_on_racks(partial(hierarchical, group=g), n, times)
    ring = seconds_on_racks(ALGORITHMS["ring"], n, times)
    across = 2 * (m - 1) * (LATENCY + moved / m / g * times)
    assert grouped == pytest.approx(2 * (g - 1) * (LATENCY + moved / g) + across, rel=1e-9)
    # Behind a slow link messages queue up, and their latencies overlap; so do those of the two pieces of a long chunk.
    latencies = LATENCY if n > 1 << 18 else 2 * (p - 1) * LATENCY
    assert ring == pytest.approx(2 * (p - 1) * moved / p * times / g + latencies, rel=1e-3)
    assert (grouped < ring) == wins


@pytest.mark.parametrize("g", [1, 2, 3, 8])
def test_of_all_groups_racks_are_best_where_the_links_between_them_are_the_limit(g: int) -> None:
    n, times = 1 << 20, 32
    assert seconds_on_racks(partial(hierarchical, group=4), n, times) < seconds_on_racks(
        partial(hierarchical, group=g), n, times
    )


@pytest.mark.parametrize("p", range(2, 20))
def test_no_worker_is_an_inner_node_of_both_trees(p: int) -> None:
    a, b = trees(p)
    for tree in (a, b):
        assert sorted(tree) == list(range(p))
        assert sum(place.parent is None for place in tree.values()) == 1
        assert all(tree[child].parent == worker for worker, place in tree.items() for child in place.children)
    assert not any(a[worker].children and b[worker].children for worker in range(p))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_low_precision_does_not_overflow(algorithm: str) -> None:
    """64 samples a worker: a weighted sum of these would be infinite in half precision."""
    p, world = 4, Kernel()
    ends = connect(VirtualNetwork(world, PLAIN, p, p), p)
    xs = [torch.full((9,), 3000.0, dtype=torch.float16) for _ in range(p)]

    def worker(r: int) -> None:
        comm = Comm(ends[r], View(0, Group(tuple(range(p))), Group(())))
        mean_(comm, xs[r], 64.0, ALGORITHMS[algorithm], most=64.0)

    for r in range(p):
        world.spawn(f"worker {r}", partial(worker, r))
    world.run()
    assert all(torch.equal(x, torch.full((9,), 3000.0, dtype=torch.float16)) for x in xs)
