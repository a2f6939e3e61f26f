# SPDX-License-Identifier: Apache-2.0
"""One process's part in a run on many machines: its connections to the others, and the node that it is."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from orchestra.core.comm import Comm
from orchestra.core.node import Node
from orchestra.core.ops import Sleep, Traffic
from orchestra.engine import environment, node_loop
from orchestra.engine.node_process import Tell, run_node
from orchestra.engine.spec import RunSpec
from orchestra.errors import ClusterError, OrchestraError, Stalled
from orchestra.runs.events import EventLog, Reconnected
from orchestra.runs.status import NodeStatus, name_of
from orchestra.worlds.sockets import rank_order
from orchestra.worlds.sockets.addresses import is_loopback, plain, print_notice, resolve, show, where_to_listen
from orchestra.worlds.sockets.auth import Token
from orchestra.worlds.sockets.control_messages import COORDINATOR, LONGEST
from orchestra.worlds.sockets.link_probe import LinkSpeed, agree, announce, measure
from orchestra.worlds.sockets.messenger import Messenger
from orchestra.worlds.sockets.pairing import arrange
from orchestra.worlds.sockets.rendezvous import Rendezvous, closed_on_failure
from orchestra.worlds.sockets.replicated_state import RunTransport

if TYPE_CHECKING:
    from orchestra.clusters.attached import Attached
    from orchestra.worlds.torch_collectives import TorchCollectives

SIGNAL_ECHO = 2.0  # seconds in which a second signal counts as the first: a terminal and torchrun both pass Ctrl-C on
REPORT_EVERY = 0.25  # seconds between two reports of a node's status
LONGEST_TRACEBACK = 10_000  # characters

_RUNS = itertools.count()  # numbers the runs of this process: a script may train several times
_SLICE = 0.01  # seconds between two checks whether torch is ready
_SLACK = 4096  # bytes by which a message may exceed the model


class Session:
    """This process's connections and its node. `most`: bytes of the longest message that is not the model."""

    def __init__(self, spec: RunSpec, x0: Tensor, cluster: Attached, about: dict[str, Any], *, most: int = 0) -> None:
        self.cluster, self.x0 = cluster, x0
        self._log: EventLog | None = None
        traffic = Traffic()
        token = cluster.token()
        if cluster.trusted and cluster.place.rank == COORDINATOR and spec.workers + spec.servers > 1:
            print_notice(_trust_notice(spec))
        try:
            connections = _connect(cluster, token, spec.workers + spec.servers, about)
        finally:
            cluster.forget_token()  # also if the processes did not connect: the next run must not find it
        self.host = _own_address(connections)
        largest = max(most, x0.numel() * x0.element_size()) + _SLACK
        with closed_on_failure(connections):
            self.order, self.links = _arrange(cluster, spec, connections)
            self.rank = self.order.index(cluster.place.rank)
            nodes = {self.order.index(process): sock for process, sock in connections.items()}
            pairing = arrange(self.rank, nodes, token, longest=largest, grace=cluster.grace, patience=cluster.patience)
        self.messenger = Messenger(
            self.rank,
            spec.workers,
            token.run(),
            nodes,
            largest=largest,
            patience=cluster.patience,
            traffic=traffic,
            summed=cluster.trusted,
            near=spec.near(self.rank) - pairing.remote,  # messages within a machine do not count as traffic
            pairing=pairing,
        )
        self.workers = spec.workers
        self.transport = RunTransport(self.rank, spec.workers, spec.workers + spec.servers, self.messenger, traffic)
        self.name = name_of(self.rank, spec.workers)

    def require_all(self) -> None:
        """Raise if a connection broke for good: no process leaves before the run is over."""
        for error in self.messenger.lost.values():
            raise error.with_traceback(None)

    def run_node(self, spec: RunSpec, *, tell: Tell, show: Callable[[NodeStatus], None], asked: float) -> bool:
        """Train or serve as this node; return whether the run was interrupted."""
        make_node = partial(self._make_node, spec)
        control = self.transport.control
        return run_node(spec, self.transport, control, make_node=make_node, tell=tell, show=show, asked=asked)

    def _make_node(self, spec: RunSpec, comm: Comm, log: EventLog) -> Node:
        """Return the worker or server that this process is."""
        self._log = log
        if self.rank >= spec.workers:
            return node_loop.server(spec, self.rank, comm, log, self.x0[spec.range_of(self.rank)].clone())
        device = torch.device("cpu")
        if spec.device == "cuda":
            device = torch.device("cuda", self.cluster.place.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
        if spec.uses_torch_collectives:
            self._connect_torch(spec.workers, device)
        x = self.x0.to(device, copy=True)
        return node_loop.worker(spec, self.rank, comm, log, x, torch.zeros_like(x))

    def log_reconnected(self, peer: int, seconds: float, cause: str) -> None:
        """Write to this node's log, once it has one, that a broken connection was replaced."""
        if self._log is not None:
            self._log.write(Reconnected(self.transport.now(), self.rank, peer, seconds, cause))

    def _connect_torch(self, workers: int, device: torch.device) -> None:
        """Connect torch in a thread, and read messages meanwhile: torch does not notice that a process failed."""
        from orchestra.worlds.torch_collectives import TorchCollectives, tcp_store  # not needed otherwise

        messenger, patience = self.messenger, self.cluster.patience
        store = tcp_store(messenger, self.rank, workers, self.host, patience)
        made: Future[TorchCollectives] = Future()

        def connect() -> None:
            try:
                if device.type == "cuda":
                    torch.cuda.set_device(device)  # it is set for each thread
                means = TorchCollectives(
                    store, self.rank, workers, device, host=self.host, patience=patience, on_waiting=messenger.poll
                )
                made.set_result(means)
            except BaseException as error:
                made.set_exception(error)

        threading.Thread(target=connect, name="torch", daemon=True).start()
        while not made.done():
            messenger.sleep(Sleep(_SLICE))
            messenger.poll()
        self.transport.means = made.result()

    def cause_of(self, error: BaseException) -> BaseException:
        """Return why a mean failed, if another process was lost: torch does not say which."""
        if isinstance(error, Stalled):
            try:
                for _ in range(5):
                    self.messenger.watch_connections(1.0)
                    self.require_all()
            except OrchestraError as cause:
                return cause
        return error

    def close(self) -> None:
        """Send what is left and close all connections, after a moment even if other processes do not read."""
        if self.transport.means is not None:
            self.transport.means.close()
        self.messenger.close()

    def abort(self, message: str, code: int) -> None:
        """Tell all other processes that this one ends the run, and close the connections."""
        with contextlib.suppress(OrchestraError):
            self.messenger.send_control_to_all({"kind": "stopped", "message": message[-LONGEST:], "code": code})
        self.close()


def _trust_notice(spec: RunSpec) -> str:
    """Say what it means that the network is trusted."""
    means = " Averages by torch.distributed do not even check the token." if spec.uses_torch_collectives else ""
    return (
        "the network is trusted: connections are authenticated, but not encrypted. Any machine on the network can read "
        f"the run's messages and change them on their way.{means}"
    )


def _arrange(
    cluster: Attached, spec: RunSpec, connections: dict[int, socket.socket]
) -> tuple[list[int], rank_order.MeasuredLinks | None]:
    """Return the process of every node, and the measured links if the order was chosen by them."""
    rank, size = cluster.place.rank, len(connections) + 1
    if not isinstance(cluster.order, str):
        return list(cluster.order), None
    if cluster.order == "given" or size < 3:
        return list(range(size)), None
    # Process 0 decides: whether all processes are on one machine may look different from another process.
    kept = environment.keeps_order()
    choose = not kept and not cluster.place.loopback(cluster.patience) if rank == COORDINATOR else None
    if not announce(rank, connections, choose):
        return list(range(size)), None
    links: rank_order.MeasuredLinks | None = None

    def decide(found: list[dict[int, LinkSpeed]]) -> list[int]:
        nonlocal links
        to_itself = LinkSpeed(latency=0.0, rate=math.inf)
        table = [[row.get(node, to_itself) for node in range(size)] for row in found]
        links = rank_order.MeasuredLinks(
            tuple(tuple(link.latency for link in row) for row in table),
            tuple(tuple(link.rate for link in row) for row in table),
        )
        return rank_order.arrange(links.cost(4 * spec.parameters / size), spec.servers)

    order = agree(rank, connections, measure(rank, connections), decide)
    if sorted(order) != list(range(size)) or order[0] != COORDINATOR:
        raise ClusterError(f"process 0 decided on an order that is not one of all processes: {order}")
    if kept and order.index(rank) != rank:
        message = f"orchestra.rank() returned {rank} here, but process 0 did not call it and made this process node"
        raise ClusterError(f"{message} {order.index(rank)}. Call it in every process, or in none.")
    return order, links


def _connect(cluster: Attached, token: Token, size: int, about: dict[str, Any]) -> dict[int, socket.socket]:
    """Connect to all other processes."""
    place = cluster.place
    store = _store(cluster)
    made = partial(Rendezvous, place.rank, token, about, one_machine=place.one_machine, notify=print_notice)
    if place.rank == COORDINATOR:
        found = resolve(place.host, place.port, patience=cluster.patience, notify=print_notice)
        rendezvous = made(host=where_to_listen(found, one_machine=place.one_machine), port=0 if store else place.port)
        if store is not None:
            with contextlib.ExitStack() as failing, _torchrun(cluster):
                failing.callback(rendezvous.close)
                store.set(_port_key(), str(rendezvous.address[1]))
                failing.pop_all()
        return rendezvous.host_all(size, patience=cluster.patience, known_as=(place.host, rendezvous.address[1]))
    port = place.port
    if store is not None:
        with _torchrun(cluster):
            port = int(store.get(_port_key()))
    return made(host=None).join((place.host, port), patience=cluster.patience)


def _store(cluster: Attached) -> Any:
    """Return the store that already listens at MASTER_PORT, torchrun's or a process group's; it keeps only a port."""
    place = cluster.place
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and not _is_of_group(place.port):
        return None
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with _torchrun(cluster):
        return TCPStore(place.host, place.port, is_master=False, timeout=timedelta(seconds=cluster.patience))


def _is_of_group(port: int) -> bool:
    """Whether a process group exists whose store has this port."""
    from torch import distributed  # not needed otherwise

    if not distributed.is_available() or not distributed.is_initialized():
        return False
    store = distributed.distributed_c10d._get_default_store()
    while isinstance(store, distributed.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    return isinstance(store, distributed.TCPStore) and store.port == port  # type: ignore[attr-defined]


@contextlib.contextmanager
def _torchrun(cluster: Attached) -> Iterator[None]:
    """Turn errors of torchrun's store into errors that name the processes."""
    try:
        yield
    except RuntimeError as error:
        place = cluster.place
        raise ClusterError(
            f"process {place.rank} did not find the port of process 0 in torchrun's store at "
            f"{show((place.host, place.port))} within {cluster.patience:g} s: {str(error).splitlines()[0]}. Was "
            "torchrun started on every machine with the same --rdzv-endpoint, and did process 0 print an error?"
        ) from None


def _port_key() -> str:
    return f"orchestra/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_RUNS)}"


def _own_address(connections: dict[int, socket.socket]) -> str:
    """Return the address by which other machines reach this one; its own processes may use the loopback address."""
    mine = [plain(sock.getsockname()[0]) for sock in connections.values()]
    return min(mine, key=is_loopback, default="127.0.0.1")
