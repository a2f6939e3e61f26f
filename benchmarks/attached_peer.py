# SPDX-License-Identifier: Apache-2.0
"""One process on a host of a lab: DistributedDataParallel, or a worker of our all-reduce between machines.

python -m benchmarks.attached_peer KIND WORKLOAD HOSTS PORT RANK FOLDER, with KIND one of

    ddp             DistributedDataParallel on Gloo
    ddp-view        the same with gradient_as_bucket_view
    torch           ours, means by torch.distributed
    messages        ours, means by messages over TLS
    trusted         ours, means by messages that are not encrypted

Commands come and are answered as in `benchmarks.peer`.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import orchestra
from benchmarks import peer
from benchmarks.workloads import WORKLOADS, Workload, loss, sgd
from orchestra.clusters.runners import RUNNERS
from orchestra.core.comm import Comm
from orchestra.core.ops import Traffic
from orchestra.engine import node_loop
from orchestra.engine.cluster import Cluster, Device, Resources
from orchestra.engine.middleware import Metered
from orchestra.engine.runner import Ending, PreparedRun, Runner
from orchestra.runs.events import EventLog
from orchestra.worlds.sockets.addresses import Address
from orchestra.worlds.sockets.auth import Token
from orchestra.worlds.sockets.messenger import Messenger
from orchestra.worlds.sockets.rendezvous import Rendezvous
from orchestra.worlds.sockets.transport import SocketTransport
from orchestra.worlds.torch_collectives import TorchCollectives, tcp_store

SECRET = "0123456789abcdef" * 2  # public: this run is on one machine


@dataclass(frozen=True, kw_only=True)
class Host(Cluster):
    """One worker of several; it steps when it is told to."""

    workers: int
    rank: int
    kind: str
    rendezvous: Path
    device: Device = "cpu"

    def resources(self, nodes: int) -> Resources:
        return replace(super().resources(nodes), uses_torch_collectives=self.kind == "torch")


@dataclass(frozen=True)
class HostRunner(Runner):
    """Trains as one worker until its process is killed."""

    cluster: Host

    def carry_out(self, prepared: PreparedRun) -> Ending:
        spec, rank = prepared.spec, self.cluster.rank
        with ExitStack() as stack:
            log = stack.enter_context(EventLog(spec.run / f"events-{rank}.jsonl", print))
            transport = self._transport(spec.parameters)
            meter, x0 = Metered(transport), prepared.x0
            node = node_loop.worker(spec, rank, Comm(meter, spec.view), log, x0.clone(), torch.zeros_like(x0))
            runtime = node_loop.NodeRuntime(spec, node, meter, log, print, lambda row: None)

            def step() -> None:
                spec.strategy.step(node, runtime.state)
                node_loop.record(runtime)
                node_loop.report(runtime)

            peer.answer(step)
        raise AssertionError("it ends with the process")

    def _transport(self, parameters: int) -> SocketTransport:
        host, cluster = os.environ["ORCHESTRA_LAB_ADDRESS"], self.cluster
        rank, workers = cluster.rank, cluster.workers
        token = Token(SECRET, trusted=cluster.kind != "messages")
        rendezvous = Rendezvous(rank, token, {}, host=host)
        connections = rendezvous.connect_all(self._addresses(rendezvous.address), patience=60)
        traffic = Traffic()
        messenger = Messenger(
            rank, workers, token.run(), connections,
            largest=8 * parameters + 1024, patience=300, traffic=traffic, summed=token.trusted,
        )  # fmt: skip
        transport = SocketTransport(rank, workers, messenger, traffic)
        if cluster.kind == "torch":
            store = tcp_store(messenger, rank, workers, host, 300)
            transport.means = TorchCollectives(store, rank, workers, torch.device("cpu"), host=host)
        return transport

    def _addresses(self, mine: Address) -> list[Address]:
        """Return the address of every worker: the hosts of a lab have one file system."""
        cluster = self.cluster
        place = cluster.rendezvous / f"{cluster.kind}-{cluster.rank}"
        place.with_suffix(".new").write_text(f"{mine[0]} {mine[1]}")
        place.with_suffix(".new").rename(place)
        found = [cluster.rendezvous / f"{cluster.kind}-{rank}" for rank in range(cluster.workers)]
        while not all(path.exists() for path in found):
            time.sleep(0.02)
        return [(host, int(port)) for host, port in (path.read_text().split() for path in found)]


RUNNERS[Host] = HostRunner


def ours(kind: str, workload: Workload, hosts: int, rank: int, folder: Path) -> None:
    """A real `orchestra.train`, but for the cluster."""
    orchestra.train(
        model=workload.module,
        data=workload.data,
        loss=loss,
        optimizer=sgd,
        strategy="allreduce",
        cluster=Host(workers=hosts, rank=rank, kind=kind, rendezvous=folder),
        batch=workload.batch,
        budget=orchestra.Steps(1_000_000),
        out=folder / f"run-{kind}-{rank}",
    )


def main() -> None:
    """Live as one process."""
    kind, name, hosts, port, rank, folder = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    workload = WORKLOADS[name]
    if kind.startswith("ddp"):
        options = ["--gradient-as-bucket-view"] if kind == "ddp-view" else []
        peer.answer(peer.ddp(workload, int(rank), processes=int(hosts), port=port, options=options))
    else:
        ours(kind, workload, int(hosts), int(rank), Path(folder))


if __name__ == "__main__":
    main()
