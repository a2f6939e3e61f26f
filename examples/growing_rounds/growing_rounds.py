# SPDX-License-Identifier: Apache-2.0
"""Growing rounds: Local SGD that averages often at first, and less and less often.

Not from a paper; each round is one step longer than the one before, up to τ.

    k ← 1
    repeat
        k times:   x ← x − γ d              every worker on its own
        x ← Σ bᵢ xᵢ / Σ bᵢ                  bᵢ: samples the worker used in this round
        k ← min(k + 1, τ)

τ = 1 is Local SGD with τ = 1.

Bytes sent per worker and round: 2 (N−1)/N · S on average over the workers.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestra.core.node import Node
from orchestra.core.strategy import Strategy, option
from orchestra.core.traffic import ExpectedTraffic, RunSize
from orchestra.strategies.catalogue import Row


@dataclass
class GrowingState:
    """The round under way."""

    k: int  # its length
    steps: int  # of the run, when it began
    samples: int  # likewise


@dataclass(frozen=True, kw_only=True)
class Growing(Strategy[GrowingState]):
    """Average the models in rounds that grow longer."""

    tau: int = option(8, "τ: longest round, in steps", least=1)

    def init(self, node: Node) -> GrowingState:
        """Begin the first round."""
        return GrowingState(1, node.steps, node.samples)

    def step(self, node: Node, s: GrowingState) -> None:
        """Make a local step, and average when the round is over."""
        node.local_step()
        if node.steps - s.steps >= s.k:
            self._average(node, s)

    def finish(self, node: Node, s: GrowingState) -> None:
        """End with one model, also in the middle of a round."""
        if node.steps > s.steps:
            self._average(node, s)

    def _average(self, node: Node, s: GrowingState) -> None:
        node.comm.mean_(node.x, weight=node.samples - s.samples)
        s.k, s.steps, s.samples = min(s.k + 1, self.tau), node.steps, node.samples


def traffic(strategy: Growing, run: RunSize) -> ExpectedTraffic:
    """Return one average for each round, the last of which may be cut short."""
    rounds, left = 0, run.steps
    while left > 0:
        rounds += 1
        left -= min(rounds, strategy.tau)
    return ExpectedTraffic(workers=[rounds * sent for sent in run.average()])


ROW = Row(
    strategy=Growing,
    traffic=traffic,
    formula="2 (N−1)/N · S every round",
    search_space=("growing",),
    tuned_option=("tau", (8, 32)),
    examples=("growing(tau=3)",),
)
