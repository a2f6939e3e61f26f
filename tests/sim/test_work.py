# SPDX-License-Identifier: Apache-2.0
"""The work of a collective grows with the number of its members, not with the square of it. Counted, not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import pytest
import torch
from tests.transports.world import DTYPES, vectors
from tests.zoo import INPUTS, make_data, train
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from orchestra import Simulated, Steps, Strategy
from orchestra.core.node import Node
from orchestra.core.ops import Broadcast, Gather, Group, Mean, MeanUpdate
from orchestra.core.vectors import LARGE, is_small, ranges, weighted_mean
from orchestra.worlds.simulated.collectives import CARRY_OUT
from orchestra.worlds.simulated.kernel import Kernel
from orchestra.worlds.simulated.network import VirtualNetwork
from orchestra.worlds.simulated.networks import Ethernet


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is asked of torch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def work_of(carry_out: Callable[[], Any]) -> int:
    """Operations of torch, and calls of functions in Python and in C."""
    calls = 0

    def called(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    counter = Operations()
    with counter:
        sys.setprofile(called)
        try:
            carry_out()
        finally:
            sys.setprofile(None)
    # The counter itself adds a few calls for each operation, which does not change how the sum grows.
    return counter.count + calls


def descend(x: Tensor, mean: Tensor) -> None:
    x.sub_(mean, alpha=0.5)


def updates(gradients: list[Tensor], weights: list[float], *, shared: bool, start: Tensor) -> list[MeanUpdate]:
    """What each of as many members as there are gradients asks for; x is one vector for all, or one for each."""
    members, group = len(gradients), Group(tuple(range(len(gradients))))
    one = start.clone()
    xs = [one if shared else start.clone() for _ in range(members)]
    parts = ranges(start.numel(), members)
    return [
        MeanUpdate(x, g, group, weight, partial(descend, x[part]))
        for x, g, weight, part in zip(xs, gradients, weights, parts, strict=True)
    ]


def ops_of(kind: str, members: int, device: str) -> list[Any]:
    numel, group = 300, Group(tuple(range(members)))
    given = [torch.ones(numel, device=device) for _ in range(members)]
    if kind.startswith("mean and update"):
        return list(updates(given, [1.0] * members, shared=kind.endswith("shared x"), start=given[0]))
    if kind == "mean":
        return [Mean(x, group, 1.0) for x in given]
    return [Gather(x, group) if kind == "gather" else Broadcast(x, 1, group) for x in given]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", ["mean and update, shared x", "mean and update", "mean", "broadcast", "gather"])
def test_every_further_member_of_a_collective_is_the_same_work(kind: str, device: str) -> None:
    found = {}
    for members in (16, 64, 256):
        ops = ops_of(kind, members, device)
        carry_out = partial(CARRY_OUT[type(ops[0])], ops[0].group, ops)
        work_of(carry_out)  # the first time, torch imports modules and the cuts of a vector are worked out
        found[members] = work_of(carry_out)
    few, many = (found[64] - found[16]) / 48, (found[256] - found[64]) / 192
    assert many <= 1.1 * few, found


class Members(tuple[int, ...]):
    """Counts how often all of them are looked at to find their group."""

    looks = 0

    def __hash__(self) -> int:
        Members.looks += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        Members.looks += 1
        return super().__eq__(other)


def test_a_group_is_found_without_a_look_at_its_members() -> None:
    group = Group(Members(range(50)))
    world = VirtualNetwork(Kernel(), Ethernet(gbit=1), 50, 50)
    for _ in range(3):
        for rank in group.members:
            world.meet(rank, Mean(torch.empty(8, device="meta"), group, 1.0), group)
    assert Members.looks <= 1


@dataclass(frozen=True, kw_only=True)
class Acquainted(Strategy[None]):
    """Notes the groups that nodes speak of."""

    groups: ClassVar[list[Group]] = []

    def init(self, node: Node) -> None:
        Acquainted.groups += [node.comm.workers, node.comm.servers]

    def step(self, node: Node, s: None) -> None:
        node.gradient()


@pytest.mark.parametrize("numerics", ["real", "off"])
def test_all_nodes_of_a_simulation_hold_the_same_groups(numerics: Any, tmp_path: Path) -> None:
    Acquainted.groups.clear()
    train(Acquainted(), tmp_path, cluster=Simulated(workers=5, numerics=numerics), budget=Steps(1))
    assert len(Acquainted.groups) == 10
    assert len({id(group) for group in Acquainted.groups}) == 2


def model() -> nn.Module:
    """40,591 parameters: enough for 8 workers to own a range each."""
    return nn.Sequential(nn.Linear(INPUTS, 200), nn.Tanh(), nn.Linear(200, 194), nn.Tanh(), nn.Linear(194, 1))


def data() -> Any:
    return make_data(1024)


def operations(workers: int, steps: int, numerics: Any, out: Path) -> int:
    """What a whole simulation asks of torch."""
    world = Simulated(workers=workers, numerics=numerics, fibers="greenlet")
    counter = Operations()
    with counter:
        train("allreduce", out, cluster=world, model=model, data=data, batch=4, budget=Steps(steps))
    return counter.count


@pytest.mark.parametrize("numerics", ["real", "batched"])
def test_a_gradient_takes_as_many_operations_among_many_workers(numerics: str, tmp_path: Path) -> None:
    """Counts the operations of further steps, without those of the set-up."""
    assert not is_small(sum(p.numel() for p in model().parameters()), 8)
    by_gradient = []
    for workers in (8, 32):
        short, long = (operations(workers, s, numerics, tmp_path / f"{workers}-{s}") for s in (2, 4))
        by_gradient.append((long - short) / (2 * workers))
    assert by_gradient[1] <= 1.1 * by_gradient[0], by_gradient


def one_range_at_a_time(ops: list[MeanUpdate]) -> None:
    """The plain form, as each worker of a real run does it for its own range."""
    weights = [op.weight for op in ops]
    parts = ranges(ops[0].g.numel(), len(ops))
    means = [torch.empty_like(ops[0].g[part]) for part in parts]
    for mean, part in zip(means, parts, strict=True):
        weighted_mean(mean, [op.g[part] for op in ops], weights)
    for op, mean in zip(ops, means, strict=True):
        op.apply(mean)
    for op, part in zip(ops, parts, strict=True):
        for other in ops:
            other.x[part] = op.x[part].clone()


@pytest.mark.parametrize("shared", [True, False], ids=["one x", "an x for each"])
@pytest.mark.parametrize("weights", [(1.0, 2.0, 5.0, 1.0, 3.0), (0.0, 2.0, 0.0, 7.0, 1.0), (0.0, 0.0, 0.0, 3.0, 0.0)])
@pytest.mark.parametrize("numel", [83, LARGE - 1, 2 * LARGE + 77])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mean_of_the_whole_has_the_bits_of_the_means_of_ranges(
    dtype: torch.dtype, numel: int, weights: tuple[float, ...], shared: bool
) -> None:
    start, *gradients = vectors(1 + len(weights), numel, dtype)
    for g, weight in zip(gradients, weights, strict=True):
        if not weight:
            g.fill_(float("nan"))  # must not be read
    plain, fast = (updates([g.clone() for g in gradients], list(weights), shared=shared, start=start) for _ in range(2))
    one_range_at_a_time(plain)
    CARRY_OUT[MeanUpdate](fast[0].group, fast)
    for a, b in zip(plain, fast, strict=True):
        assert torch.equal(a.x.view(torch.uint8), b.x.view(torch.uint8))
        assert not torch.equal(a.x, start)


def test_a_member_may_change_what_it_gathered() -> None:
    """What it holds is its own, as in a process of its own."""
    group = Group((0, 1, 2))
    given = [torch.full((5,), float(i), requires_grad=i == 1) for i in range(3)]
    first, second, third = CARRY_OUT[Gather](group, [Gather(x, group) for x in given])
    for found in (first, second, third):
        assert isinstance(found, list)
        assert [x.tolist() for x in found] == [[i] * 5 for i in range(3)]
        assert not any(x.requires_grad for x in found)
        for x in found:
            x.fill_(-1.0)
    assert [x.tolist() for x in given] == [[i] * 5 for i in range(3)]
