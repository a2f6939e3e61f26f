# SPDX-License-Identifier: Apache-2.0
"""The loop of a server, and the interface of a consistency, which decides when it updates and answers.

    worker                                              server of range R
    repeat                                              for each message
        ask the server of R for x[R], for every R           a push: take it
        g ← ∇f(x)                                           a question: note its worker
        push g[R] to the server of R, for every R           a departure: do not wait for that worker any more
                                                            update x if due; answer the workers that may read it
                                                            too few workers are left for an update: answer OVER

A worker that receives OVER skips its mini-batches from then on, since their gradients would be dropped. Gradients that
a server still holds stay unused. The summary counts both.

A worker that has to wait does so before its step, when its state is that after its last step: there it can be saved.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from torch import Tensor

from orchestra.core.node import Node
from orchestra.core.ops import Departed, Handle, Message
from orchestra.core.strategy import Updates
from orchestra.errors import Problem
from orchestra.strategies.parameter_server.range_clock import Piece

QUESTION, NOTICE, UNCHANGED, OVER = 1, 2, 3, 4  # tags of messages that carry no vector


class Push(NamedTuple):
    """A gradient that a server keeps for later."""

    source: int
    x: Tensor
    version: int  # of the range at which it was computed
    weight: float
    clock: int = 0  # of its worker: how many it had pushed, this one included


@dataclass
class ServerState:
    """A worker's versions of the ranges that it last read; a server's version of its own range, and what it keeps."""

    versions: list[int]
    pushed: list[int] = field(default_factory=list)  # a worker's clock: its pushes to each server
    clocks: list[list[Piece]] = field(default_factory=list)  # each worker's range clock, on a server
    held: list[Push] = field(default_factory=list)
    sent: list[Tensor] = field(default_factory=list)  # what each worker last read
    squares: list[Tensor] = field(default_factory=list)  # a mean of g²
    rest: list[Tensor] = field(default_factory=list)  # what a filter has not pushed yet, by server
    seen: list[Tensor] = field(default_factory=list)  # x as each worker has it, with a filter
    keys_sent: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # last sent, by node and range
    keys_received: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # last received


class Correction:
    """An adjustment of stale gradients before they are applied; by default none."""

    def init(self, node: Node, s: ServerState) -> None:
        """Initialise the correction's part of a server's state."""

    def correct(self, node: Node, s: ServerState, push: Push) -> Tensor:
        """Return the gradient to apply."""
        return push.x

    def answered(self, node: Node, s: ServerState, worker: int) -> None:
        """Note that a worker is about to read x."""


class Consistency(ABC):
    """A rule that decides when a server updates and answers."""

    first: ClassVar[int] = 0  # the version a worker has before it has read any

    @property
    def updates(self) -> Updates:
        """How gradients become updates."""
        return Updates(synchronous=False, stale=True, clip="mean")

    def problems(self, workers: int, servers: int) -> Iterator[Problem]:
        """Yield the problems of this rule with that many workers and servers."""
        return iter(())

    @abstractmethod
    def work(self, node: Node, s: ServerState) -> None:
        """Do a worker's step."""

    @abstractmethod
    def serve(self, node: Node, s: ServerState, correction: Correction) -> None:
        """Serve until every worker has left."""


@dataclass
class Service:
    """A server and its view of the workers."""

    node: Node
    s: ServerState
    correction: Correction
    active: set[int] = field(init=False)  # workers that have not left
    asking: dict[int, int] = field(default_factory=dict)  # workers that wait for x, with the versions they have
    ahead: dict[int, float] = field(default_factory=dict)  # the progress at which each of them continues
    warned: set[int] = field(default_factory=set)  # workers that were sent a NOTICE of a newer x

    def __post_init__(self) -> None:
        self.active = {*self.node.comm.workers.members}
        self.s.held = [Push(*held) for held in self.s.held]

    @property
    def version(self) -> int:
        """Updates of this range so far."""
        return self.s.versions[0]

    def clock(self, worker: int) -> int:
        """Return how many whole pushes of a worker have arrived."""
        return min(t for _, _, t in self.s.clocks[worker])

    def hold(self, push: Message) -> None:
        """Keep a gradient."""
        self.s.held.append(Push(push.source, push.x.clone(), push.version, push.weight, push.stamp.clock))

    def apply(self, pushes: list[Push], *, by: int = 1) -> None:
        """Update with the mean of some gradients, in the order of their workers, and drop them.

        `by`: the divisor of each gradient after its correction.
        """
        node, s = self.node, self.s
        ordered = sorted(pushes, key=lambda push: (push.source, push.clock))
        fixed = [self.correction.correct(node, s, push) for push in ordered]
        pushed = [
            Message(push.source, x if by == 1 else x / by, push.version, push.weight)
            for push, x in zip(ordered, fixed, strict=True)
        ]
        for push in ordered:
            node.log("staleness", self.version - push.version)
        if samples := node.average(pushed):
            node.update(node.g)
            node.samples += int(samples)
        s.versions[0] += 1
        used = {id(push) for push in pushes}
        s.held = [push for push in s.held if id(push) not in used]

    def answer(self, worker: int, *, over: bool) -> None:
        """Send x to a worker, or only a tag if the worker has it already or no update can follow any more (`over`)."""
        self.node.comm.known[worker] = self.ahead.pop(worker)  # not before, since the worker waits
        version = self.asking.pop(worker)
        if over or version == self.version:
            self.node.comm.send(worker, self.node.x[:0], version=version, tag=OVER if over else UNCHANGED)
            return
        self.correction.answered(self.node, self.s, worker)
        self.node.comm.send(worker, self.node.x, version=self.version)


class OnRequest(Consistency):
    """A consistency in which workers ask for x before each step."""

    first = -1

    def work(self, node: Node, s: ServerState) -> None:
        """Pull, compute, push."""
        if pull(node, s):
            push(node, s, node.gradient())
        else:
            pass_over(node)

    def serve(self, node: Node, s: ServerState, correction: Correction) -> None:
        """Take every message, update when due, and answer the workers that may read."""
        at = Service(node, s, correction)
        for came in node.comm.inbox(departures=True):
            if isinstance(came, Departed):
                at.active.discard(came.source)
                at.asking.pop(came.source, None)
            elif came.tag == QUESTION:
                at.asking[came.source], at.ahead[came.source] = came.version, came.progress
                at.warned.discard(came.source)
            else:
                self.take(at, came)
            self.settle(at)
            over = not self.can_update(at)
            for worker in [w for w, version in at.asking.items() if over or self.may_read(at, w, version)]:
                at.answer(worker, over=over)
        if s.held:  # for an update that will not follow
            node.log("dropped", len(s.held))

    def take(self, at: Service, push: Message) -> None:
        """Take a gradient that has arrived."""
        at.hold(push)

    def settle(self, at: Service) -> None:
        """Update x if an update is due."""

    def can_update(self, at: Service) -> bool:
        """Return whether enough workers are left for another update."""
        return True

    @abstractmethod
    def may_read(self, at: Service, worker: int, version: int) -> bool:
        """Return whether a worker that has this version of x may continue with the present one."""


def pull(node: Node, s: ServerState) -> bool:
    """x[R] ← the server's, for every R, once it may be read; return False if no update can follow any more."""
    servers = node.comm.servers.members
    node.comm.progress = node.epochs
    for server, version in zip(servers, s.versions, strict=True):
        node.comm.send(server, node.x[:0], version=version, tag=QUESTION)
    # x is written only after all servers have answered, so that a checkpoint can be saved until then.
    answers = [_answer(node, server) for server in servers]
    for part, answer in zip(node.parts(node.x), answers, strict=True):
        if answer.tag in (UNCHANGED, OVER):
            node.log("unchanged", part.numel())
        else:
            part.copy_(answer.x)
    s.versions = [answer.version for answer in answers]
    return all(answer.tag != OVER for answer in answers)


def pass_over(node: Node) -> None:
    """Do a step without a gradient, since the gradient would be dropped."""
    node.gradient(unused=True)
    node.log("dropped", 1)


def _answer(node: Node, server: int) -> Message:
    while (answer := node.comm.recv(server, at_rest=True)).tag == NOTICE:
        pass  # a notice of a newer x, which the next message holds
    return answer


def push(node: Node, s: ServerState, g: Tensor) -> None:
    """Send g[R] to the server of R, for every R."""
    servers = node.comm.servers.members
    for server, part, version in zip(servers, node.parts(g), s.versions, strict=True):
        node.comm.send(server, part, version=version, weight=node.weight)


def exchange(node: Node, s: ServerState) -> None:
    """Push g and receive x from every server, for consistencies that answer every push."""
    g, servers = node.gradient(), node.comm.servers.members
    pushed: list[Handle[None]] = [
        node.comm.start_send(server, part, version=version, weight=node.weight)
        for server, part, version in zip(servers, node.parts(g), s.versions, strict=True)
    ]
    for i, (server, part) in enumerate(zip(servers, node.parts(node.x), strict=True)):
        pulled = node.comm.recv(server)
        part.copy_(pulled.x)
        s.versions[i] = pulled.version
    for push in pushed:
        push.wait()
