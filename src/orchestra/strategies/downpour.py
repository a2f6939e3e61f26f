# SPDX-License-Identifier: Apache-2.0
"""Downpour SGD: replicas that do local steps between two exchanges with asynchronous servers.

Dean et al. "Large Scale Distributed Deep Networks", NeurIPS 2012.
https://papers.nips.cc/paper/4687-large-scale-distributed-deep-networks  (the client in the supplement)

    worker                                                server of range R
    repeat                                                for each message as it comes
        g ← ∇f(x)                                             if it is a push:   x ← x − γ d(Δ)
        Δ ← Δ + g;   x ← x − γ g                              if it is a fetch:  answer with x
        every n_push steps:   push Δ[R] for every R;   Δ ← 0
        every n_fetch steps:  fetch x[R] for every R

d is the inner optimizer's; the paper's is Adagrad (`torch.optim.Adagrad`), whose state stays with the range. A local
step is plain SGD with the present learning rate γ of each group of layers. The paper's loop fetches before a step; here
push and fetch follow it, as one message and its answer. A run ends with a push of what is left in Δ.

n_push = n_fetch = 1, as in the paper's experiments, is the asynchronous parameter server, `ps(consistency=asp())`.
The paper starts with one replica and lets the others join later; here all start at once.

On `digits` (4 workers, delays lognormal:0.05,0.3, 20 epochs), mean test accuracy of 3 seeds with Adagrad, γ = 0.02:
96.7 % with n_push = n_fetch = 1, 96.3 % with 5, and 97.0 % with 5 and plain SGD, γ = 0.05. Alone it is 96.4 %, and
97.4 % with the recipe's SGD with momentum. That one diverges here, as with `asp`: momentum multiplies old sums.

Bytes per worker: S sent every n_push steps, S received every n_fetch steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from orchestra.core.gradient_mask import ABSENT
from orchestra.core.node import Node
from orchestra.core.strategy import Layout, Strategy, Updates, option
from orchestra.core.traffic import ExpectedTraffic, RunSize
from orchestra.errors import Problem
from orchestra.strategies.parameter_server.ranges import owners, too_many


@dataclass
class DownpourState:
    """A worker's gradients that were not pushed yet; a server's version of its range, and what the workers have."""

    delta: Tensor  # Δ
    samples: int  # behind it
    version: int
    fetched: list[int]  # by worker


@dataclass(frozen=True, kw_only=True)
class Downpour(Strategy[DownpourState]):
    """Push sums of gradients and fetch parameters, each at its own interval."""

    n_push: int = option(1, "steps between two pushes of the gradients' sum; more means less traffic up", least=1)
    n_fetch: int = option(1, "steps between two fetches; more means less traffic down and older parameters", least=1)
    servers: int = option(1, "servers, each with an equal range of the model", least=1)

    @cached_property
    def layout(self) -> Layout:
        """The model on servers; other workers push between a worker's fetch and its next push."""
        updates = Updates(synchronous=False, stale=True, gradients=1)
        return Layout(model_location="servers", servers=self.servers, updates=updates)

    def problems(self, workers: int) -> Iterator[Problem]:
        """Refuse far more servers than workers."""
        return too_many(self.servers, workers)

    def init(self, node: Node) -> DownpourState:
        """Return a state in which nothing was pushed and every worker has version 0."""
        return DownpourState(torch.full_like(node.x, ABSENT), 0, 0, [0] * len(node.comm.workers))

    def step(self, node: Node, s: DownpourState) -> None:
        """Do a local step, then push and fetch if they are due."""
        g = node.gradient()
        if node.weight:
            s.delta += g
            s.samples += int(node.weight)
            node.descend(g)
        self._exchange(node, s, node.steps)

    def finish(self, node: Node, s: DownpourState) -> None:
        """Push the remaining gradients, as if the interval were over."""
        if node.steps % self.n_push:
            self._exchange(node, s, node.steps + self.n_push - node.steps % self.n_push)

    def _exchange(self, node: Node, s: DownpourState, t: int) -> None:
        """Push and fetch as due after step t, which the message carries so that the server does the same."""
        push, fetch = t % self.n_push == 0, t % self.n_fetch == 0
        if push or fetch:
            what = s.delta if push else s.delta[:0]
            for server, part in owners(node):
                node.comm.send(server, what[part], version=t, weight=s.samples)
        if push:
            s.delta.fill_(ABSENT)  # a zero, which stays for parameters that have no gradient until the next push
            s.samples = 0
        if fetch:
            for server, part in owners(node):
                node.x[part].copy_(node.comm.recv(server).x)

    def serve(self, node: Node, s: DownpourState) -> None:
        """Apply every push and answer every fetch."""
        for message in node.comm.inbox():
            t = message.version
            if t % self.n_push == 0:
                if message.weight:
                    node.update(message.x)
                    node.samples += int(message.weight)
                node.log("staleness", s.version - s.fetched[message.source])
                s.version += 1
            if t % self.n_fetch == 0:
                s.fetched[message.source] = s.version
                node.comm.send(message.source, node.x)


def traffic(strategy: Downpour, run: RunSize) -> ExpectedTraffic:
    """Return the bytes of a push and a fetch at their intervals."""
    pushes, fetches = -(-run.steps // strategy.n_push), run.steps // strategy.n_fetch
    # The last push is sent as if its interval were over, and may be answered like a fetch.
    fetches += pushes * strategy.n_push > run.steps and pushes * strategy.n_push % strategy.n_fetch == 0
    served = [fetches * run.workers * part for part in run.ranges(strategy.layout)]
    return ExpectedTraffic(workers=[pushes * run.model] * run.workers, servers=served)
