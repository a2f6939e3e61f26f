# SPDX-License-Identifier: Apache-2.0
"""All-reduce: synchronous data-parallel SGD without a centre.

Goyal et al. "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017. https://arxiv.org/abs/1706.02677
Patarasuk, Yuan. "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.

    repeat
        g ← ∇f(x) over the worker's own mini-batch
        ḡ ← Σ bᵢ gᵢ / Σ bᵢ over the workers            bᵢ: samples behind gᵢ
        x ← x − γ d(ḡ)                                 the same on every worker

N workers with batch b follow the path of one process with batch N·b. One worker is plain SGD.

`native` uses the fastest all-reduce of the world, overlapped with backward where possible. The other algorithms send
messages (see `collectives/`): the same path up to rounding, with other traffic.

Bytes sent per worker and step, for a model of S bytes: 2 (N−1)/N · S on average over the workers, 2 (N−1) S in all;
by an algorithm, what its file says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

from orchestra.collectives import ALGORITHMS, hierarchical, mean_
from orchestra.collectives.volume import numbers_sent
from orchestra.core.node import Node
from orchestra.core.strategy import Layout, Strategy, Updates, option
from orchestra.core.traffic import ExpectedTraffic, RunSize
from orchestra.errors import Problem


@dataclass(frozen=True, kw_only=True)
class AllReduce(Strategy[None]):
    """Every step uses the mean gradient of all workers."""

    algorithm: Literal[
        "native", "ring", "halving_doubling", "butterfly", "tree", "double_tree", "hierarchical", "one_device"
    ] = option("native", "how the mean is taken: native is the best there is, the others are messages between workers")
    group: int | None = option(None, "workers in a group of hierarchical, such as a rack; None: about a root", least=1)

    def problems(self, workers: int) -> Iterator[Problem]:
        """Refuse `group` for algorithms without groups."""
        if self.group is not None and self.algorithm != "hierarchical":
            yield Problem(
                "strategy.group", self.group, f'needs algorithm="hierarchical": {self.algorithm} has no groups'
            )

    @cached_property
    def layout(self) -> Layout:
        """Equal replicas after every step; the optimizer uses the mean gradient."""
        location: Literal["everywhere", "copies"] = "everywhere" if self.algorithm == "native" else "copies"
        return Layout(model_location=location, updates=Updates(clip="mean"))

    def init(self, node: Node) -> None:
        """Return no state."""

    def step(self, node: Node, s: None) -> None:
        """Average the gradients, then do the same update on every worker."""
        g = node.gradient(averaged=self.algorithm == "native")
        if self.algorithm == "native":
            node.mean_update(g)
            return
        add_up = ALGORITHMS[self.algorithm] if self.group is None else partial(hierarchical, group=self.group)
        if mean_(node.comm, g, node.weight, add_up, most=node.batch):
            node.update(g)


def traffic(strategy: AllReduce, run: RunSize) -> ExpectedTraffic:
    """Return the bytes of one all-reduce in every step."""
    if strategy.algorithm == "native":
        return ExpectedTraffic(workers=[run.steps * sent for sent in run.average()])
    sent = numbers_sent(strategy.algorithm, run.workers, run.numbers, strategy.group)
    return ExpectedTraffic(workers=[run.steps * run.item * numbers for numbers in sent])
