# SPDX-License-Identifier: Apache-2.0
"""Backup workers: a step is over when the first N of N + b gradients are in.

Chen, Pan, Monga, Bengio, Jozefowicz. "Revisiting Distributed Synchronous SGD", 2016. https://arxiv.org/abs/1604.00981

    server: repeat
        await the first N gradients taken at x_t, of N + b workers
        x_{t+1} ← x_t − γ d(ḡ)
    late gradients, computed at an earlier x, are dropped; their workers continue with the present x
    fewer than N workers are left: no update follows, and the remaining workers skip their mini-batches

With b = 0 it is BSP, bit for bit. A late worker finishes its mini-batch before it continues, so a step takes longer
than the N-th smallest of N + b draws; if late workers are cancelled (`KSync(k=N)`) it takes exactly that. The data of a
worker that is always slow are never used. Backup workers do not protect against workers that die.

Bytes per worker and step: S sent, S received.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from orchestra.core.ops import Message
from orchestra.core.strategy import Updates, option
from orchestra.errors import Problem
from orchestra.strategies.parameter_server.consistency.base import OnRequest, Service
from orchestra.strategies.parameter_server.consistency.first_k import (
    hold_in_time,
    may_be_of_workers,
    no_choice,
    of_workers,
)


@dataclass(frozen=True, kw_only=True)
class BackupWorkers(OnRequest):
    """Backup workers: a step is over when all but b gradients are in."""

    b: int = option(0, "b: workers more than are waited for", least=0)

    updates = Updates(synchronous=False, clip="mean", can_meet=False)  # late gradients are dropped

    def problems(self, workers: int, servers: int) -> Iterator[Problem]:
        """Refuse b if no worker would be waited for, and several servers, which could choose different workers."""
        if self.b >= workers:
            yield Problem("strategy.consistency.b", self.b, f"must be less than the {workers} workers there are")
        yield from no_choice(workers - self.b, workers, servers)

    def take(self, at: Service, push: Message) -> None:
        """Keep a gradient, unless it is late."""
        hold_in_time(at, push)

    def settle(self, at: Service) -> None:
        """Update with the first N gradients."""
        if of_workers(at, len(at.node.comm.workers) - self.b):
            at.apply(at.s.held)

    def can_update(self, at: Service) -> bool:
        """Return whether as many workers are left as are waited for."""
        return may_be_of_workers(at, len(at.node.comm.workers) - self.b)

    def may_read(self, at: Service, worker: int, version: int) -> bool:
        """Return whether x is newer than the worker's."""
        return at.version > version
