# SPDX-License-Identifier: Apache-2.0
"""n-softsync, and a learning rate divided by staleness.

Zhang, Gupta, Lian, Liu. "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI 2016.
https://arxiv.org/abs/1511.05950

    server: after every c = ⌊λ/n⌋ gradients of λ workers, in order of arrival; fewer at the end are dropped
        τ_l ← updates since the worker of g_l read x
        α_l ← α₀ / τ_l if τ_l > 0, else α₀
        x ← x − 1/c Σ α_l g_l

n = λ is ASP; a gradient is then stale by n updates on average. `SoftSync(n)` is the server's rule,
`StalenessAware()` the learning rate, which works with any other consistency as well. The gradient is divided instead of
the rate, which is equivalent for SGD; optimizers that normalise the gradient (Adam) undo much of that.

Bytes per worker and step: S sent, S received unless x is still the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from orchestra.core.node import Node
from orchestra.core.strategy import Updates, option
from orchestra.errors import Problem
from orchestra.strategies.parameter_server.consistency.base import Correction, OnRequest, Push, ServerState, Service


@dataclass(frozen=True, kw_only=True)
class SoftSync(OnRequest):
    """An update after every λ/n gradients of any workers."""

    n: int = option(1, "n: updates for as many gradients as there are workers", least=1)

    @cached_property
    def updates(self) -> Updates:
        """n updates for each round of gradients."""
        return Updates(synchronous=False, stale=True, clip="mean", per_round=self.n)

    def problems(self, workers: int, servers: int) -> Iterator[Problem]:
        """Refuse an n for which an update would have less than one gradient."""
        if self.n > workers:
            yield Problem("strategy.consistency.n", self.n, f"is more than the {workers} workers there are")

    def settle(self, at: Service) -> None:
        """Update with all gradients that have arrived, once enough have."""
        if len(at.s.held) >= len(at.node.comm.workers) // self.n:
            at.apply(at.s.held)

    def may_read(self, at: Service, worker: int, version: int) -> bool:
        """Return True: workers never wait."""
        return True


@dataclass(frozen=True, kw_only=True)
class AsPushed(Correction):
    """No correction."""


@dataclass(frozen=True, kw_only=True)
class StalenessAware(Correction):
    """A learning rate divided by staleness."""

    def correct(self, node: Node, s: ServerState, push: Push) -> Tensor:
        """g / τ."""
        tau = s.versions[0] - push.version
        return push.x / tau if tau > 0 else push.x
