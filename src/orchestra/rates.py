# SPDX-License-Identifier: Apache-2.0
"""The same optimizer at another learning rate, whatever makes it and however many groups it has."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import optim


def at_rate(factory: Callable[..., optim.Optimizer], lr: float) -> Callable[..., optim.Optimizer]:
    """A factory of the same optimizers with this rate: as their default, if the factory takes one, else in each group.

    `partial(torch.optim.SGD, lr=0.1)` takes one, `lambda params: torch.optim.SGD(params, lr=0.1)` does not.
    """
    try:
        inspect.signature(factory).bind_partial(lr=lr)
    except TypeError:
        return _AtRate(factory, lr)
    except ValueError:  # it has no signature that could be read
        pass
    return partial(factory, lr=lr)


@dataclass(frozen=True)
class _AtRate:
    """A factory of optimizers, all groups of which have one rate."""

    factory: Callable[..., optim.Optimizer]
    lr: float

    def __call__(self, params: Any) -> optim.Optimizer:
        """Make one."""
        made = self.factory(params)
        for group in made.param_groups:
            group["lr"] = self.lr
        return made


@dataclass(frozen=True)
class Rescaled:
    """A factory of optimizers whose rates are a multiple of those that another factory gives them."""

    factory: Callable[..., optim.Optimizer]
    factor: float

    def __call__(self, params: Any) -> optim.Optimizer:
        """Make one."""
        made = self.factory(params)
        for group in made.param_groups:
            group["lr"] = group["lr"] * self.factor
        return made


def factor_of(factory: Callable[..., optim.Optimizer]) -> float:
    """The multiple that a factory makes of another's rates; 1 if it is no such one."""
    return factory.factor if isinstance(factory, Rescaled) else 1.0
