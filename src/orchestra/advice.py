# SPDX-License-Identifier: Apache-2.0
"""Advice before a run starts, where it can go on but will probably not train well.

Momentum of 0.9 or more, where a server applies gradients that are stale: the two together swing with hardly any
damping, until noise throws the model out (see strategies/strategy_switch.py). Without momentum and with γ/(1 − μ),
divided by N where each gradient is an update, x moves as far and the swing is damped.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn, optim

from orchestra.phases import Phases
from orchestra.replica import trainable
from orchestra.request import Request
from orchestra.strategy import Strategy

_LARGE = 0.9  # momentum


def before(given: Request, strategy: Strategy[Any], module: nn.Module) -> list[str]:
    """Say all there is to say before `train` starts, in one process of those that call it."""
    if not given.cluster.is_home or not given.cluster.trains:
        return []
    optimizer = given.optimizer(list(trainable(module).values()))
    return say(of_momentum(strategy, optimizer, given.cluster.workers))


def of_momentum(strategy: Strategy[Any], optimizer: optim.Optimizer, workers: int) -> Iterator[str]:
    """Warn of momentum on stale gradients, with a remedy."""
    for group in optimizer.param_groups:
        own = group.get("momentum") or 0.0
        for part, momentum, given in _parts(strategy, own, workers):
            if part.stale and workers > 1 and momentum >= _LARGE:
                rate = group["lr"] / (1 - momentum) / part.updates(workers)
                remedy = "momentum=0 in the strategy" if given else f"momentum=0 and lr={rate:.2g} in the optimizer"
                yield (
                    f"{type(part).__name__} applies gradients that are several updates old, and momentum "
                    f"{momentum:g} amplifies them: training may collapse, with some seeds and not with others. "
                    f"Use {remedy}, or a learning rate far below that of allreduce."
                )
                return


def _parts(strategy: Strategy[Any], own: float, workers: int) -> Iterator[tuple[Strategy[Any], float, bool]]:
    """Each strategy that will be in force, its momentum, and whether the strategy was given that."""
    if not isinstance(strategy, Phases):
        yield strategy, own, False
        return
    yield strategy.first, own, False
    if strategy.momentum is not None:
        yield strategy.then, strategy.momentum if own else 0.0, True
    elif strategy.then.updates(workers) <= strategy.first.updates(workers):  # else there will be no momentum
        yield strategy.then, own, False


def say(advice: Iterator[str]) -> list[str]:
    """Print it to stderr, and give it to be remembered."""
    said = list(advice)
    for text in said:
        print(f"warning: {text}", file=sys.stderr)
    return said
