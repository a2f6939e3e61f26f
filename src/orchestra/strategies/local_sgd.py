# SPDX-License-Identifier: Apache-2.0
"""Local SGD: several local steps, then the mean of the models.

Stich. "Local SGD Converges Fast and Communicates Little", ICLR 2019. https://arxiv.org/abs/1805.09767

    repeat
        τ times:   x ← x − γ d              every worker on its own
        x ← Σ bᵢ xᵢ / Σ bᵢ                  bᵢ: samples the worker used since the last mean

τ=1 with plain SGD is synchronous SGD. The inner optimizer's momenta stay with their worker.

Bytes sent per worker and round of τ steps: 2 (N−1)/N · S on average over the workers, 1/τ of all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestra.core.node import Node
from orchestra.core.strategy import Strategy, option
from orchestra.core.traffic import ExpectedTraffic, RunSize


@dataclass
class LocalSGDState:
    """The start of the round."""

    steps: int = 0
    samples: int = 0


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Strategy[LocalSGDState]):
    """Average the models every `tau` steps."""

    tau: int = option(8, "τ: local steps between two means; more means less traffic and more drift", least=1)

    def init(self, node: Node) -> LocalSGDState:
        """Begin a round."""
        return LocalSGDState(node.steps, node.samples)

    def step(self, node: Node, s: LocalSGDState) -> None:
        """Do a local step, and average the models when the round is over."""
        node.local_step()
        if node.steps - s.steps >= self.tau:
            self._average(node, s)

    def finish(self, node: Node, s: LocalSGDState) -> None:
        """Average the models, even in the middle of a round."""
        if node.steps > s.steps:
            self._average(node, s)

    def _average(self, node: Node, s: LocalSGDState) -> None:
        node.comm.mean_(node.x, weight=node.samples - s.samples)
        s.steps, s.samples = node.steps, node.samples


def traffic(strategy: LocalSGD, run: RunSize) -> ExpectedTraffic:
    """Return the bytes of one all-reduce per round, the last of which may be shorter."""
    rounds = -(-run.steps // strategy.tau)
    return ExpectedTraffic(workers=[rounds * sent for sent in run.average()])
