# SPDX-License-Identifier: Apache-2.0
"""Steps whose duration a formula gives: the simulator must give the same, by the formula and by its flows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.zoo import INPUTS, events, make_data, make_model, train
from torch import nn

from orchestra import ASP, AllReduce, ParameterServer, Simulated, Steps, Strategy
from orchestra.core.node import Node
from orchestra.engine.compute_times import ConstantTime, Exponential
from orchestra.runs.events import Logged
from orchestra.strategies.parameter_server.consistency import BSP, Consistency, Correction, ServerState
from orchestra.worlds.simulated.kernel import Kernel, Promise
from orchestra.worlds.simulated.network import VirtualNetwork
from orchestra.worlds.simulated.networks import Host, Network

S = 4 * sum(p.numel() for p in make_model().parameters())  # bytes
BITS, LATENCY, MESSAGE = 8e6, 3e-3, 2e-4
RATE = BITS / 8
NETWORK = Network(hosts=(Host(up=BITS, down=BITS, latency=LATENCY / 2, message=MESSAGE),))
COMPUTE = 0.05
STEPS = 4


def seconds(
    strategy: Strategy[Any], workers: int, tmp_path: Path, *, fidelity: Literal["auto", "flows"] = "auto", **given: Any
) -> float:
    """Virtual seconds of a step."""
    asked: dict[str, Any] = {"workers": workers, "network": NETWORK, "compute_time": ConstantTime(COMPUTE), **given}
    more = {"model": asked.pop("model")} if "model" in asked else {}
    cluster = Simulated(**asked, fidelity=fidelity, numerics="off")
    result = train(strategy, tmp_path / f"{workers}-{fidelity}", cluster=cluster, budget=Steps(STEPS), **more)
    return result.summary.seconds / STEPS


@pytest.mark.parametrize("fidelity", ["auto", "flows"])
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_ring(n: int, fidelity: Literal["auto", "flows"], tmp_path: Path) -> None:
    expected = COMPUTE + 2 * (n - 1) * (S / n / RATE + LATENCY + MESSAGE)
    assert seconds(AllReduce(), n, tmp_path, fidelity=fidelity) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_one_server(n: int, tmp_path: Path) -> None:
    """All push at once into one link, and pull at once out of it."""
    network = Network(hosts=(Host(up=BITS, down=BITS, latency=LATENCY / 2),))
    expected = COMPUTE + 2 * n * S / RATE + 2 * LATENCY
    assert seconds(ParameterServer(), n, tmp_path, network=network) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("n", "keeps", "vectors"), [(2, 1e-9, 3), (5, 1e-9, 5), (2, 2 * S, 5), (5, 2 * S, 11)])
def test_a_server_whose_kernel_keeps_little_answers_one_after_the_other(
    n: int, keeps: float, vectors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then asynchronous workers do not stay in step: computing takes S/R, a step 3 S/R, or n S/R if the link is full.

    Where all answers leave together, as they do if the kernel has room for them, they share the link for ever: S/R to
    compute, n S/R to push, n S/R to be answered.
    """
    network = Network(hosts=(Host(up=BITS, down=BITS, keeps=keeps),))
    took = []
    for steps in (6, 10):
        monkeypatch.setattr(f"{__name__}.STEPS", steps)
        strategy = ParameterServer(consistency=ASP())
        took.append(
            steps * seconds(strategy, n, tmp_path / str(steps), network=network, compute_time=ConstantTime(S / RATE))
        )
    assert (took[1] - took[0]) / 4 == pytest.approx(vectors * S / RATE, rel=1e-6)


@pytest.mark.parametrize(
    ("keeps", "free"),
    [
        (1000.0, [0.0, 0.0, 1.0, 1.0]),  # the third does not fit beside the first two
        (500.0, [0.2, 0.7, 1.2, 1.7]),  # what is above 500 bytes has left before the sender goes on
        (5000.0, [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_the_receive_buffer_decides_when_a_sender_goes_on(keeps: float, free: list[float]) -> None:
    """Four messages of 700 and 300 bytes in turn at 1,000 bytes a second."""
    kernel = Kernel()
    world = VirtualNetwork(kernel, Network(hosts=(Host(up=8e3, down=8e3, keeps=keeps),)), 2, 2)
    went_on: list[float] = []
    came: list[float] = []

    def send() -> None:
        for size in (700, 300, 700, 300):
            taken = world.send_blocking(world.way(0, 1), size, lambda _: came.append(kernel.now), None)
            if taken is not None:
                taken.wait()
            went_on.append(kernel.now)
        end: Promise[None] = Promise(kernel, lambda: "the end")
        kernel.at(3.0, end.keep, None)
        end.wait()

    kernel.spawn("sender", send)
    kernel.run()
    assert came == pytest.approx([0.7, 1.0, 1.7, 2.0])
    assert went_on == pytest.approx(free)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_work_on_messages_is_done_one_after_the_other(n: int, tmp_path: Path) -> None:
    """The last worker is answered after the others, pushes, and is answered last again."""
    work = 0.01  # much more than a message is under way
    network = Network(hosts=(Host(up=BITS, down=BITS, latency=LATENCY / 2, message=work),))
    expected = COMPUTE + (n + 1) * work + 2 * S / RATE + 2 * LATENCY
    first = (n - 1) * S / RATE / STEPS  # in the first step all push at once
    assert seconds(ParameterServer(), n, tmp_path, network=network) == pytest.approx(expected + first, rel=1e-9)


@dataclass(frozen=True, kw_only=True)
class Collectives(Strategy[None]):
    """A broadcast and a gather in every step."""

    def init(self, node: Node) -> None:
        return None

    def step(self, node: Node, s: None) -> None:
        node.gradient()
        node.comm.broadcast_(node.x, root=1)
        node.comm.gather(node.x)


@pytest.mark.parametrize("message", [0.0, 1e-4, 5e-3])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_broadcast_and_gather_by_formula_and_by_flows(n: int, message: float, tmp_path: Path) -> None:
    network = Network(hosts=(Host(up=BITS, down=BITS, latency=LATENCY / 2, message=message),))
    both = [seconds(Collectives(), n, tmp_path, fidelity=each, network=network) for each in ("auto", "flows")]
    assert both[0] == pytest.approx(both[1], rel=1e-9)


def test_a_rack_has_a_narrow_way_out(tmp_path: Path) -> None:
    """Two racks of two, a core 4 times too small: in every round two flows cross it, one each way, at half a link."""
    network = Network(hosts=(Host(up=BITS, down=BITS),), rack=2, oversubscription=4.0)
    expected = COMPUTE + 2 * 3 * (S / 4 / (RATE / 2))
    assert seconds(AllReduce(), 4, tmp_path, network=network) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("n", "m"), [(4, 2), (6, 3)])
def test_several_servers(n: int, m: int, tmp_path: Path) -> None:
    """N ≥ M: the servers' links are full, each with N times its range; the largest range decides."""
    network = Network(hosts=(Host(up=BITS, down=BITS),))
    largest = 4 * math.ceil(S / 4 / m)
    expected = COMPUTE + 2 * n * largest / RATE
    assert seconds(ParameterServer(servers=m), n, tmp_path, network=network) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_one_server_on_the_machine_of_a_worker(n: int, tmp_path: Path) -> None:
    """N - 1 workers push into its link, and pull out of it; one need not."""
    network = Network(hosts=(Host(up=BITS, down=BITS, latency=LATENCY / 2),))
    expected = COMPUTE + (2 * (n - 1) * S / RATE + 2 * LATENCY if n > 1 else 0)
    assert seconds(ParameterServer(colocated=True), n, tmp_path, network=network) == pytest.approx(expected, rel=1e-9)


def divisible() -> nn.Module:
    """120 parameters: as many for each of 2, 3, 5 or 8 servers."""
    return nn.Sequential(nn.Linear(INPUTS, 15, bias=False), nn.Linear(15, 1, bias=False))


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_one_range_per_worker_takes_as_long_as_a_ring(n: int, tmp_path: Path) -> None:
    network = Network(hosts=(Host(up=BITS, down=BITS),))
    expected = COMPUTE + 2 * (n - 1) / n * 4 * 120 / RATE
    for strategy in (ParameterServer(servers=n, colocated=True), AllReduce()):
        found = seconds(strategy, n, tmp_path / type(strategy).__name__, network=network, model=divisible)
        assert found == pytest.approx(expected, rel=1e-9)


def test_nodes_of_one_machine_share_its_work_on_messages(tmp_path: Path) -> None:
    """Two workers with two servers each: two pushes go out, then the answers of the two servers."""
    work = 0.01
    network = Network(hosts=(Host(up=1e18, down=1e18, message=work),))
    found = seconds(ParameterServer(servers=4, colocated=True), 2, tmp_path, network=network)
    assert found == pytest.approx(COMPUTE + 4 * work, rel=1e-9)


def test_nodes_of_one_machine_share_its_links(tmp_path: Path) -> None:
    """Three workers, servers 0 and 3 with worker 0, each push and each answer of r bytes, in units of r/R.

    Into machine 0 come four pushes, half done when servers 1 and 2 have theirs, at 2; from then on these servers'
    answers to worker 0 come in besides, six flows in all: the pushes are there at 2 + 6/2 = 5. Out of machine 0 then go
    four answers: 9.
    """
    network = Network(hosts=(Host(up=BITS, down=BITS),))
    found = seconds(ParameterServer(servers=4, colocated=True), 3, tmp_path, network=network, model=divisible)
    assert found == pytest.approx(COMPUTE + 9 * (4 * 120 / 4) / RATE, rel=1e-9)


def test_a_server_that_is_never_free_sets_the_pace(tmp_path: Path) -> None:
    """Asynchronous, hardly any computing: the server's link passes N gradients a round, there and back at once."""
    network = Network(hosts=(Host(up=BITS, down=BITS),))
    n, tiny = 8, 1e-9
    paced = seconds(ParameterServer(consistency=ASP()), n, tmp_path, network=network, compute_time=ConstantTime(tiny))
    assert n * S / RATE <= paced <= 2 * n * S / RATE * (1 + 1e-6)


def test_the_slowest_of_n(tmp_path: Path) -> None:
    """Δ + H_N · scale, within three standard errors."""
    n, steps = 8, 400
    network = Network(hosts=(Host(up=1e18, down=1e18),))
    cluster = Simulated(workers=n, network=network, compute_time=Exponential(0.05, 0.02), numerics="off")
    result = train(AllReduce(), tmp_path, cluster=cluster, budget=Steps(steps), data=partial(make_data, 4800))
    mean = 0.05 + 0.02 * sum(1 / k for k in range(1, n + 1))
    deviation = 0.02 * math.sqrt(sum(1 / k**2 for k in range(1, n + 1)))
    assert abs(result.summary.seconds / steps - mean) < 3 * deviation / math.sqrt(steps)


@dataclass(frozen=True, kw_only=True)
class HalvingDoubling(Strategy[None]):
    """The messages of an all-reduce by recursive halving and doubling, on 64 numbers."""

    def init(self, node: Node) -> None:
        return None

    def step(self, node: Node, s: None) -> None:
        node.gradient()
        rounds = [(2**k, 64 // 2 ** (k + 1)) for k in range(int(math.log2(len(node.comm.workers))))]
        for distance, size in [*rounds, *reversed(rounds)]:
            partner = node.rank ^ distance
            node.comm.send(partner, node.x[:size])
            node.comm.recv(partner)


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_halving_and_doubling(n: int, tmp_path: Path) -> None:
    """2 log₂N (α + o) + 2 (N-1)/N · S/R: every pair uses its links in both directions at once."""
    size = 4 * 64
    expected = COMPUTE + 2 * math.log2(n) * (LATENCY + MESSAGE) + 2 * (n - 1) / n * size / RATE
    assert seconds(HalvingDoubling(), n, tmp_path) == pytest.approx(expected, rel=1e-9)


@dataclass(frozen=True, kw_only=True)
class Recorded(Consistency):
    """Bulk synchronous, but notes when the first, the second, ... push of a round came."""

    def work(self, node: Node, s: ServerState) -> None:
        BSP().work(node, s)

    def serve(self, node: Node, s: ServerState, correction: Correction) -> None:
        began, pushes = 0.0, []
        for push in node.comm.inbox():
            pushes.append(push)
            node.log(f"arrival {len(pushes)}", node.now() - began)
            if len(pushes) == len(node.comm.workers):
                began = node.now()
                for each in pushes:
                    node.comm.send(each.source, node.x)
                pushes.clear()


def test_the_k_th_of_n(tmp_path: Path) -> None:
    """Δ + (H_N - H_{N-K}) · scale for every K, within three standard errors."""
    n, steps, shift, scale = 6, 400, 0.05, 0.02
    network = Network(hosts=(Host(up=1e18, down=1e18),))
    cluster = Simulated(workers=n, network=network, compute_time=Exponential(shift, scale), numerics="off")
    data = partial(make_data, 3600)  # a full batch for everyone in every step
    train(ParameterServer(consistency=Recorded()), tmp_path, cluster=cluster, budget=Steps(steps), data=data)
    logged = [e for e in events(tmp_path, n) if isinstance(e, Logged)]
    for k in range(1, n + 1):
        times = [e.value for e in logged if e.name == f"arrival {k}"]
        assert len(times) == steps
        terms = [1 / j for j in range(n - k + 1, n + 1)]
        deviation = scale * math.sqrt(sum(term**2 for term in terms))
        assert abs(sum(times) / steps - (shift + scale * sum(terms))) < 3 * deviation / math.sqrt(steps)


@pytest.mark.parametrize(("strategy", "passes"), [(AllReduce(), 2), (ParameterServer(), 4)])
def test_vectors_take_time_where_hosts_say_so(strategy: Strategy[Any], passes: int, tmp_path: Path) -> None:
    """All-reduce averages a vector and updates it; a server averages one of each of three workers and updates."""
    number = 1e-4
    slow, fast = (Network(hosts=(Host(up=BITS, down=BITS, number=each),)) for each in (number, 0.0))
    took = [seconds(strategy, 3, tmp_path / str(i), network=network) for i, network in enumerate((slow, fast))]
    assert took[0] - took[1] == pytest.approx(passes * S / 4 * number, rel=1e-9)
