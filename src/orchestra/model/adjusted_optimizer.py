# SPDX-License-Identifier: Apache-2.0
"""The same optimizer with another learning rate or momentum, whatever makes it and however many groups it has."""

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
class Adjusted:
    """Makes the optimizer of `base`, each learning rate times `lr_factor`; and with `momentum`, where it has one."""

    base: Callable[..., optim.Optimizer]
    lr_factor: float = 1.0
    momentum: float | None = None

    def __call__(self, params: Any) -> optim.Optimizer:
        """Make one."""
        made = self.base(params)
        for settings in (made.defaults, *made.param_groups):
            settings["lr"] = settings["lr"] * self.lr_factor
            if self.momentum is not None and "momentum" in settings:
                settings["momentum"] = self.momentum
                settings["nesterov"] = bool(settings.get("nesterov")) and self.momentum > 0
        return made


def factor_of(factory: Callable[..., optim.Optimizer]) -> float:
    """The multiple that a factory makes of another's rates; 1 if it is no such one."""
    return factory.lr_factor if isinstance(factory, Adjusted) else 1.0
