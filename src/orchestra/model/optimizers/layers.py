# SPDX-License-Identifier: Apache-2.0
"""Functions for optimizers with a rate for each layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def evaluated(closure: Callable[[], float] | None) -> float | None:
    """Return the loss of a closure, as `torch.optim.Optimizer.step` allows; None without a closure."""
    with torch.enable_grad():
        return None if closure is None else closure()


def by_kind(group: dict[str, Any]) -> Iterator[tuple[list[Tensor], bool]]:
    """Yield a group's parameters with a gradient: those of at least `least_ndim` dimensions, and the others.

    The others are biases and the gains of normalisation, which have neither decay nor their own rate.
    """
    for whole in (True, False):
        found = [p for p in group["params"] if p.grad is not None and (p.ndim >= group["least_ndim"]) == whole]
        if found:
            yield found, whole


def norms(tensors: list[Tensor]) -> Tensor:
    """Return the 2-norm of each tensor, at least in single precision: half would overflow at a norm of 65,504."""
    return torch.stack(torch._foreach_norm(tensors, 2, torch.promote_types(tensors[0].dtype, torch.float32)))


def require(name: str, value: float, least: float, below: float = math.inf) -> None:
    """Raise if a hyper-parameter is out of its range."""
    if not least <= value < below:
        limit = "" if below == math.inf else f" and below {below:g}"
        raise ValueError(f"{name} = {value} must be at least {least:g}{limit}")
