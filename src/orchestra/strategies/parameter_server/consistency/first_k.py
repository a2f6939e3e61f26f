# SPDX-License-Identifier: Apache-2.0
"""K-sync, K-batch-sync, K-async, K-batch-async: an update with the first K gradients.

Dutta, Joshi, Ghosh, Dube, Nagpurkar. "Slow and Stale Gradients Can Win the Race: Error-Runtime Trade-offs in
Distributed SGD", AISTATS 2018. https://arxiv.org/abs/1803.01113

    x ← x − γ/K Σ g over the first K gradients, of P workers; X is the time of one, H a harmonic number

                     the first K                    the others         E[T] of an update    X exponential, rate μ
    K-sync           of different workers           are cancelled      E[X_{K:P}]           (H_P − H_{P−K}) / μ
    K-batch-sync     of any, at the present x       are cancelled                           K / (P μ)
    K-async          of different workers           go on, stale       ≤ K-sync             (H_P − H_{P−K}) / μ
    K-batch-async    of any workers                 go on, stale       K E[X] / P           K / (P μ)

K-sync with K = P is BSP, K-async with K = 1 is ASP. K-sync with K < P and K-async with 1 < K < P need a single server:
several would each wait for the first K to arrive there, and a worker that one server needs might wait for another
forever.

An update needs K gradients until the end. When fewer than K workers are left, they skip their mini-batches, and
gradients that can no longer be completed to K are dropped.

A worker whose gradient is cancelled stops in the middle of its mini-batch where only its duration is modelled, and at
the end where it is really computed; the mini-batch is lost.

On the digits (4 workers, K = 4, momentum 0.9, 20 epochs, mean of 3 seeds, the best of four rates) K-batch-sync ends at
96.4 %, one process alone at 97.8 %: what is cancelled is lost.

Bytes per worker and step: S sent unless the gradient was cancelled or passed over; S received unless x is still
the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from orchestra.core.node import Node
from orchestra.core.ops import Message
from orchestra.core.strategy import Updates, option
from orchestra.errors import Problem
from orchestra.strategies.parameter_server.consistency.base import (
    NOTICE,
    OnRequest,
    ServerState,
    Service,
    pass_over,
    pull,
    push,
)

_K = "K: gradients in an update"
# Late gradients are dropped, and a worker that has pushed waits for others before its next step.
_CANCELLING = Updates(synchronous=False, clip="mean", can_meet=False)


@dataclass(frozen=True, kw_only=True)
class KSync(OnRequest):
    """The first K workers; the gradients of the others are cancelled."""

    k: int = option(1, _K, least=1)

    updates = _CANCELLING

    def problems(self, workers: int, servers: int) -> Iterator[Problem]:
        """Refuse K above the number of workers, and several servers that could choose different workers."""
        yield from at_most(self.k, workers)
        yield from no_choice(self.k, workers, servers)

    def work(self, node: Node, s: ServerState) -> None:
        """Pull, compute unless cancelled, push."""
        work_unless_cancelled(node, s)

    def take(self, at: Service, push: Message) -> None:
        """Keep a gradient, unless it is late."""
        hold_in_time(at, push)

    def settle(self, at: Service) -> None:
        """Update with K gradients, and cancel those of the other workers."""
        if of_workers(at, self.k):
            _renew(at, at.active - {held.source for held in at.s.held})

    def can_update(self, at: Service) -> bool:
        """Return whether gradients of K workers can still arrive."""
        return may_be_of_workers(at, self.k)

    def may_read(self, at: Service, worker: int, version: int) -> bool:
        """Return whether x is newer than the worker's."""
        return at.version > version


@dataclass(frozen=True, kw_only=True)
class KBatchSync(OnRequest):
    """The first K mini-batches at the present x, of any workers; others are cancelled."""

    k: int = option(1, _K, least=1)

    updates = _CANCELLING

    def work(self, node: Node, s: ServerState) -> None:
        """Pull, compute unless cancelled, push."""
        work_unless_cancelled(node, s)

    def take(self, at: Service, push: Message) -> None:
        """Keep a gradient, unless it is late."""
        hold_in_time(at, push)

    def settle(self, at: Service) -> None:
        """Update with K gradients, and cancel all other mini-batches, which use an old x."""
        if len(at.s.held) >= self.k:
            _renew(at, at.active)

    def may_read(self, at: Service, worker: int, version: int) -> bool:
        """Return True: workers always use the present x."""
        return True


@dataclass(frozen=True, kw_only=True)
class KAsync(OnRequest):
    """The first K workers; the others continue with the x that they have."""

    k: int = option(1, _K, least=1)

    @cached_property
    def updates(self) -> Updates:
        """Updates of K gradients; a worker that has pushed waits for others before its next step."""
        return Updates(synchronous=False, stale=True, clip="mean", gradients=self.k, can_meet=False)

    def problems(self, workers: int, servers: int) -> Iterator[Problem]:
        """Refuse K above the number of workers, and several servers that could choose different workers."""
        yield from at_most(self.k, workers)
        if self.k > 1:
            yield from no_choice(self.k, workers, servers)

    def settle(self, at: Service) -> None:
        """Update with all gradients that have arrived, once enough have."""
        if of_workers(at, self.k):
            at.apply(at.s.held)

    def can_update(self, at: Service) -> bool:
        """Return whether gradients of K workers can still arrive."""
        return may_be_of_workers(at, self.k)

    def may_read(self, at: Service, worker: int, version: int) -> bool:
        """Return whether the worker's own gradient is applied."""
        return all(held.source != worker for held in at.s.held)


@dataclass(frozen=True, kw_only=True)
class KBatchAsync(OnRequest):
    """The first K mini-batches of any workers; no worker ever waits."""

    k: int = option(1, _K, least=1)

    @cached_property
    def updates(self) -> Updates:
        """Updates of K gradients."""
        return Updates(synchronous=False, stale=True, clip="mean", gradients=self.k)

    def settle(self, at: Service) -> None:
        """Update with all gradients that have arrived, once enough have."""
        if len(at.s.held) >= self.k:
            at.apply(at.s.held)

    def may_read(self, at: Service, worker: int, version: int) -> bool:
        """Return True: workers never wait."""
        return True


def work_unless_cancelled(node: Node, s: ServerState) -> None:
    """Pull, compute, and push unless a server cancels the gradient meanwhile."""
    if not pull(node, s):
        pass_over(node)
        return
    g = node.gradient(cancel_on=node.comm.servers)
    if not node.abandoned:
        push(node, s, g)


def of_workers(at: Service, k: int) -> bool:
    """Return whether gradients of k workers have arrived."""
    return len({held.source for held in at.s.held}) >= k


def may_be_of_workers(at: Service, k: int) -> bool:
    """Return whether gradients of k workers have arrived or can still arrive."""
    return len(at.active | {held.source for held in at.s.held}) >= k


def hold_in_time(at: Service, push: Message) -> None:
    """Keep a gradient computed at the present x; drop and count an older one."""
    if push.version < at.version:
        at.node.log("late", at.version - push.version)
    else:
        at.hold(push)


def at_most(k: int, workers: int) -> Iterator[Problem]:
    """Yield a problem if there are fewer than K workers."""
    if k > workers:
        yield Problem("strategy.consistency.k", k, f"is more than the {workers} workers there are")


def no_choice(k: int, workers: int, servers: int) -> Iterator[Problem]:
    """Yield a problem if several servers could each wait for different workers, and so for each other."""
    if servers > 1 and k < workers:
        message = f"must be 1 where {k} of {workers} workers are waited for: several would choose different ones"
        yield Problem("strategy.servers", servers, message)


def _renew(at: Service, concerned: set[int]) -> None:
    """Update, and send one NOTICE to each of the `concerned` workers that computes, so that it stops."""
    at.apply(at.s.held)
    for worker in sorted(concerned - at.warned - {*at.asking}):
        at.warned.add(worker)
        at.node.comm.send(worker, at.node.x[:0], version=at.version, tag=NOTICE)
