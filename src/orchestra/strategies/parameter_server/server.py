# SPDX-License-Identifier: Apache-2.0
"""Parameter server: servers own the model, each a range of it; workers push gradients and pull parameters.

Li, Andersen, Park, Smola, et al. "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.
https://www.usenix.org/conference/osdi14/technical-sessions/presentation/li_mu

    worker                                          server of range R
    repeat                                          repeat
        g ← ∇f(x)                                       take pushes of g[R]
        push g[R] to the server of R, for every R       x ← x − γ d(ḡ) when the consistency allows
        pull x[R] from the server of R, for every R     answer when the consistency allows

The consistency is the algorithm: BSP (default), ASP, SSP, BoundedDelay, BackupWorkers, KSync, KBatchSync, KAsync,
KBatchAsync, SoftSync, each in its own file. The correction adjusts stale gradients: AsPushed (none), StalenessAware,
DelayCompensated (DC-ASGD).

x is cut into equal ranges, at cache lines if it is long, or between the layers of the model (`placement="layers"`), so
that the largest range is as small as possible. Optimizers that use whole layers need the latter, or one server.

Optimizer state stays with the range and advances once per update. Every update makes a new version of a range; the
staleness of a push is the number of versions made since its worker pulled: reports call it the gradient's age.

Every push carries the range it covers and its worker's clock there: duplicates are dropped, and a push in several
`pieces` is used when it is complete.

A `filter` (Significant, RandomSkip, KKT) chooses the entries to send; they are sent as keys and values, the keys
only when they changed if `cache_keys`.

A server has its own machine or, if `colocated`, server k of M that of worker k − M mod N, so that servers share the
machines of the last workers: messages between the two do not use the network. With as many servers as workers,
colocated, there is one range per worker, and BSP is reduce-scatter and all-gather.

Bytes per worker and step: S sent, S received, unless filtered. Per server: N times its range received and sent.
Colocated, bytes that stay on a machine do not count. Seconds of a BSP step on links of rate R, without computing and
latency:

    one server                  2 N S/R
    one server, colocated       2 (N−1) S/R
    one range per worker        2 (N−1)/N S/R     as much as a ring

Several servers, M ≤ N, on machines of their own take 2 N/M S/R.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from orchestra.core.node import Node
from orchestra.core.strategy import Layout, Strategy, option
from orchestra.core.traffic import ExpectedTraffic, RunSize
from orchestra.errors import Problem
from orchestra.strategies.parameter_server.consistency import (
    ASP,
    BSP,
    SSP,
    AsPushed,
    Consistency,
    Correction,
    ServerState,
)
from orchestra.strategies.parameter_server.filters import Everything, Filter
from orchestra.strategies.parameter_server.push_codec import PushCodec
from orchestra.strategies.parameter_server.ranges import too_many


@dataclass(frozen=True, kw_only=True)
class ParameterServer(Strategy[ServerState]):
    """Workers push gradients to servers that own the model."""

    consistency: Consistency = field(default_factory=BSP, metadata={"about": "when a server answers"})
    servers: int = option(1, "servers, each with a range of the model", least=1)
    placement: Literal["even", "layers"] = option(
        "even", "where the model is cut: into equal ranges, or between its layers"
    )
    colocated: bool = option(False, "servers on the machines of the workers, in turn, not on their own")
    pieces: int = option(1, "messages in which a range is pushed", least=1)
    filter: Filter = field(default_factory=Everything, metadata={"about": "which entries of a vector are sent"})
    cache_keys: bool = option(False, "send the keys of filtered entries only if they changed")
    correction: Correction = field(
        default_factory=AsPushed, metadata={"about": "how stale gradients are adjusted; by default not at all"}
    )

    @cached_property
    def layout(self) -> Layout:
        """The model on servers, with the updates of the consistency; corrected gradients are clipped before."""
        updates = self.consistency.updates
        if not isinstance(self.correction, AsPushed):
            updates = replace(updates, clip="own")
        return Layout(
            model_location="servers", servers=self.servers, placement=self.placement, colocated=self.colocated,
            updates=updates,
        )  # fmt: skip

    def problems(self, workers: int) -> Iterator[Problem]:
        """Yield the problems of the consistency, of far too many servers, and of a correction without staleness."""
        yield from self.consistency.problems(workers, self.servers)
        yield from too_many(self.servers, workers)
        if self.layout.updates.synchronous and not isinstance(self.correction, AsPushed):
            yield Problem(
                "strategy.correction",
                self.correction,
                "corrects stale gradients, of which there are none: consistency=asp has some",
            )

    def init(self, node: Node) -> ServerState:
        """Return the state at version 0; a worker that pulls before it computes has no version yet."""
        if node.serves:
            mine = node.placement[node.comm.servers.index(node.rank)]
            s = ServerState([0], clocks=[[(mine.start, mine.stop, 0)] for _ in node.comm.workers.members])
            self.correction.init(node, s)
        else:
            s = ServerState([self.consistency.first] * self.servers, pushed=[0] * self.servers)
        self.filter.init(node, s)
        return s

    def codec(self, node: Node, s: ServerState) -> PushCodec:
        """Return a codec that sends pushes in stamped pieces, and only the entries that the filter passes."""
        return PushCodec(node, s, self.pieces, self.filter, self.cache_keys)

    def step(self, node: Node, s: ServerState) -> None:
        """Do a step of the consistency."""
        self.consistency.work(node, s)

    def serve(self, node: Node, s: ServerState) -> None:
        """Serve by the rules of the consistency."""
        self.consistency.serve(node, s, self.correction)


def traffic(strategy: ParameterServer, run: RunSize) -> ExpectedTraffic | None:
    """Return S for each step of a worker, less the bytes that stay on a machine; None if a filter decides."""
    if not isinstance(strategy.filter, Everything):
        return None
    held = run.ranges(strategy.layout)
    near, others = [0] * run.workers, run.workers
    if strategy.colocated:
        last = -len(held) % run.workers  # the worker on the machine of the first server
        near = [sum(held[(i - last) % run.workers :: run.workers]) for i in range(run.workers)]
        others -= 1
    pushed = [run.steps * (run.model - own) for own in near]
    certain = isinstance(strategy.consistency, BSP | ASP | SSP)  # others answer without x if x has not changed
    return ExpectedTraffic(workers=pushed, servers=[run.steps * others * part for part in held] if certain else None)
