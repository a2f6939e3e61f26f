# SPDX-License-Identifier: Apache-2.0
"""The shared memory between nodes. Here every node is a thread: the memory and the waiting are the same."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.transports.world import DTYPES, World, vectors
from torch import Tensor

from orchestra.core.comm import Comm
from orchestra.core.ops import MeanUpdate, Sleep
from orchestra.core.vectors import LARGE, ranges, split, weighted_mean
from orchestra.engine.middleware import Metered
from orchestra.errors import Stalled
from orchestra.strategies.parameter_server.consistency.bulk import rounds
from orchestra.worlds.shared_memory.layout import ABORT
from orchestra.worlds.shared_memory.waiting import Aborted

# Means.


@given(
    workers=st.integers(1, 5),
    numel=st.integers(1, 200),
    dtype=st.sampled_from(DTYPES),
    inside=st.booleans(),
    weights=st.lists(st.sampled_from([0.0, 1.0, 3.0, 32.0]), min_size=5, max_size=5),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_mean_is_that_of_numpy(
    workers: int, numel: int, dtype: torch.dtype, inside: bool, weights: list[float], seed: int
) -> None:
    world = World(workers, numel=numel, dtype=dtype)
    given_vectors = vectors(workers, numel, dtype, seed)
    weights = weights[:workers]

    def life(rank: int, comm: Comm) -> tuple[Tensor, float]:
        x = world.x(rank) if inside else torch.empty(numel, dtype=dtype)
        x.copy_(given_vectors[rank])
        total = comm.mean_(x, weight=weights[rank])
        return x.clone(), total

    results = world.run(life)
    assert all(total == sum(weights) for _, total in results)
    if not any(weights):
        for (x, _), before in zip(results, given_vectors, strict=True):
            assert torch.equal(x, before)
        return
    exact = np.average(np.stack([v.double().numpy() for v in given_vectors]), axis=0, weights=weights)
    close = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 3e-2, torch.float16: 3e-3}[dtype]
    for x, _ in results:
        assert torch.equal(x, results[0][0])
        np.testing.assert_allclose(x.double().numpy(), exact, rtol=close, atol=close)


def test_a_vector_of_weight_zero_is_not_even_read() -> None:
    world = World(3)

    def life(rank: int, comm: Comm) -> Tensor:
        x = torch.full((64,), float("nan") if rank == 1 else float(rank))
        comm.mean_(x, weight=0.0 if rank == 1 else 1.0)
        return x

    for x in world.run(life):
        assert torch.equal(x, torch.ones(64))


def test_sums_run_in_rank_order() -> None:
    """1e8 + 1 - 1e8 is 0 or 1 in float32, by the order in which it is added."""
    world = World(3, numel=3)
    values = [1e8, 1.0, -1e8]

    def life(rank: int, comm: Comm) -> Tensor:
        found = []
        for delays in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
            time.sleep(0.01 * delays[rank])
            found.append(comm.mean(torch.full((3,), values[rank])))
        return torch.stack(found)

    first, *others = world.run(life)
    assert (first == first[0]).all()
    for other in others:
        assert torch.equal(other, first)


def test_many_means_in_a_row_do_not_mix() -> None:
    world = World(4, numel=17)

    def life(rank: int, comm: Comm) -> bool:
        for i in range(300):
            x = comm.mean(torch.full((17,), float(rank + i)))
            if not torch.equal(x, torch.full((17,), i + 1.5)):
                return False
        return True

    assert all(world.run(life))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_mean_update_is_mean_and_update(shared: bool, workers: int) -> None:
    numel = 23
    world = World(workers, numel=numel, shared_x=shared)
    gradients = vectors(workers, numel, torch.float32)
    weights = [float(r + 1) for r in range(workers)]
    world.x(0).copy_(torch.arange(numel))
    for rank in range(workers):
        world.x(rank).copy_(torch.arange(numel))

    def life(rank: int, comm: Comm) -> Tensor:
        x, g = world.x(rank), world.arenas[rank].vector("g", rank)
        mine = x[split(numel, workers)[rank]]

        def step(mean: Tensor) -> None:
            mine.sub_(mean, alpha=0.5)

        for _ in range(3):
            g.copy_(gradients[rank])
            op = MeanUpdate(x, g, comm.workers, weights[rank], step)
            comm.transport.start(op).wait()
        return x.clone()

    mean = torch.empty(numel)
    weighted_mean(mean, gradients, weights)
    for x in world.run(life):
        torch.testing.assert_close(x, torch.arange(numel) - 1.5 * mean)


def test_weighted_mean_may_write_over_an_operand() -> None:
    for target in range(3):
        given_vectors = vectors(3, 70_000, torch.float32)
        expected = torch.empty(70_000)
        weighted_mean(expected, given_vectors, [1, 2, 5])
        weighted_mean(given_vectors[target], given_vectors, [1, 2, 5])
        assert torch.equal(given_vectors[target], expected)


lengths = st.one_of(st.integers(0, 300), st.integers(60_000, 70_000), st.integers(10**6, 10**6 + 200))


@given(length=lengths, parts=st.integers(1, 40))
@settings(deadline=None)
def test_split_covers_everything_once_and_exactly_evenly(length: int, parts: int) -> None:
    slices = split(length, parts)
    assert [s.start for s in slices] == [0, *(s.stop for s in slices[:-1])]
    assert slices[-1].stop == length
    sizes = [s.stop - s.start for s in slices]
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1


@given(length=lengths, parts=st.integers(1, 40))
@settings(deadline=None)
def test_ranges_of_long_vectors_are_cut_at_cache_lines(length: int, parts: int) -> None:
    slices = ranges(length, parts)
    assert [s.start for s in slices] == [0, *(s.stop for s in slices[:-1])]
    assert slices[-1].stop == length
    assert len(slices) == parts
    if length < LARGE:
        assert slices == split(length, parts)
    else:
        assert all(s.start % 64 == 0 for s in slices)
        sizes = [s.stop - s.start for s in slices]
        assert max(sizes) - min(sizes) <= 64 + 63


# Broadcast, gather.


def test_broadcast_and_gather() -> None:
    world = World(3, numel=5)

    def life(rank: int, comm: Comm) -> tuple[Tensor, list[Tensor], int, int]:
        x = torch.full((5,), float(rank))
        comm.broadcast_(x, root=2)
        gathered = comm.gather(torch.tensor([float(rank), 10.0]))
        traffic = comm.transport.traffic
        return x, gathered, traffic.sent, traffic.received

    results = world.run(life)
    for x, gathered, _, _ in results:
        assert torch.equal(x, torch.full((5,), 2.0))
        assert [g.tolist() for g in gathered] == [[0, 10], [1, 10], [2, 10]]
    assert [sent for *_, sent, _ in results] == [16, 16, 40 + 16]
    assert [received for *_, received in results] == [20 + 16, 20 + 16, 16]


# Messages.


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.int32, torch.uint8])
def test_messages_keep_their_order_and_content(dtype: torch.dtype) -> None:
    world = World(1, servers=1, numel=64, dtype=torch.float64)

    def life(rank: int, comm: Comm) -> list[tuple[int, float, list[float]]]:
        if rank == 0:
            for i in range(50):
                comm.send(1, torch.tensor([i, i + 1]).to(dtype), version=-i, weight=i / 2)
            comm.leave()
            return []
        return [(m.version, m.weight, m.x.tolist()) for m in comm.inbox()]

    got = world.run(life)[1]
    assert got == [(-i, i / 2, [i, i + 1]) for i in range(50)]


@pytest.mark.parametrize(("numel", "most"), [(3, 4), (250, 4), (4_000, 2), (8_000, 2)])
def test_so_many_messages_may_be_under_way_and_not_one_more(numel: int, most: int) -> None:
    """Two that are long, four that are not."""
    world = World(1, servers=1, patience=0.3, numel=8_000)
    sender, receiver = world.comms
    for number in range(most):
        sender.send(1, torch.full((numel,), float(number)))
    with pytest.raises(Stalled, match=r"worker 0 waited 0\.3 s for server 0 to take a message"):
        sender.send(1, torch.full((numel,), -1.0))
    for number in range(most):
        assert receiver.recv(0).x.eq(number).all()
        if number:  # the one before is not looked at any more
            sender.send(1, torch.full((numel,), 100.0 + number))
    for number in range(1, most):
        assert receiver.recv(0).x.eq(100 + number).all()


@pytest.mark.parametrize("seed", range(4))
def test_long_and_short_ones_do_not_get_in_each_others_way(seed: int) -> None:
    """Whatever is under way stays as it was sent, until the receiver takes the next."""
    chance, world = random.Random(seed), World(1, servers=1, numel=8_000)
    sizes = [chance.choice((1, 100, 2_000, 2_001, 5_000, 8_000)) for _ in range(300)]

    def life(rank: int, comm: Comm) -> int:
        for number, size in enumerate(sizes):
            if rank == 0:
                comm.send(1, torch.full((size,), float(number)))
            else:
                x = comm.recv(0).x
                if number % 3 == seed % 3:
                    time.sleep(1e-4)  # the sender runs ahead
                assert x.numel() == size
                assert x.eq(number).all()
        return len(sizes)

    assert world.run(life) == [300, 300]


@pytest.mark.parametrize("numel", [8, 100_000], ids=["small", "large"])
def test_a_lent_vector_is_waited_for_and_a_sent_one_is_not(numel: int) -> None:
    world = World(1, servers=1, numel=numel)
    x = world.x(0)
    x.fill_(1.0)
    handle = world.comms[0].start_send(1, x)
    if numel == 8:
        handle.wait()  # a small vector is copied: it may change at once
        x.fill_(2.0)
        assert world.comms[1].recv(0).x.eq(1.0).all()
        return
    message = world.comms[1].recv(0)
    assert message.x.data_ptr() - world.arenas[1].base == x.data_ptr() - world.arenas[0].base  # read in place
    done = threading.Event()

    def wait() -> None:
        handle.wait()
        done.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert not done.wait(0.1)
    world.comms[1].send(0, torch.ones(1))  # answering says that the message is no longer looked at
    assert done.wait(5)
    waiting.join()
    x.fill_(3.0)
    world.comms[0].recv(1)
    world.comms[0].send(1, x)
    x.fill_(4.0)
    assert world.comms[1].recv(0).x.eq(3.0).all()


def test_a_server_receives_from_all_workers_until_all_have_left() -> None:
    workers = 4
    world = World(workers, servers=2)

    def life(rank: int, comm: Comm) -> list[int]:
        if rank < workers:
            for i in range(20):
                for server in comm.servers.members:
                    comm.send(server, torch.tensor([float(i)]), version=i)
                for server in comm.servers.members:
                    assert comm.recv(server).version == i
            comm.leave()
            return []
        heard = []
        for m in comm.inbox():
            heard.append(m.source)
            comm.send(m.source, m.x, version=int(m.x[0]))
        return heard

    for heard in world.run(life)[workers:]:
        assert sorted(heard) == sorted(20 * list(range(workers)))


def test_rounds_are_in_rank_order_and_shrink_as_workers_leave() -> None:
    world = World(3, servers=1)

    def life(rank: int, comm: Comm) -> list[list[int]]:
        if rank < 3:
            for _ in range(rank + 1):
                time.sleep(0.002 * (3 - rank))
                comm.send(3, torch.ones(1))
            comm.leave()
            return []
        return [[m.source for m in pushes] for pushes in rounds(comm)]

    assert world.run(life)[3] == [[0, 1, 2], [1, 2], [2]]


def test_expecting_a_message_from_one_who_left_is_an_error() -> None:
    world = World(1, servers=1)
    world.comms[0].leave()
    with pytest.raises(RuntimeError, match="node 0, which has left"):
        world.comms[1].recv(0)


def test_a_message_too_long_is_refused() -> None:
    world = World(1, servers=1, numel=8)
    with pytest.raises(ValueError, match="larger than the model"):
        world.comms[0].send(1, torch.zeros(100_000))


def test_a_collective_too_long_is_refused() -> None:
    world = World(2, numel=8)

    def life(rank: int, comm: Comm) -> list[str]:
        said = []
        for what in (comm.mean_, comm.gather, comm.broadcast_):
            with pytest.raises(ValueError, match="larger than the model") as caught:
                what(torch.zeros(60_000, dtype=torch.float64) + rank)
            said.append(str(caught.value))
        return said

    assert [len(said) for said in world.run(life)] == [3, 3]


# Waiting.


def test_a_wait_past_its_deadline_names_who_is_missing() -> None:
    world, together = World(4, servers=1, patience=1.0), threading.Barrier(3)

    def life(rank: int, comm: Comm) -> str:
        if rank in (1, 3):
            return ""
        together.wait(60)
        wait: Callable[[], object] = partial(comm.recv, 3) if rank == 4 else partial(comm.mean_, torch.zeros(4))
        with pytest.raises(Stalled) as caught:
            wait()
        return str(caught.value)

    said = world.run(life)
    assert re.search(r"worker 0 waited 1\S* s for worker 1, worker 3", said[0])
    assert re.search(r"worker 2 waited 1\S* s for worker 1, worker 3", said[2])
    assert re.search(r"server 0 waited 1\S* s for a message from worker 3", said[4])


@pytest.mark.timed
def test_an_abort_wakes_all_that_wait() -> None:
    world = World(3, patience=60)

    def life(rank: int, comm: Comm) -> float:
        if rank == 0:
            time.sleep(0.1)
            world.arenas[0].words.announce(ABORT, 1)
            return 0.0
        began = time.monotonic()
        with pytest.raises(Aborted):
            comm.mean_(torch.zeros(4))
        return time.monotonic() - began

    assert max(world.run(life)) < 2


@pytest.mark.timed
def test_waiting_is_asleep() -> None:
    """A second of waiting costs next to no processor time."""
    world = World(2)

    def life(rank: int, comm: Comm) -> float:
        if rank == 0:
            comm.transport.start(Sleep(0.6)).wait()
        before = time.thread_time()
        comm.mean_(torch.zeros(4))
        return time.thread_time() - before

    assert max(world.run(life)) < 0.2


@pytest.mark.timed
def test_waiting_and_moving_are_told_apart() -> None:
    world = World(2)

    def life(rank: int, comm: Comm) -> tuple[float, float]:
        meter = comm.transport
        assert isinstance(meter, Metered)
        if rank == 0:
            time.sleep(0.5)
        comm.mean_(torch.zeros(4))
        return meter.wait, meter.communicate

    (_, _), (waited, communicated) = world.run(life)
    assert waited > 0.4
    assert communicated < waited / 2
