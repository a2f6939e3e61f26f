# SPDX-License-Identifier: Apache-2.0
"""How a process of a run on many machines comes to the others: its connections, and the node it is."""

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
from orchestra.worlds.sockets.addresses import door_of, is_loopback, plain, resolve, show, speak
from orchestra.worlds.sockets.auth import Token
from orchestra.worlds.sockets.control_messages import HOME, LONGEST
from orchestra.worlds.sockets.link_probe import LinkSpeed, agree, announce, measure
from orchestra.worlds.sockets.messenger import Messenger
from orchestra.worlds.sockets.pairing import arrange
from orchestra.worlds.sockets.rendezvous import Rendezvous, closed_on_failure
from orchestra.worlds.sockets.replicated_state import RunTransport

if TYPE_CHECKING:
    from orchestra.clusters.attached import Attached
    from orchestra.worlds.torch_collectives import TorchCollectives

SIGNAL_ECHO = 2.0  # seconds in which a second signal is the same: a terminal and torchrun both pass Ctrl-C on
REPORT_EVERY = 0.25  # seconds between two reports of a node's status
LONGEST_TRACEBACK = 10_000  # characters

_RUNS = itertools.count()  # of this process: a script may train several times
_GLANCE = 0.01  # seconds between two looks whether torch is ready
_SLACK = 4096  # bytes by which a message may be longer than the model


class Session:
    """This process's connections, and the node it is. `most`: bytes of what else is sent than the model."""

    def __init__(self, spec: RunSpec, x0: Tensor, cluster: Attached, about: dict[str, Any], *, most: int = 0) -> None:
        self.cluster, self.x0 = cluster, x0
        self._log: EventLog | None = None
        traffic = Traffic()
        token = cluster.token()
        if cluster.trusted and cluster.place.rank == HOME and spec.workers + spec.servers > 1:
            speak(_trusting(spec))
        try:
            connections = _meet(cluster, token, spec.workers + spec.servers, about)
        finally:
            cluster.forget_token()  # a run that did not come together must not leave it to the next
        self.host = _own_address(connections)
        largest = max(most, x0.numel() * x0.element_size()) + _SLACK
        with closed_on_failure(connections):
            self.order, self.links = _arrange(cluster, spec, connections)
            self.rank = self.order.index(cluster.place.rank)
            nodes = {self.order.index(process): sock for process, sock in connections.items()}
            arranged = arrange(self.rank, nodes, token, longest=largest, grace=cluster.grace, patience=cluster.patience)
        self.messenger = Messenger(
            self.rank,
            spec.workers,
            token.run(),
            nodes,
            largest=largest,
            patience=cluster.patience,
            traffic=traffic,
            summed=cluster.trusted,
            near=spec.near(self.rank) - arranged.apart,  # what does not leave a machine costs nothing
            arranged=arranged,
        )
        self.workers = spec.workers
        self.transport = RunTransport(self.rank, spec.workers, spec.workers + spec.servers, self.messenger, traffic)
        self.name = name_of(self.rank, spec.workers)

    def require_everybody(self) -> None:
        """Raise if the connection to anybody broke: nobody leaves before the run is over."""
        for error in self.messenger.lost.values():
            raise error.with_traceback(None)

    def run_node(self, spec: RunSpec, *, tell: Tell, show: Callable[[NodeStatus], None], asked: float) -> bool:
        """Train or serve as this node; gives whether the run was broken off."""
        make_node = partial(self._make_node, spec)
        control = self.transport.control
        return run_node(spec, self.transport, control, make_node=make_node, tell=tell, show=show, asked=asked)

    def _make_node(self, spec: RunSpec, comm: Comm, log: EventLog) -> Node:
        """The worker or server that this process is."""
        self._log = log
        if self.rank >= spec.workers:
            return node_loop.server(spec, self.rank, comm, log, self.x0[spec.range_of(self.rank)].clone())
        device = torch.device("cpu")
        if spec.device == "cuda":
            device = torch.device("cuda", self.cluster.place.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
        if spec.torch_means:
            self._connect_torch(spec.workers, device)
        x = self.x0.to(device, copy=True)
        return node_loop.worker(spec, self.rank, comm, log, x, torch.zeros_like(x))

    def log_reconnected(self, peer: int, seconds: float, cause: str) -> None:
        """Write to this node's log, once it has one, that a broken connection was replaced."""
        if self._log is not None:
            self._log.write(Reconnected(self.transport.now(), self.rank, peer, seconds, cause))

    def _connect_torch(self, workers: int, device: torch.device) -> None:
        """Connect torch beside hearing what the others say: who fails meanwhile would be waited for in vain."""
        from orchestra.worlds.torch_collectives import TorchCollectives, tcp_store  # not needed otherwise

        messenger, patience = self.messenger, self.cluster.patience
        store = tcp_store(messenger, self.rank, workers, self.host, patience)
        made: Future[TorchCollectives] = Future()

        def connect() -> None:
            try:
                if device.type == "cuda":
                    torch.cuda.set_device(device)  # each thread has one of its own
                means = TorchCollectives(
                    store, self.rank, workers, device, host=self.host, patience=patience, on_waiting=messenger.poll
                )
                made.set_result(means)
            except BaseException as error:
                made.set_exception(error)

        threading.Thread(target=connect, name="torch", daemon=True).start()
        while not made.done():
            messenger.sleep(Sleep(_GLANCE))
            messenger.poll()
        self.transport.means = made.result()

    def cause_of(self, error: BaseException) -> BaseException:
        """What broke a mean off, if that is known: torch does not say who was lost."""
        if isinstance(error, Stalled):
            try:
                for _ in range(5):
                    self.messenger.watch_connections(1.0)
                    self.require_everybody()
            except OrchestraError as cause:
                return cause
        return error

    def close(self) -> None:
        """Send what is left, and hang up: after a moment in any case, however many do not listen."""
        if self.transport.means is not None:
            self.transport.means.close()
        self.messenger.close()

    def give_up(self, said: dict[str, Any]) -> None:
        """Tell everybody that this process ends the run, and hang up."""
        with contextlib.suppress(OrchestraError):
            self.messenger.send_control_to_all({"kind": "stopped", **said, "message": said["message"][-LONGEST:]})
        self.close()


def _trusting(spec: RunSpec) -> str:
    """What it means that the network is trusted: nobody should find out later."""
    means = " Means by torch.distributed do not even ask for the token." if spec.torch_means else ""
    return (
        "the network is trusted: connections are authenticated, but not encrypted. Whoever is on it can read what the "
        f"run sends, and change it on the way.{means}"
    )


def _arrange(
    cluster: Attached, spec: RunSpec, connections: dict[int, socket.socket]
) -> tuple[list[int], rank_order.MeasuredLinks | None]:
    """The process of every node; and what was measured to choose, where there is anything to choose."""
    rank, size = cluster.place.rank, len(connections) + 1
    if not isinstance(cluster.order, str):
        return list(cluster.order), None
    if cluster.order == "given" or size < 3:
        return list(range(size)), None
    # What one process takes for another machine may be its own to the next.
    kept = environment.keeps_order()
    choose = not kept and not cluster.place.loopback(cluster.patience) if rank == HOME else None
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
    if sorted(order) != list(range(size)) or order[0] != HOME:
        raise ClusterError(f"process 0 decided on an order that cannot be: {order}")
    if kept and order.index(rank) != rank:
        message = f"orchestra.rank() was {rank} here, but process 0 did not ask, and made this process node"
        raise ClusterError(f"{message} {order.index(rank)}. Ask for the rank in every process, or in none.")
    return order, links


def _meet(cluster: Attached, token: Token, size: int, about: dict[str, Any]) -> dict[int, socket.socket]:
    """Connections to all the others."""
    place = cluster.place
    store = _store(cluster)
    made = partial(Rendezvous, place.rank, token, about, one_machine=place.one_machine, tell=speak)
    if place.rank == HOME:
        found = resolve(place.host, place.port, patience=cluster.patience, tell=speak)
        meeting = made(host=door_of(found, one_machine=place.one_machine), port=0 if store else place.port)
        if store is not None:
            with contextlib.ExitStack() as failing, _torchrun(cluster):
                failing.callback(meeting.close)
                store.set(_door_key(), str(meeting.address[1]))
                failing.pop_all()
        return meeting.welcome(size, patience=cluster.patience, known_as=(place.host, meeting.address[1]))
    port = place.port
    if store is not None:
        with _torchrun(cluster):
            port = int(store.get(_door_key()))
    return made(host=None).join((place.host, port), patience=cluster.patience)


def _store(cluster: Attached) -> Any:
    """The store that listens at MASTER_PORT already, torchrun's or a process group's: all it is told is a port."""
    place = cluster.place
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and not _is_of_group(place.port):
        return None
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with _torchrun(cluster):
        return TCPStore(place.host, place.port, is_master=False, timeout=timedelta(seconds=cluster.patience))


def _is_of_group(port: int) -> bool:
    """Whether a process group was opened before, whose store has this port."""
    from torch import distributed  # not needed otherwise

    if not distributed.is_available() or not distributed.is_initialized():
        return False
    store = distributed.distributed_c10d._get_default_store()
    while isinstance(store, distributed.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    return isinstance(store, distributed.TCPStore) and store.port == port  # type: ignore[attr-defined]


@contextlib.contextmanager
def _torchrun(cluster: Attached) -> Iterator[None]:
    """Errors of its store, which names nobody."""
    try:
        yield
    except RuntimeError as error:
        place = cluster.place
        raise ClusterError(
            f"process {place.rank} did not hear through torchrun's store at {show((place.host, place.port))} where "
            f"process 0 is, within {cluster.patience:g} s: {str(error).splitlines()[0]}. Was torchrun started on every "
            "machine with the same --rdzv-endpoint, and did process 0 say what kept it?"
        ) from None


def _door_key() -> str:
    return f"orchestra/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_RUNS)}"


def _own_address(connections: dict[int, socket.socket]) -> str:
    """By which the others reach this machine: those on it may have come over the loopback."""
    mine = [plain(sock.getsockname()[0]) for sock in connections.values()]
    return min(mine, key=is_loopback, default="127.0.0.1")
