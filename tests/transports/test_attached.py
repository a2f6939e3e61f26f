# SPDX-License-Identifier: Apache-2.0
"""Every strategy over real sockets, with the bits of processes on one machine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.laws.examples import EXAMPLES, in_processes, workers_for
from tests.zoo import assert_same, ended, make_large, train

from orchestra import Local, Steps, Strategy
from orchestra.clusters.runners import RUNNERS
from orchestra.core.comm import Comm
from orchestra.core.ops import Broadcast, Gather, Group, Mean, Traffic
from orchestra.engine import node_loop
from orchestra.engine.cluster import Cluster
from orchestra.engine.middleware import Metered
from orchestra.engine.runner import Ending, PreparedRun, Runner
from orchestra.runs.events import EventLog, NodeStarted
from orchestra.worlds.sockets.auth import Token
from orchestra.worlds.sockets.messenger import Messenger
from orchestra.worlds.sockets.rendezvous import Rendezvous
from orchestra.worlds.sockets.transport import SocketTransport

TOKEN = Token("0123456789abcdef" * 2, trusted=True)


def connect(size: int, workers: int, largest: int) -> list[SocketTransport]:
    meetings = [Rendezvous(rank, TOKEN, {}) for rank in range(size)]
    addresses = [rendezvous.address for rendezvous in meetings]
    with ThreadPoolExecutor(size) as pool:
        connections = list(pool.map(lambda m: m.connect_all(addresses, patience=10), meetings))
    found = []
    for rank, sockets in enumerate(connections):
        traffic = Traffic()
        messenger = Messenger(
            rank, workers, TOKEN.run(), sockets, largest=largest, patience=10, traffic=traffic, summed=True
        )  # fmt: skip
        found.append(SocketTransport(rank, size, messenger, traffic))
    return found


@dataclass
class Alone:
    """A checkpointer that saves nothing."""

    def after_step(self, before: int) -> None: ...
    def after_steps(self) -> None: ...
    def interrupted(self) -> bool:
        return False

    def save_on_interrupt(self) -> None: ...
    def stay(self) -> bool:
        return True

    def after_service(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class Threads(Cluster):
    """Run every node in a thread of its own, connected by sockets as machines are."""

    workers: int = 3
    device: Any = "cpu"


@dataclass(frozen=True)
class ThreadsRunner(Runner):
    cluster: Threads

    def carry_out(self, prepared: PreparedRun) -> Ending:
        spec = prepared.spec
        size = spec.workers + spec.servers

        def live(runtime: node_loop.NodeRuntime) -> None:
            torch.set_num_threads(spec.threads)
            (node_loop.serve if runtime.is_server else node_loop.work)(runtime, Alone())

        with ExitStack() as stack, ThreadPoolExecutor(size) as pool:
            lives = []
            for rank, transport in enumerate(connect(size, spec.workers, 4 * spec.parameters + 1024)):
                stack.callback(transport.messenger.close, within=0.05)
                transport.messenger._near = spec.near(rank)
                log = stack.enter_context(EventLog(spec.run / f"events-{rank}.jsonl", print))
                log.write(NodeStarted(0.0, rank, "worker" if rank < spec.workers else "server", 0.0))
                meter, x0 = Metered(transport), prepared.x0
                comm = Comm(meter, spec.view)
                if rank < spec.workers:
                    node = node_loop.worker(spec, rank, comm, log, x0.clone(), torch.zeros_like(x0))
                else:
                    node = node_loop.server(spec, rank, comm, log, x0[spec.range_of(rank)].clone())
                lives.append(node_loop.NodeRuntime(spec, node, meter, log, print, lambda row: None))
            for future in [pool.submit(live, runtime) for runtime in lives]:
                future.result(timeout=40)
        return Ending("budget", [])


RUNNERS[Threads] = ThreadsRunner


@in_processes([s for s in EXAMPLES if s.layout.model_location != "shared"])
def test_every_strategy_is_as_on_one_machine(strategy: Strategy[Any], tmp_path: Path) -> None:
    workers = workers_for(strategy)
    here = train(strategy, tmp_path / "here", cluster=Local(workers=workers), budget=Steps(8))
    there = train(strategy, tmp_path / "there", cluster=Threads(workers=workers), budget=Steps(8))
    assert there.summary.samples == here.summary.samples or not strategy.layout.updates.synchronous
    if strategy.layout.updates.synchronous:
        assert_same(there.model, here.model)
        for node in range(workers + strategy.layout.servers):
            assert ended(tmp_path / "there", node).sent == ended(tmp_path / "here", node).sent
            assert ended(tmp_path / "there", node).received == ended(tmp_path / "here", node).received


@pytest.mark.parametrize("strategy", ["allreduce", "ps(servers=2)", "localsgd(tau=2)"])
def test_large_models_are_equal_on_local_and_attached_workers(strategy: str, tmp_path: Path) -> None:
    found = [
        train(strategy, tmp_path / type(cluster).__name__, cluster=cluster, model=make_large, budget=Steps(4)).model
        for cluster in (Local(workers=3), Threads(workers=3))
    ]
    assert_same(*found)


def together(transports: list[SocketTransport], ops: list[Any]) -> list[Any]:
    with ThreadPoolExecutor(len(ops)) as pool:
        return list(pool.map(lambda both: both[0].start(both[1]).wait(), zip(transports, ops, strict=True)))


def test_means_broadcasts_and_gathers_of_a_part_of_the_nodes() -> None:
    transports = connect(4, 4, 1 << 20)
    group = Group((0, 1, 3))
    members = [transports[m] for m in group.members]
    xs = [torch.full((11,), float(m)) for m in group.members]
    totals = together(members, [Mean(x, group, w) for x, w in zip(xs, (1.0, 0.0, 3.0), strict=True)])
    assert totals == [4.0] * 3
    assert all(torch.equal(x, torch.full((11,), 9 / 4)) for x in xs)
    kept = [x.clone() for x in xs]
    assert together(members, [Mean(x, group, 0.0) for x in xs]) == [0.0] * 3
    assert all(torch.equal(a, b) for a, b in zip(xs, kept, strict=True))
    for m, x in zip(group.members, xs, strict=True):
        x.fill_(m)
    gathered = together(members, [Gather(x, group) for x in xs])
    assert [[float(v[0]) for v in found] for found in gathered] == [[0.0, 1.0, 3.0]] * 3
    together(members, [Broadcast(x, 3, group) for x in xs])
    assert all(torch.equal(x, torch.full((11,), 3.0)) for x in xs)
    for transport in transports:
        transport.messenger.close(within=0.05)
