# SPDX-License-Identifier: Apache-2.0
"""Means by torch.distributed between processes: those by hand, and those by messages."""

from __future__ import annotations

import math
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.processes import Outcome, Processes
from tests.transports.hosts import HOST, Hosts, Machine, Trained, hosts, trained
from tests.waiting import wait_until
from tests.zoo import INPUTS, adam, make_large, make_model
from torch import Tensor, nn

from orchestra import Steps
from orchestra.core.ops import Group, Mean
from orchestra.core.vectors import share_of_mean
from orchestra.errors import Stalled
from orchestra.model.replica import flatten
from orchestra.worlds import torch_collectives

WORKERS = 3
STEPS = 8  # the sixth has less samples than workers' mini-batches


@pytest.fixture(scope="module")
def machines() -> Iterator[Hosts]:
    with hosts(WORKERS) as found:
        found.all(use_small_buckets)
        yield found


def use_small_buckets(machine: Machine) -> None:
    torch_collectives._BUCKET = 1 << 16  # bytes: a large model has seventeen


def vector(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


# Means.


def mean_of(machine: Machine, numel: int, dtype: torch.dtype, weights: list[float]) -> tuple[Tensor, float]:
    x = vector(machine.rank, numel, dtype)
    if not weights[machine.rank]:
        x.fill_(math.nan)
    return x, machine.means.mean_(x, weights[machine.rank])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 1000, 100_003])
def test_a_mean_is_the_mean_by_hand(machines: Hosts, numel: int, dtype: torch.dtype) -> None:
    weights = [5.0, 0.0, 300.0]
    expected = sum(w * vector(r, numel, torch.float64) for r, w in enumerate(weights)) / sum(weights)
    found = machines.all(mean_of, numel, dtype, weights)
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-12}.get(dtype, 2e-2)
    for x, total in found:
        assert total == 305.0
        assert torch.equal(x, found[0][0])
        torch.testing.assert_close(x.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("host", [HOST, "198.51.100.7"], ids=["the other does not come", "not our address"])
def test_workers_that_do_not_come_together_are_told_what_to_do(host: str, tmp_path: Path) -> None:
    store = torch_collectives.file_store(tmp_path / "store", 2)
    with pytest.raises(Stalled, match=r"could not connect to the other 1 .*All ports must be open"):
        torch_collectives.TorchCollectives(store, 0, 2, torch.device("cpu"), host=host, patience=0.5)


def test_without_weights_nothing_changes(machines: Hosts) -> None:
    for x, total in machines.all(mean_of, 70_000, torch.float32, [0.0] * WORKERS):
        assert total == 0
        assert x.isnan().all()


def mean_of_some(machine: Machine) -> Tensor | None:
    machine.transport.means = machine.means
    some = Group((0, 2))
    x = torch.full((50_000,), float(machine.rank))
    if machine.rank in some:
        machine.transport.start(Mean(x, some, 1.0)).wait()
    return x


def test_a_mean_of_some_workers_goes_by_messages(machines: Hosts) -> None:
    assert [float(x[0]) for x in machines.all(mean_of_some)] == [1.0, 1.0, 1.0]


def mean_in_pieces(machine: Machine, order: list[list[int]], weights: list[float], promised: list[float]) -> Tensor:
    """Of a vector of ten equal pieces, each worker tells of some in an order of its own; the rest is final at last."""
    x = vector(machine.rank, 200_000, torch.float32)
    rank, ready = machine.rank, machine.means.ahead(x, promised[machine.rank], 6.0)
    assert ready is not None
    kept = x.clone()
    for i, piece in enumerate(order[rank]):
        part = slice(piece * 20_000, (piece + 1) * 20_000)
        x[part] = 0.0 if piece in order[rank][i + 1 :] else kept[part]  # what is told again was not final
        ready(part)
    if weights[rank] == 0:
        x.fill_(math.nan)
    total = machine.means.mean_(x, weights[rank])
    assert total == sum(weights)
    return x


DOWN = list(range(9, -1, -1))


@pytest.mark.parametrize(
    ("order", "weights", "promised"),
    [
        ([DOWN, [], [0, 9, 3]], [6, 6, 6], [6, 6, 6]),
        ([DOWN, DOWN, DOWN], [6, 4, 1], [6, 4, 1]),
        ([DOWN, DOWN[:5], DOWN], [6, 0, 6], [6, 6, 6]),  # found out too late
        ([DOWN, [9, 8, 9, 8, 7, 6], DOWN], [6, 6, 6], [6, 6, 6]),  # what was told to be final was not
        ([DOWN, [], DOWN], [6, 0, 6], [6, 0, 6]),
    ],
    ids=["some", "uneven", "not finite", "told twice", "no samples"],
)
def test_what_is_begun_in_pieces_is_the_mean(
    machines: Hosts, order: list[list[int]], weights: list[float], promised: list[float]
) -> None:
    expected = sum(w * vector(r, 200_000, torch.float64) for r, w in enumerate(weights)) / sum(weights)
    for x in machines.all(mean_in_pieces, order, weights, promised):
        torch.testing.assert_close(x.double(), expected, rtol=1e-6, atol=1e-6)


def another_in_between(machine: Machine) -> None:
    x = torch.zeros(200_000)
    machine.means.ahead(x, 1.0, 1.0)
    with pytest.raises(RuntimeError, match="another"):
        machine.means.mean(torch.zeros(3), 1.0)


def test_nothing_comes_between_a_beginning_and_its_end(machines: Hosts) -> None:
    machines.all(another_in_between)


def listening(machine: Machine) -> list[str]:
    return [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]


def test_nothing_listens_but_at_the_address_of_the_run(machines: Hosts) -> None:
    first, *others = machines.all(listening)
    assert set(first) == {HOST}
    assert len(first) == 2  # Gloo, and the store where they met
    assert others == [[HOST]] * (WORKERS - 1)


# Training.


class Parts(nn.Module):
    """A frozen layer, a parameter that is never used, one that is used twice, and some without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, 300)
        self.frozen = nn.Linear(300, 300).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(40_000))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.twice = nn.Linear(300, 300)
        self.last = nn.Linear(300, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.twice(torch.tanh(self.twice(self.frozen(self.first(x)))))))
        return y


class Poisoned(nn.Module):
    """At some samples the gradient is not finite, but only in the first layer: the others' have gone by then."""

    def __init__(self) -> None:
        super().__init__()
        self.first, *rest = make_large().children()
        self.rest = nn.Sequential(*rest)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x)
        if hidden.requires_grad and bool((torch.round(x[:, 0] * 100) == 42).any()):
            hidden.register_hook(lambda g: g * math.nan)  # type: ignore[no-untyped-call]
        y: Tensor = self.rest(hidden)
        return y


def both(
    machines: Hosts, out: Path, model: Callable[[], nn.Module], strategy: str = "allreduce", **given: Any
) -> tuple[list[Trained], list[Trained]]:
    """The same run, by torch and by messages."""
    given = {"model": model, "budget": Steps(STEPS), **given}
    by_torch, by_messages = (machines.all(trained, out, way, strategy, given) for way in (True, False))
    for torchs, messages in zip(by_torch, by_messages, strict=True):
        torch.testing.assert_close(torchs.x, messages.x, rtol=2e-5, atol=2e-6)
        assert torch.equal(torchs.x, by_torch[0].x)
        assert torchs.skipped == messages.skipped
        assert messages.began == 0
    return by_torch, by_messages


@pytest.mark.parametrize(
    "given",
    [{}, {"clip": 0.01}, {"accumulate": 3}, {"optimizer": adam}],
    ids=["plain", "clipped", "accumulated", "adam"],
)
def test_training_is_as_by_messages(machines: Hosts, given: dict[str, Any], tmp_path: Path) -> None:
    by_torch, by_messages = both(machines, tmp_path, make_large, **given)
    x = flatten(make_large())
    for rank, (one, other) in enumerate(zip(by_torch, by_messages, strict=True)):
        assert one.began > STEPS  # several buckets in most steps
        assert one.sent == other.sent == STEPS * share_of_mean(x, WORKERS, rank)


@pytest.mark.parametrize("strategy", ["allreduce", "localsgd(tau=2)"])
def test_small_models_are_equal_with_torch_collectives(machines: Hosts, strategy: str, tmp_path: Path) -> None:
    by_torch, _ = both(machines, tmp_path, make_model, strategy)
    assert all(one.began == 0 for one in by_torch)


def test_parameters_of_all_kinds_are_equal_with_torch_collectives(machines: Hosts, tmp_path: Path) -> None:
    both(machines, tmp_path, Parts, accumulate=2)


def test_a_gradient_that_is_not_finite_is_left_out_of_the_mean(machines: Hosts, tmp_path: Path) -> None:
    by_torch, _ = both(machines, tmp_path, Poisoned, budget=Steps(5))
    assert sorted(one.skipped for one in by_torch) == [0, 0, 1]
    assert all(one.x.isfinite().all() for one in by_torch)


def test_the_same_bits_every_time(machines: Hosts, tmp_path: Path) -> None:
    first, second = (both(machines, tmp_path, make_large)[0] for _ in range(2))
    assert torch.equal(first[0].x, second[0].x)


# Lost processes.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_waits_for_one_that_never_comes_hears_signals(number: signal.Signals, tmp_path: Path) -> None:
    """And then ends, though its mean never completes."""

    def wait_for_ever() -> None:
        store = torch_collectives.file_store(tmp_path / "store", 2)
        means = torch_collectives.TorchCollectives(
            store,
            int(os.environ["RANK"]),
            2,
            torch.device("cpu"),
            patience=100,
            on_waiting=(tmp_path / "waiting").touch,
        )
        if os.environ["RANK"] == "1":
            signal.pause()
        signal.signal(number, signal.default_int_handler)
        means.mean(torch.zeros(3), 1.0)

    with Processes([wait_for_ever] * 2) as processes:
        wait_until((tmp_path / "waiting").exists)
        os.kill(processes.pid(0), number)
        assert wait([processes.ends[0]], timeout=30)
        outcome: Outcome = pickle.loads(processes.ends[0].recv_bytes())
    assert outcome.kind == "crash"
    assert "KeyboardInterrupt" in outcome.error


def mean_or_die(machine: Machine, who: int) -> None:
    if machine.rank == who:
        os.kill(os.getpid(), signal.SIGKILL)
    machine.means.mean(torch.zeros(100_000), 1.0)


def test_a_mean_with_a_dead_process_raises() -> None:
    with hosts(2) as machines:
        survivor, dead = machines.answers(mean_or_die, 1)
    assert isinstance(survivor, Stalled)
    assert dead is None
