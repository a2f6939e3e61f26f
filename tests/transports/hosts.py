# SPDX-License-Identifier: Apache-2.0
"""Nodes in processes of their own, connected by sockets and set up once: all run the same function at once."""

from __future__ import annotations

import multiprocessing as mp
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from tests.zoo import train
from torch import Tensor

from orchestra.clusters.runners import RUNNERS
from orchestra.core.comm import Comm
from orchestra.core.ops import Group, Traffic
from orchestra.engine import node_loop
from orchestra.engine.cluster import Cluster, Device, Resources
from orchestra.engine.middleware import Metered
from orchestra.engine.runner import Ending, PreparedRun, Runner
from orchestra.runs.events import EventLog
from orchestra.worlds.sockets.auth import Token
from orchestra.worlds.sockets.messenger import Messenger
from orchestra.worlds.sockets.rendezvous import Rendezvous
from orchestra.worlds.sockets.transport import SocketTransport
from orchestra.worlds.torch_collectives import TorchCollectives, tcp_store

TOKEN = Token("0123456789abcdef" * 2, trusted=True)
HOST = "127.0.0.1"
PATIENCE = 20.0


@dataclass
class Machine:
    """What a process has when it is asked to do something."""

    rank: int
    workers: Group
    transport: SocketTransport
    means: TorchCollectives


def _live(rank: int, size: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    rendezvous = Rendezvous(rank, TOKEN, {}, host=HOST)
    pipe.send(rendezvous.address)
    traffic = Traffic()
    sockets = rendezvous.connect_all(pipe.recv(), patience=PATIENCE)
    messenger = Messenger(
        rank, size, TOKEN.run(), sockets, largest=1 << 24, patience=PATIENCE, traffic=traffic, summed=True
    )  # fmt: skip
    means = TorchCollectives(
        tcp_store(messenger, rank, size, HOST, PATIENCE), rank, size, torch.device("cpu"), host=HOST, patience=PATIENCE
    )
    machine = Machine(rank, Group(tuple(range(size))), SocketTransport(rank, size, messenger, traffic), means)
    pipe.send(None)
    while (asked := pipe.recv()) is not None:
        what, given = asked
        try:
            pipe.send(what(machine, *given))
        except Exception as error:
            pipe.send(error)
    os._exit(0)


class Hosts:
    """All of them."""

    def __init__(self, pipes: list[Connection], processes: list[Any]) -> None:
        self._pipes, self.processes = pipes, processes

    def all(self, what: Callable[..., Any], *given: Any) -> list[Any]:
        """What each answers, in the order of the ranks; raises the first error."""
        answers = self.answers(what, *given)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def answers(self, what: Callable[..., Any], *given: Any) -> list[Any]:
        """The same, with errors as answers; None of those that died."""
        for pipe in self._pipes:
            pipe.send((what, given))
        return [_receive(pipe) for pipe in self._pipes]


def _receive(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return None


@contextmanager
def hosts(size: int) -> Iterator[Hosts]:
    """Processes that know each other."""
    context = mp.get_context("spawn")
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_live, args=(rank, size, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        addresses = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send(addresses)
        for pipe in pipes:
            pipe.recv()
        yield Hosts(pipes, processes)
    finally:
        for pipe in pipes:
            with suppress(OSError):  # of those that died
                pipe.send(None)
        for process in processes:
            process.join(5)
            process.kill()
            process.join()


# A run, of which each process is one worker.


@dataclass
class Trained:
    """What became of it."""

    x: Tensor
    sent: int
    skipped: int
    began: int  # buckets that were under way before a gradient was whole


class _Over(Exception):
    """The way out of `train`, which would go on to look for the model."""


@dataclass(frozen=True, kw_only=True)
class Host(Cluster):
    """One worker of several."""

    machine: Machine
    by_torch: bool
    workers: int = 3
    device: Device = "cpu"

    def resources(self, nodes: int) -> Resources:
        return replace(super().resources(nodes), uses_torch_collectives=self.by_torch)


@dataclass(frozen=True)
class HostRunner(Runner):
    cluster: Host

    def carry_out(self, prepared: PreparedRun) -> Ending:
        spec, machine, x0 = prepared.spec, self.cluster.machine, prepared.x0
        machine.transport.means = machine.means if self.cluster.by_torch else None
        meter = Metered(machine.transport)
        with EventLog(spec.run / "events.jsonl", print) as log:
            node = node_loop.worker(spec, machine.rank, Comm(meter, spec.view), log, x0.clone(), torch.zeros_like(x0))
            life = node_loop.NodeRuntime(spec, node, meter, log, print, lambda row: None)
            before, began = machine.transport.traffic.sent, machine.means.early
            while not node_loop.spent(life):
                spec.strategy.step(node, life.state)
        sent = machine.transport.traffic.sent - before
        raise _Over(Trained(node.x, sent, node.skipped, machine.means.early - began))


RUNNERS[Host] = HostRunner


def trained(machine: Machine, out: Path, by_torch: bool, strategy: str, given: dict[str, Any]) -> Trained:
    """Train as one worker of all."""
    cluster = Host(machine=machine, by_torch=by_torch, workers=len(machine.workers))
    try:
        train(strategy, out / f"{machine.rank}-{by_torch}-{os.urandom(4).hex()}", cluster=cluster, **given)
    except _Over as over:
        found: Trained = over.args[0]
        return found
    raise AssertionError
