# SPDX-License-Identifier: Apache-2.0
"""Optimizer factories with another learning rate or momentum, for any factory and any number of groups."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import optim


def at_rate(factory: Callable[..., optim.Optimizer], lr: float) -> Callable[..., optim.Optimizer]:
    """Return a factory of the same optimizers with this learning rate.

    The rate is the default one if the factory takes `lr`, as `partial(torch.optim.SGD, lr=0.1)` does; otherwise, as
    with `lambda params: torch.optim.SGD(params, lr=0.1)`, it is set in each group.
    """
    try:
        inspect.signature(factory).bind_partial(lr=lr)
    except TypeError:
        return _AtRate(factory, lr)
    except ValueError:  # its signature is unknown
        pass
    return partial(factory, lr=lr)


@dataclass(frozen=True)
class _AtRate:
    """A factory of optimizers whose groups all have one rate."""

    factory: Callable[..., optim.Optimizer]
    lr: float

    def __call__(self, params: Any) -> optim.Optimizer:
        """Make an optimizer."""
        made = self.factory(params)
        for group in made.param_groups:
            group["lr"] = self.lr
        return made


@dataclass(frozen=True)
class Adjusted:
    """A factory of the optimizers of `base`, with learning rates times `lr_factor`, and with `momentum` if given."""

    base: Callable[..., optim.Optimizer]
    lr_factor: float = 1.0
    momentum: float | None = None

    def __call__(self, params: Any) -> optim.Optimizer:
        """Make an optimizer."""
        made = self.base(params)
        for settings in (made.defaults, *made.param_groups):
            settings["lr"] = settings["lr"] * self.lr_factor
            if self.momentum is not None and "momentum" in settings:
                settings["momentum"] = self.momentum
                settings["nesterov"] = bool(settings.get("nesterov")) and self.momentum > 0
        return made


def factor_of(factory: Callable[..., optim.Optimizer]) -> float:
    """Return the `lr_factor` of an `Adjusted` factory; 1 for any other."""
    return factory.lr_factor if isinstance(factory, Adjusted) else 1.0
