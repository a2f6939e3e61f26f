# SPDX-License-Identifier: Apache-2.0
"""The class of recipes: workloads with a name, complete except for the strategy and the cluster.

The recipes that come with the package are in `orchestra.recipes`; your own is one `Recipe(...)` in your own file. The
callables should be module-level functions or `functools.partial` of such functions, so that they can be
sent to worker processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A named workload: everything `orchestra.train` needs except the strategy and the cluster."""

    name: str
    about: str  # one line
    model: Callable[[], nn.Module]  # built after the seed is set: its initial values come from torch's generator
    data: Callable[[], Any]  # training data: a tuple of tensors, a Dataset, ...
    loss: Callable[..., Tensor] | None  # loss(model(inputs), targets), a mean over the batch; None: the model's own
    optimizer: Callable[..., torch.optim.Optimizer]  # of the parameters: functools.partial(torch.optim.SGD, lr=0.1)
    batch: int  # samples per worker and step
    epochs: float
    evaluate: Callable[[nn.Module, Any], Mapping[str, float]]
    evaluation_data: Callable[[], Any]
    target: str  # NAME=VALUE, a score of `evaluate`: the default target of `compare`; "": a first run finds one
    schedule: Callable[[float], float] | None = None  # factor on the learning rate, by epochs done
    more: Mapping[str, Any] = field(default_factory=dict)  # further arguments of `train`: {"clip": 1.0}
