# SPDX-License-Identifier: Apache-2.0
"""Links shared fairly: the conditions of max-min fairness at every moment, and two independent solvers."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestra.worlds.simulated.flows import Flow, Flows, Link
from orchestra.worlds.simulated.kernel import Kernel
from orchestra.worlds.simulated.network import DOWN, UP


@dataclass(frozen=True)
class Wish:
    """A flow to come."""

    at: float
    source: int
    to: int
    size: float


def wishes_of(seed: int, hosts: int, count: int, *, once: bool = False) -> list[Wish]:
    """Some at odd times, some at the same; `once`: at most one between the same two hosts."""
    dice = random.Random(seed)
    every = [[a, b] for a in range(hosts) for b in range(hosts) if a != b]
    count = min(count, len(every)) if once else count
    times = [dice.choice([dice.random() * 2, round(dice.random() * 4) / 2]) for _ in range(count)]
    pairs = dice.sample(every, count) if once else [dice.sample(range(hosts), 2) for _ in range(count)]
    return [Wish(t, a, b, dice.choice([1e5, 2e5, 3.3e5])) for t, (a, b) in zip(times, pairs, strict=True)]


def ends_of(
    wishes: list[Wish],
    ups: list[float],
    downs: list[float],
    core: float | None = None,
    *,
    check: bool = False,
    single: bool = False,
) -> list[float]:
    """When each flow ends. `single`: as a world with one switch has it, where two hosts have one flow at a time."""
    kernel = Kernel()
    up = [Link(f"up {i}", c, UP) for i, c in enumerate(ups)]
    down = [Link(f"down {i}", c, DOWN) for i, c in enumerate(downs)]
    middle = () if core is None else (Link("core", core),)
    flows = Flows(kernel, single=single)
    live: dict[int, Flow] = {}
    ends = [0.0] * len(wishes)
    looks: list[float] = []

    def begin(i: int) -> None:
        wish = wishes[i]
        live[i] = flows.start((up[wish.source], *middle, down[wish.to]), wish.size, lambda: end(i))
        kernel.at(kernel.now, look)

    def end(i: int) -> None:
        ends[i] = kernel.now
        del live[i]
        kernel.at(kernel.now, look)

    def look() -> None:
        if check and not flows._dirty:  # else more happens at this moment
            looks.append(kernel.now)
            assert_fair([*live.values()])

    for i, wish in enumerate(wishes):
        kernel.at(wish.at, begin, i)
    kernel.run()
    assert not live
    assert len(looks) >= check * len(wishes) / 2
    return ends


def assert_fair(live: list[Flow]) -> None:
    """No link is overloaded, and every flow has a full link on its way where no other flow is faster."""
    live = [flow for flow in live if flow in flow.links[0].flows]  # others end at this very moment
    for link in {link for flow in live for link in flow.links}:
        assert sum(flow.rate for flow in link.flows) <= link.capacity * (1 + 1e-9)
    for flow in live:
        assert any(
            sum(other.rate for other in link.flows) >= link.capacity * (1 - 1e-9)
            and flow.rate >= max(other.rate for other in link.flows) * (1 - 1e-9)
            for link in flow.links
        )


rates = st.sampled_from([0.5e6, 1e6, 1e6, 1e6, 2e6])
wide = st.sampled_from([1e4, 0.5e6, 1e6, 1e6, 2e6, 1e9])


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    capacities=st.lists(st.tuples(rates, rates), min_size=2, max_size=8),
    core=st.sampled_from([None, 1e6, 2e6, 1e8]),
)
def test_every_moment_is_max_min_fair(seed: int, capacities: list[tuple[float, float]], core: float | None) -> None:
    wishes = wishes_of(seed, len(capacities), 50)
    ends_of(wishes, [up for up, _ in capacities], [down for _, down in capacities], core, check=True)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), capacities=st.lists(st.tuples(wide, wide), min_size=2, max_size=8))
def test_every_moment_is_fair_behind_one_switch(seed: int, capacities: list[tuple[float, float]]) -> None:
    wishes = wishes_of(seed, len(capacities), 50, once=True)
    ends_of(wishes, [up for up, _ in capacities], [down for _, down in capacities], check=True, single=True)


def test_the_first_flow_into_a_slow_link_is_held_back() -> None:
    ends = ends_of([Wish(0.0, 0, 1, 1e6)], [125e6] * 2, [125e6, 125e3], single=True)
    assert ends == pytest.approx([8.0], rel=1e-12)


def test_the_short_way_and_the_long_way_agree() -> None:
    """A core that is never full makes every change concern all flows, and changes nothing."""
    for seed in range(20):
        wishes = wishes_of(seed, 6, 60)
        short = ends_of(wishes, [1e6] * 6, [1e6] * 6)
        long = ends_of(wishes, [1e6] * 6, [1e6] * 6, core=1e12)
        assert short == pytest.approx(long, rel=1e-9)


def test_incast_is_the_sum() -> None:
    wishes = [Wish(0.0, i, 9, 1e7) for i in range(9)]
    assert ends_of(wishes, [125e6] * 10, [125e6] * 10) == pytest.approx([0.72] * 9, rel=1e-12)


def test_many_flows_into_few_hosts_stay_cheap() -> None:
    kernel = Kernel()
    up, down = [Link("up", 1e8, 0) for _ in range(300)], [Link("down", 1e8, 1) for _ in range(4)]
    flows = Flows(kernel, single=True)
    dice = random.Random(0)

    def push(source: int, again: int) -> None:
        left = [4]

        def arrived() -> None:
            left[0] -= 1
            if not left[0] and again:
                kernel.after(0.01 * dice.random(), push, source, again - 1)

        for to in down:
            flows.start((up[source], to), 6e4, arrived)

    for source in range(300):
        kernel.at(0.01 * dice.random(), push, source, 5)
    kernel.run()
    assert flows.touched < 20_000  # of 7,200 flows that all share their links with hundreds of others


_SIMGRID = Path(__file__).with_name("simgrid_oracle.py")


@pytest.mark.parametrize("single", [False, True], ids=["any flows", "one switch"])
def test_against_simgrid(single: bool) -> None:
    """SimGrid's plain fluid model, in a process of its own: it ends its process when it is done."""
    for seed in range(10):
        wishes = wishes_of(seed, 10, 60, once=single)
        text = "\n".join(f"{w.at!r} {w.source} {w.to} {w.size!r}" for w in wishes)
        command = [sys.executable, str(_SIMGRID)]
        answer = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        if answer.returncode == 77:
            pytest.skip("SimGrid is not installed: apt-get install python3-simgrid")
        assert answer.returncode == 0, answer.stderr
        expected = [float(line) for line in answer.stdout.split()]
        assert ends_of(wishes, [1e6] * 10, [1e6] * 10, single=single) == pytest.approx(expected, rel=1e-9)
