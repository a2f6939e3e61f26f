# SPDX-License-Identifier: Apache-2.0
"""The same optimizer at a multiple of its learning rates, whatever makes it and however many groups it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import optim


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
