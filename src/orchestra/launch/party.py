# SPDX-License-Identifier: Apache-2.0
"""How a process of a run on many machines comes to the others: its connections, and the node it is."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from orchestra import run, topology
from orchestra.board import Report, name_of
from orchestra.errors import ClusterError, OrchestraError, Stalled, WorkerLost
from orchestra.events import EventLog
from orchestra.job import Job
from orchestra.launch.joined import JoinedTransport
from orchestra.launch.living import Tell, live
from orchestra.node import Comm, Node
from orchestra.ops import Sleep, Traffic
from orchestra.transports.exchange import Exchange
from orchestra.transports.measuring import Found, agree, measure
from orchestra.transports.meeting import Meeting, interface_to
from orchestra.transports.memory import Plan
from orchestra.transports.neighbours import arrange
from orchestra.transports.token import Token

if TYPE_CHECKING:
    from orchestra.attached import Attached

_RUNS = itertools.count()  # of this process: a script may train several times
HOME = 0  # the process that keeps the run folder
_SLACK = 4096  # bytes by which a message may be longer than the model


class Party:
    """This process's connections, and the node it is. `most`: bytes of what else is sent than the model."""

    def __init__(self, job: Job, x0: Tensor, cluster: Attached, about: dict[str, Any], *, most: int = 0) -> None:
        self.cluster, self.x0 = cluster, x0
        traffic = Traffic()
        token = cluster.token()
        try:
            connections = _meet(cluster, token, job.workers + job.servers, about)
        finally:
            cluster.forget_token()  # a run that did not come together must not leave it to the next
        self._host = next(iter(connections.values())).getsockname()[0] if connections else "127.0.0.1"
        self.order, self.links = _arrange(cluster, job, connections)
        self.rank = self.order.index(cluster.place.rank)
        largest = max(most, x0.numel() * x0.element_size()) + _SLACK
        nodes = {self.order.index(process): sock for process, sock in connections.items()}
        arranged = arrange(self.rank, nodes, token, longest=largest, grace=cluster.grace)
        self.exchange = Exchange(
            self.rank,
            job.workers,
            token.run(),
            nodes,
            largest=largest,
            patience=cluster.patience,
            traffic=traffic,
            summed=cluster.trusted,
            near=job.near(self.rank) - arranged.apart,  # what does not leave a machine costs nothing
            arranged=arranged,
        )
        self.plan = Plan(job.workers, job.servers, x0.numel(), x0.dtype, job.shares_x)
        self.transport = JoinedTransport(self.rank, self.plan, self.exchange, traffic)
        self.name = name_of(self.rank, job.workers)

    def require_everybody(self) -> None:
        """Raise if the connection to anybody broke: nobody leaves before the run is over."""
        for node, cause in self.exchange.lost.items():
            raise WorkerLost(name_of(node, self.plan.workers), cause)

    def live(self, job: Job, *, tell: Tell, show: Callable[[Report], None], asked: float) -> bool:
        """Train or serve as this node; gives whether the run was broken off."""
        make_node = partial(self._make_node, job)
        words = self.transport.words
        return live(job, self.transport, words, self.plan, make_node=make_node, tell=tell, show=show, asked=asked)

    def _make_node(self, job: Job, comm: Comm, log: EventLog) -> Node:
        """The worker or server that this process is."""
        if self.rank >= job.workers:
            return run.server(job, self.rank, comm, log, self.x0[job.range_of(self.rank)].clone())
        device = torch.device("cpu")
        if job.device == "cuda":
            device = torch.device("cuda", self.cluster.place.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
        if job.torch_means:
            from orchestra.transports.torch_means import TorchMeans, tcp_store  # not needed otherwise

            store = tcp_store(self.exchange, self.rank, job.workers, self._host)
            patience = self.cluster.patience
            self.transport.means = TorchMeans(store, self.rank, job.workers, device, host=self._host, patience=patience)
        x = self.x0.to(device, copy=True)
        return run.worker(job, self.rank, comm, log, x, torch.zeros_like(x))

    def cause_of(self, error: BaseException) -> BaseException:
        """What broke a mean off, if that is known: torch does not say who was lost."""
        if isinstance(error, Stalled):
            try:
                for _ in range(20):
                    self.exchange.sleep(Sleep(0.05))
                    self.require_everybody()
            except OrchestraError as cause:
                return cause
        return error

    def close(self) -> None:
        """Send what is left, and hang up."""
        if self.transport.means is not None:
            self.transport.means.close()
        self.exchange.close()

    def give_up(self, said: dict[str, Any]) -> None:
        """Tell everybody that this process ends the run, and hang up."""
        with contextlib.suppress(OrchestraError):
            self.exchange.tell_all({"kind": "stopped", **said})
        self.close()


def _arrange(
    cluster: Attached, job: Job, connections: dict[int, socket.socket]
) -> tuple[list[int], topology.Links | None]:
    """The process of every node; and what was measured to choose, where there is anything to choose."""
    rank, size = cluster.place.rank, len(connections) + 1
    if not isinstance(cluster.order, str):
        return list(cluster.order), None
    if cluster.order == "given" or size < 3 or cluster.place.loopback:
        return list(range(size)), None
    links: topology.Links | None = None

    def decide(found: list[dict[int, Found]]) -> list[int]:
        nonlocal links
        nothing = (0.0, math.inf)
        table = [[row.get(node, nothing) for node in range(size)] for row in found]
        links = topology.Links(
            tuple(tuple(latency for latency, _ in row) for row in table),
            tuple(tuple(rate for _, rate in row) for row in table),
        )
        return topology.arrange(links.cost(4 * job.parameters / size), job.servers)

    order = agree(rank, connections, measure(rank, connections), decide)
    if sorted(order) != list(range(size)) or order[0] != HOME:
        raise ClusterError(f"process 0 decided on an order that cannot be: {order}")
    return order, links


def _meet(cluster: Attached, token: Token, size: int, about: dict[str, Any]) -> dict[int, socket.socket]:
    """Connections to all the others."""
    place = cluster.place
    store = _store(cluster)
    if place.rank == HOME:
        host = "127.0.0.1" if place.loopback else _own_address(place.host)
        meeting = Meeting(HOME, token, about, host=host, port=0 if store is not None else place.port)
        if store is not None:
            store.set(_door_key(), str(meeting.address[1]))
        return meeting.welcome(size, patience=cluster.patience)
    port = place.port if store is None else int(store.get(_door_key()))
    host = interface_to((place.host, port))
    return Meeting(place.rank, token, about, host=host).join((place.host, port), patience=cluster.patience)


def _store(cluster: Attached) -> Any:
    """torchrun's own store, where it listens at MASTER_PORT: all it is told is a port."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    place = cluster.place
    return TCPStore(place.host, place.port, is_master=False, timeout=timedelta(seconds=cluster.patience))


def _door_key() -> str:
    return f"orchestra/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_RUNS)}"


def _own_address(host: str) -> str:
    """Where to listen: at the address others are given, unless that is a name in front of this machine."""
    address = socket.gethostbyname(host)
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return "0.0.0.0"  # a service of Kubernetes, say
    return address
