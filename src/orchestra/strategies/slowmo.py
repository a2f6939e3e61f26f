# SPDX-License-Identifier: Apache-2.0
"""SlowMo: slow momentum around any local optimizer.

Wang, Tantia, Ballas, Rabbat. "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum",
ICLR 2020. https://arxiv.org/abs/1910.00643  (Algorithm 1)

    repeat
        reset, maintain or average the buffers of the base optimizer
        τ times:   x ← x − γ d                  the base strategy; by default every worker on its own
        x̄  ← Σ bᵢ xᵢ / Σ bᵢ                     exact mean; bᵢ: samples the worker used in this round
        u  ← β u + (x₀ − x̄) / γ                 slow momentum; γ: mean learning rate of the round
        x₀ ← x₀ − α γ u;   x ← x₀               slow step, and start again from there

α=1, β=0 is Local SGD; τ=1 on top of that is synchronous SGD. β>0 is BMUF with block momentum β.
One worker, β=0, α<1 is Lookahead. A round in which γ was zero has no direction: it ends in the plain mean. Where the
optimizer has groups of layers, γ is that of each.

Bytes sent per worker and round of τ steps: 2 (N−1)/N · S on average, as much again for each buffer that is averaged
(and 4 (N−1) to agree that all have one), and what the base strategy sends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from orchestra.core.node import Node
from orchestra.core.strategy import Layout, Strategy, Updates, option
from orchestra.core.traffic import ExpectedTraffic, RunSize
from orchestra.errors import Problem
from orchestra.strategies.solo import Solo


@dataclass
class SlowMoState:
    """The slow model, its momentum, and totals of the present round."""

    x0: Tensor  # where this round started; equal on every worker
    u: Tensor  # slow momentum; equal on every worker
    base: Any
    steps: int = 0  # of the run, when the round began
    samples: int = 0  # likewise
    gamma: list[float] = field(default_factory=list)  # sums of the learning rates of the round, by range of x


@dataclass(frozen=True, kw_only=True)
class SlowMo(Strategy[SlowMoState]):
    """Momentum on the movement of the averaged model."""

    tau: int = option(12, "τ: steps of the base strategy in a round", least=1)
    alpha: float = option(1.0, "α: slow learning rate; 1 was best in the paper", least=0)
    beta: float = option(0.7, "β: slow momentum; 0.4-0.8, larger with more workers", least=0, most=0.999)
    buffers: Literal["reset", "maintain", "average"] = option(
        "reset", "the base optimizer's momenta at the start of a round: reset suits SGD, maintain Adam"
    )
    base: Strategy[Any] = field(default_factory=Solo, metadata={"about": "what happens within a round"})

    @cached_property
    def layout(self) -> Layout:
        """A separate x for each worker within a round."""
        base = self.base.layout.updates
        return Layout(updates=Updates(synchronous=base.synchronous, clip=base.clip))

    def problems(self, workers: int) -> Iterator[Problem]:
        """Refuse a base that keeps the model on servers, which would undo the slow step at once."""
        if self.base.layout.servers:
            yield Problem("strategy.base", self.base, "keeps the model on servers: use a base without, such as solo()")

    def init(self, node: Node) -> SlowMoState:
        """Begin the first round."""
        return SlowMoState(node.x.clone(), torch.zeros_like(node.x), self.base.init(node), node.steps, node.samples)

    def step(self, node: Node, s: SlowMoState) -> None:
        """Do a step of the base, and the slow step when the round is over."""
        self.base.step(node, s.base)
        rates = [rate for _, rate in node.rates()]
        s.gamma = [total + rate for total, rate in zip(s.gamma or [0.0] * len(rates), rates, strict=True)]
        if node.steps - s.steps >= self.tau:
            self._slow_step(node, s)

    def finish(self, node: Node, s: SlowMoState) -> None:
        """Do the slow step, even in the middle of a round."""
        self.base.finish(node, s.base)
        if node.steps > s.steps:
            self._slow_step(node, s)

    @torch.no_grad()
    def _slow_step(self, node: Node, s: SlowMoState) -> None:
        node.comm.mean_(node.x, weight=node.samples - s.samples)
        for (part, _), total in zip(node.rates(), s.gamma, strict=True):
            self._move(node.x[part], s.x0[part], s.u[part], total / (node.steps - s.steps))
        if self.buffers == "reset":
            node.optimizer.reset()
        elif self.buffers == "average":
            self._average_buffers(node)
        s.steps, s.samples, s.gamma = node.steps, node.samples, []

    def _move(self, x: Tensor, x0: Tensor, u: Tensor, gamma: float) -> None:
        if gamma > torch.finfo(x.dtype).tiny:  # else the division would overflow
            u.mul_(self.beta).add_((x0 - x) / gamma)
            x0.sub_(u, alpha=self.alpha * gamma)
            x.copy_(x0)
        else:
            x0.copy_(x)

    def _average_buffers(self, node: Node) -> None:
        buffers = node.optimizer.vectors()
        # A worker that has made no update yet has no buffers: then no worker averages them in this round.
        counts = node.comm.gather(torch.tensor([float(len(buffers))]))
        if all(torch.equal(count, counts[0]) for count in counts):
            means = [node.comm.mean(buffer) for buffer in buffers]
            node.optimizer.put(means)


def traffic(strategy: SlowMo, run: RunSize) -> ExpectedTraffic | None:
    """Return the bytes of the base, and per round those of one all-reduce of x, and of a buffer if it is averaged."""
    within = run.of(strategy.base, run)  # the base finishes before the last slow step
    if within is None:
        return None
    rounds = -(-run.steps // strategy.tau)
    means, agreed = (2, 4 * (run.workers - 1)) if strategy.buffers == "average" else (1, 0)
    each = [means * sent + agreed for sent in run.average()]
    return ExpectedTraffic(workers=[sent + rounds * more for sent, more in zip(within.workers, each, strict=True)])
