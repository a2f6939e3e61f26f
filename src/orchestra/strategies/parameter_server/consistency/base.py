# SPDX-License-Identifier: Apache-2.0
"""A server at work, and what a consistency decides about it.

    worker                                              server of range R
    repeat                                              for whatever comes
        ask the server of R for x[R], for every R           a push: take it
        g ← ∇f(x)                                           a question: remember who asks
        push g[R] to the server of R, for every R           a worker has left: count on it no more
                                                            update x if it is time; answer those who may read it
                                                            too few workers are left for an update: answer OVER

A worker that receives OVER skips its mini-batches from then on: their gradients could only be dropped. What a server
holds then stays unused. The summary counts both.

Whoever has to wait does so before its step, when nothing of the step has happened: there a run can be saved.
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
    version: int  # of the range at which it was taken
    weight: float
    clock: int = 0  # of its worker: how many it had pushed, this one included


@dataclass
class ServerState:
    """A worker's version of each range when it last read it; a server's version of its own, and what it keeps."""

    versions: list[int]
    pushed: list[int] = field(default_factory=list)  # a worker's clock: its pushes to each server
    clocks: list[list[Piece]] = field(default_factory=list)  # each worker's range clock, on a server
    held: list[Push] = field(default_factory=list)
    sent: list[Tensor] = field(default_factory=list)  # what each worker last read
    squares: list[Tensor] = field(default_factory=list)  # a mean of g²
    rest: list[Tensor] = field(default_factory=list)  # what a filter has not pushed yet, by server
    seen: list[Tensor] = field(default_factory=list)  # what each worker has of x, where a filter keeps back some of it
    told: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # keys last sent, by node and range
    heard: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # keys last received


class Correction:
    """What staleness does to a gradient before it is applied: nothing, here."""

    def init(self, node: Node, s: ServerState) -> None:
        """Make room for what has to be remembered, on a server."""

    def correct(self, node: Node, s: ServerState, push: Push) -> Tensor:
        """The gradient to apply."""
        return push.x

    def answered(self, node: Node, s: ServerState, worker: int) -> None:
        """A worker is about to read x."""


class Consistency(ABC):
    """When a server answers."""

    first: ClassVar[int] = 0  # the version a worker has before it has read any

    @property
    def updates(self) -> Updates:
        """How gradients become updates."""
        return Updates(synchronous=False, stale=True, clip="mean")

    def problems(self, workers: int, servers: int) -> Iterator[Problem]:
        """What it cannot work with."""
        return iter(())

    @abstractmethod
    def work(self, node: Node, s: ServerState) -> None:
        """A worker's step."""

    @abstractmethod
    def serve(self, node: Node, s: ServerState, correction: Correction) -> None:
        """A server's life."""


@dataclass
class Service:
    """A server at work."""

    node: Node
    s: ServerState
    correction: Correction
    active: set[int] = field(init=False)  # workers that have not left
    asking: dict[int, int] = field(default_factory=dict)  # who waits for x, and the version it has
    ahead: dict[int, float] = field(default_factory=dict)  # the progress at which each goes on when it has x
    warned: set[int] = field(default_factory=set)  # who knows that there is a newer x

    def __post_init__(self) -> None:
        self.active = {*self.node.comm.workers.members}
        self.s.held = [Push(*held) for held in self.s.held]

    @property
    def version(self) -> int:
        """Updates of this range so far."""
        return self.s.versions[0]

    def clock(self, worker: int) -> int:
        """How many whole pushes of a worker have come."""
        return min(t for _, _, t in self.s.clocks[worker])

    def hold(self, push: Message) -> None:
        """Keep a gradient."""
        self.s.held.append(Push(push.source, push.x.clone(), push.version, push.weight, push.stamp.clock))

    def apply(self, pushes: list[Push], *, by: int = 1) -> None:
        """One update with the mean of some gradients, in the order of their workers; they are kept no longer.

        `by`: what a gradient is divided by, once it is corrected.
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
        gone = {id(push) for push in pushes}
        s.held = [push for push in s.held if id(push) not in gone]

    def answer(self, worker: int, *, over: bool) -> None:
        """Let a worker read x, which it need not if it has it already, or if no update can follow any more (`over`)."""
        self.node.comm.known[worker] = self.ahead.pop(worker)  # not before: it waits
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
        """Take what comes, update when it is time, answer who may read."""
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
        """A gradient came."""
        at.hold(push)

    def settle(self, at: Service) -> None:
        """Update x if it is time."""

    def can_update(self, at: Service) -> bool:
        """Whether enough workers are left for another update."""
        return True

    @abstractmethod
    def may_read(self, at: Service, worker: int, version: int) -> bool:
        """Whether a worker that has a version of x may go on with the present one."""


def pull(node: Node, s: ServerState) -> bool:
    """x[R] ← the server's, for every R, as soon as it may be read; False if no update can follow any more."""
    servers = node.comm.servers.members
    node.comm.progress = node.epochs
    for server, version in zip(servers, s.versions, strict=True):
        node.comm.send(server, node.x[:0], version=version, tag=QUESTION)
    # Nothing is written before all have answered, so that until then the worker is as it was.
    answers = [_answer(node, server) for server in servers]
    for part, answer in zip(node.parts(node.x), answers, strict=True):
        if answer.tag in (UNCHANGED, OVER):
            node.log("unchanged", part.numel())
        else:
            part.copy_(answer.x)
    s.versions = [answer.version for answer in answers]
    return all(answer.tag != OVER for answer in answers)


def pass_over(node: Node) -> None:
    """Take a step without a gradient: it could only be dropped."""
    node.gradient(unused=True)
    node.log("dropped", 1)


def _answer(node: Node, server: int) -> Message:
    while (answer := node.comm.recv(server, at_rest=True)).tag == NOTICE:
        pass  # that there is something new to read: which is what comes next
    return answer


def push(node: Node, s: ServerState, g: Tensor) -> None:
    """Send g[R] to the server of R, for every R."""
    servers = node.comm.servers.members
    for server, part, version in zip(servers, node.parts(g), s.versions, strict=True):
        node.comm.send(server, part, version=version, weight=node.weight)


def exchange(node: Node, s: ServerState) -> None:
    """Push g and take the servers' answers: the case in which every push is answered."""
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
