# SPDX-License-Identifier: Apache-2.0
"""Parameter server: servers own the model, each a range of it; workers push gradients and pull parameters.

Li, Andersen, Park, Smola, et al. "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.
https://www.usenix.org/conference/osdi14/technical-sessions/presentation/li_mu
Dean et al. "Large Scale Distributed Deep Networks", NeurIPS 2012 (the asynchronous case).

    worker                                          server of range R
    repeat                                          BSP, sequential: repeat
        g ← ∇f(x)                                       await one g[R] of every worker
        push g[R] to the server of R, for every R       ḡ ← Σ bᵢ gᵢ / Σ bᵢ in rank order;  x ← x − γ d(ḡ)
        pull x[R] from the server of R, for every R     answer every worker with x
                                                    ASP, eventual: for each push as it comes
                                                        x ← x − γ d(g);  answer that worker with x

Optimizer state lives with the range and advances once per update. Every update makes a new version of a range; the
staleness of a push is the number of versions made since its worker pulled.

BSP is all-reduce with other traffic: the same path, bit for bit. ASP with one worker is plain SGD.

Bytes per worker and step: S sent, S received. Per server: N times its range received and sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from orchestra.errors import Problem
from orchestra.node import Node
from orchestra.ops import Handle
from orchestra.strategy import Strategy, knob
from orchestra.vectors import parts_of


@dataclass
class ParameterServerState:
    """A worker's version of each range when it last pulled; a server's version of its own."""

    versions: list[int]


class Consistency(ABC):
    """When a server answers."""

    @abstractmethod
    def serve(self, node: Node, s: ParameterServerState) -> None:
        """A server's life."""


@dataclass(frozen=True, kw_only=True)
class BSP(Consistency):
    """Bulk synchronous: a step is over when every worker's gradient is in."""

    def serve(self, node: Node, s: ParameterServerState) -> None:
        """Average every round of pushes."""
        answers: list[Handle[None]] = []
        for pushes in node.comm.rounds():
            for answer in answers:
                answer.wait()  # at once: whoever pushes again has read the last answer
            if samples := node.average(pushes):
                node.update(node.g)
                node.samples += int(samples)
            s.versions[0] += 1
            answers = [node.comm.start_send(push.source, node.x, version=s.versions[0]) for push in pushes]


@dataclass(frozen=True, kw_only=True)
class ASP(Consistency):
    """Asynchronous: every gradient is applied when it comes, whatever the others do."""

    def serve(self, node: Node, s: ParameterServerState) -> None:
        """Apply every push."""
        for push in node.comm.inbox():
            if push.weight:
                node.update(push.x)
                node.samples += int(push.weight)
            node.log("staleness", s.versions[0] - push.version)
            s.versions[0] += 1
            node.comm.send(push.source, node.x, version=s.versions[0])


@dataclass(frozen=True, kw_only=True)
class ParameterServer(Strategy[ParameterServerState]):
    """Workers push gradients to servers that own the model."""

    short = "ps"

    consistency: Consistency = field(default_factory=BSP, metadata={"about": "when a server answers: bsp() or asp()"})
    servers: int = knob(1, "servers, each with an equal range of the model", least=1)

    @property
    def synchronous(self) -> bool:
        """Only BSP waits for everybody."""
        return isinstance(self.consistency, BSP)

    @property
    def model_at(self) -> Literal["servers"]:
        """The servers' ranges, put together."""
        return "servers"

    def demands(self, workers: int) -> Iterator[Problem]:
        """So many servers would mostly be idle: usually a slip."""
        if self.servers > 4 * workers:
            yield Problem("strategy.servers", self.servers, f"is too many for {workers} workers: at most {4 * workers}")

    def init(self, node: Node) -> ParameterServerState:
        """Version 0 of everything."""
        return ParameterServerState([0] * self.servers)

    def step(self, node: Node, s: ParameterServerState) -> None:
        """Push the gradient, pull the parameters."""
        g, servers = node.gradient(), node.comm.servers.members
        pushed = [
            node.comm.start_send(server, part, version=version, weight=node.weight)
            for server, part, version in zip(servers, parts_of(g, self.servers), s.versions, strict=True)
        ]
        for i, (server, part) in enumerate(zip(servers, parts_of(node.x, self.servers), strict=True)):
            pulled = node.comm.recv(server)
            part.copy_(pulled.x)
            s.versions[i] = pulled.version
        for push in pushed:
            push.wait()

    def serve(self, node: Node, s: ParameterServerState) -> None:
        """As the consistency asks."""
        self.consistency.serve(node, s)
