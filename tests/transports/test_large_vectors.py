# SPDX-License-Identifier: Apache-2.0
"""Vectors so large that the work of a mean is shared out, and that messages are read in the sender's own memory."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.transports.world import World, vectors
from torch import Tensor

from orchestra.core import vectors as cuts
from orchestra.core.comm import Comm
from orchestra.core.ops import Handle, MeanUpdate
from orchestra.core.vectors import is_small, weighted_mean
from orchestra.strategies.parameter_server.consistency import bulk

# Just past the limit for three workers, and sizes that neither the workers nor a cache line divides.
EDGE = (1 << 18) // 3 + 1
SIZES = [(2, 131_073), (3, EDGE), (3, 100_003), (5, 70_001)]
NAN = float("nan")


def test_these_sizes_are_large() -> None:
    assert not any(is_small(numel, workers) for workers, numel in SIZES)
    assert is_small(EDGE - 1, 3)
    assert all(numel % workers or numel % 64 for workers, numel in SIZES)


# Means.


@pytest.mark.parametrize("inside", [True, False], ids=["resident", "elsewhere"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("workers", "numel"), [*SIZES, (3, EDGE - 1)])
def test_mean_is_that_of_numpy(workers: int, numel: int, dtype: torch.dtype, inside: bool) -> None:
    world = World(workers, numel=numel, dtype=dtype)
    given = vectors(workers, numel, dtype)
    # With different weights, with one that is zero and a vector that must not be read, with a single one, with none.
    rounds = [[1.0, 3.0, 32.0, 5.0, 2.0], [4.0, 0.0, 1.0, 0.0, 3.0], [0.0, 6.0, 0.0, 0.0, 0.0], [0.0] * 5]

    def life(rank: int, comm: Comm) -> list[tuple[Tensor, float]]:
        found = []
        for weights in rounds:
            x = world.x(rank) if inside else torch.empty(numel, dtype=dtype)
            x.copy_(given[rank]) if weights[rank] else x.fill_(NAN)
            total = comm.mean_(x, weight=weights[rank])
            found.append((x.clone(), total))
        return found

    by_rank = world.run(life)
    close = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 3e-2}[dtype]
    matrix = np.stack([v.double().numpy() for v in given])
    for i, weights in enumerate(w[:workers] for w in rounds):
        for x, total in (found[i] for found in by_rank):
            assert total == sum(weights)
            if any(weights):
                assert torch.equal(x, by_rank[0][i][0])
                exact = np.average(matrix, axis=0, weights=weights)
                np.testing.assert_allclose(x.double().numpy(), exact, rtol=close, atol=close)
            else:
                assert bool(x.isnan().all())  # as it was


def test_a_mean_of_a_part_of_the_model() -> None:
    """A view into a vector that all map is found where it lies."""
    numel, start, stop = 150_001, 1_003, 140_000
    world = World(2, numel=numel)

    def life(rank: int, comm: Comm) -> Tensor:
        x = world.x(rank)
        x.copy_(torch.arange(numel) + rank)
        comm.mean_(x[start:stop])
        return x.clone()

    for rank, x in enumerate(world.run(life)):
        expected = torch.arange(numel) + float(rank)
        expected[start:stop] = torch.arange(start, stop) + 0.5
        assert torch.equal(x, expected)


def test_many_means_in_a_row_do_not_mix() -> None:
    workers, numel = 3, EDGE
    world = World(workers, numel=numel)

    def life(rank: int, comm: Comm) -> bool:
        draw = random.Random(rank)
        x = world.x(rank)
        for i in range(80):
            x.fill_(float(rank + i))
            if draw.random() < 0.1:
                time.sleep(0.003 * draw.random())
            comm.mean_(x)
            if float((x - (i + 1)).abs().max()) > 1e-3:
                return False
        return True

    assert all(world.run(life))


def test_anything_in_any_order_agrees_with_numpy() -> None:
    """Large and small, resident and not, means, broadcasts and gathers: nothing reads what another one left."""
    workers, numel, few = 3, 90_001, 37
    world = World(workers, numel=numel)
    draw = random.Random(7)
    kinds = ("mean", "mean", "broadcast", "gather")
    plan = [(draw.choice(kinds), draw.random() < 0.6, draw.random() < 0.5, draw.randrange(workers)) for _ in range(90)]
    scales = np.random.default_rng(3).integers(-8, 9, size=(len(plan), workers)).astype(np.float64)
    weights = np.random.default_rng(4).integers(0, 4, size=(len(plan), workers)).astype(np.float64)
    pattern = torch.arange(numel, dtype=torch.float32) / numel

    def life(rank: int, comm: Comm) -> None:
        chance = random.Random(100 + rank)
        elsewhere = torch.empty(numel)
        kept: list[tuple[Tensor, Tensor]] = []
        for i, (kind, large, inside, root) in enumerate(plan):
            n = numel if large else few
            x = (world.x(rank) if inside else elsewhere)[:n]
            torch.mul(pattern[:n], float(scales[i, rank]), out=x)
            before = x.clone()
            if chance.random() < 0.2:
                time.sleep(0.003 * chance.random())
            if kind == "mean":
                total = comm.mean_(x, weight=float(weights[i, rank]))
                assert total == weights[i].sum()
                factor = np.average(scales[i], weights=weights[i]) if total else scales[i, rank]
                np.testing.assert_allclose(x.numpy(), pattern[:n].numpy() * factor, rtol=1e-5, atol=1e-6)
            elif kind == "broadcast":
                comm.broadcast_(x, root=root)
                assert torch.equal(x, pattern[:n] * float(scales[i, root]))
            else:
                found = comm.gather(x)
                kept += [(g, pattern[:n] * float(s)) for g, s in zip(found, scales[i], strict=True)]
                assert torch.equal(x, before)
        assert all(torch.equal(got, expected) for got, expected in kept)  # copies: nothing has written into them since

    world.run(life)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "apart"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_mean_update_is_mean_and_update(shared: bool, workers: int) -> None:
    numel = 132_007
    world = World(workers, numel=numel, shared_x=shared)
    gradients = vectors(workers, numel, torch.float32)
    rounds = [[1.0, 2.0, 3.0], [5.0, 0.0, 1.0], [0.0, 0.0, 0.0], [2.0, 2.0, 2.0]]
    start = torch.arange(numel) / numel
    for rank in range(workers):
        world.x(rank).copy_(start)

    def life(rank: int, comm: Comm) -> Tensor:
        x, g = world.x(rank), world.arenas[rank].vector("g", rank)
        mine = x[cuts.ranges(numel, workers)[rank]]

        def step(mean: Tensor) -> None:
            mine.sub_(mean, alpha=0.5)

        for weights in rounds:
            g.copy_(gradients[rank]) if weights[rank] else g.fill_(NAN)
            comm.transport.start(MeanUpdate(x, g, comm.workers, weights[rank], step)).wait()
        return x.clone()

    expected = start.clone()
    for weights in (w[:workers] for w in rounds):
        if any(weights):
            mean = torch.empty(numel)
            weighted_mean(mean, gradients, weights)
            expected.sub_(mean, alpha=0.5)
    for x in world.run(life):
        assert torch.equal(x, expected)


def test_bytes_of_a_large_mean() -> None:
    workers, numel = 3, 100_003
    world = World(workers, numel=numel)

    def life(rank: int, comm: Comm) -> tuple[int, int]:
        comm.mean_(torch.zeros(numel))
        return comm.transport.traffic.sent, comm.transport.traffic.received

    counted = world.run(life)
    assert sum(sent for sent, _ in counted) == sum(received for _, received in counted) == 2 * (workers - 1) * 4 * numel


# Messages.


def lend(comm: Comm, x: Tensor, i: int) -> Handle[None] | None:
    return comm.start_send(1, x, version=i, weight=i / 2)


def send(comm: Comm, x: Tensor, i: int) -> Handle[None] | None:
    comm.send(1, x, version=i, weight=i / 2)
    return None


@pytest.mark.parametrize("inside", [True, False], ids=["resident", "elsewhere"])
@pytest.mark.parametrize("way", [lend, send], ids=["lent", "copied"])
@pytest.mark.parametrize("numel", [65_537, 270_001])
def test_messages_keep_their_order_and_content(
    way: Callable[[Comm, Tensor, int], Handle[None] | None], inside: bool, numel: int
) -> None:
    """What is lent stays until it was read; what was sent may change at once."""
    world = World(1, servers=1, numel=numel)
    count = 25
    pattern = torch.arange(numel, dtype=torch.float32) / numel

    def life(rank: int, comm: Comm) -> list[tuple[int, float, bool]]:
        if rank == 0:
            x = world.x(0) if inside else torch.empty(numel)
            for i in range(count):
                torch.mul(pattern, float(i), out=x)
                handle = way(comm, x, i)
                if handle is not None:
                    handle.wait()
                x.fill_(NAN)
            comm.leave()
            return []
        found = []
        for message in comm.inbox():
            if message.version % 5 == 0:
                time.sleep(0.003)  # long enough for the sender to spoil it, if it may go on
            found.append((message.version, message.weight, torch.equal(message.x, pattern * message.version)))
        return found

    assert world.run(life)[1] == [(i, i / 2, True) for i in range(count)]


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_pushes_and_pulls_of_a_large_model(servers: int) -> None:
    """As a parameter server does it: ranges of g are lent to all servers at once, x is lent to all workers at once."""
    workers, numel, rounds = 2, 270_001, 12
    world = World(workers, servers=servers, numel=numel)
    parts = cuts.ranges(numel, servers)

    def life(rank: int, comm: Comm) -> bool:
        if rank < workers:
            g, pulled = world.arenas[rank].vector("g", rank), torch.empty(numel)
            for i in range(rounds):
                g.copy_(torch.arange(numel) % 7 + rank + i)
                pushed = [
                    comm.start_send(s, g[part], version=i) for s, part in zip(comm.servers.members, parts, strict=True)
                ]
                for server, part in zip(comm.servers.members, parts, strict=True):
                    pulled[part].copy_(comm.recv(server).x)
                for handle in pushed:
                    handle.wait()
                if not torch.equal(pulled, torch.arange(numel) % 7 + 0.5 + i):
                    return False
            comm.leave()
            return True
        part = parts[rank - workers]
        x = world.arenas[rank].vector("x", rank, part.stop - part.start)
        for pushes in bulk.rounds(comm):
            weighted_mean(x, [push.x for push in pushes], [1.0] * len(pushes))
            for push in pushes:
                comm.start_send(push.source, x)
        return True

    assert all(world.run(life))
