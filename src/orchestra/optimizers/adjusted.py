# SPDX-License-Identifier: Apache-2.0
"""An optimizer as a factory makes it, with another learning rate and momentum: what tuning changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import optim


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
