# SPDX-License-Identifier: Apache-2.0
"""A plain training loop, and the same under `orchestra.prepare`: what every test here compares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tests.zoo import BATCH, SEED, make_data, make_model, momentum
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import orchestra
from orchestra import Attached
from orchestra.data.random_state import seed_everything
from orchestra.model.flat_optimizer import Factory

COUNT = 108  # divisible by batches of 2 and of 3 workers: then the batches are those of `train`


def make_loader(count: int = COUNT, **given: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*make_data(count)), **{"batch_size": BATCH, "shuffle": True} | given)


def loop(
    strategy: str | None = "allreduce",
    *,
    model: Callable[[], nn.Module] = make_model,
    optimizer: Factory = momentum,
    loader: Callable[[], DataLoader[Any]] = make_loader,
    epochs: int = 2,
    steps: int | None = None,
    each: Callable[[Any], None] = lambda optimizer: None,
    told: bool = False,
    decay: float = 1.0,
    **given: Any,
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the model of an ordinary script; the strategy None leaves out the three lines."""
    seed_everything(SEED)
    module = model()
    o: Any = optimizer(module.parameters())
    batches: Any = loader()
    if strategy is not None:
        asked: dict[str, Any] = {"seed": SEED, "cluster": Attached(patience=20), "steps": steps} | given
        module, o, batches = orchestra.prepare(module, o, batches, strategy=strategy, **asked)
    scheduler = torch.optim.lr_scheduler.LambdaLR(o, lambda t: decay**t)
    losses: list[float] = []
    for _ in range(epochs):
        for x, y in batches:
            if steps is not None and len(losses) == steps:
                break
            o.zero_grad()
            loss = F.mse_loss(module(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            o.step(**({"loss": loss} if told else {}))
            scheduler.step()
            losses.append(loss.item())
            each(o)
    if strategy is not None:
        o.finish()
    return losses, {name: tensor.clone() for name, tensor in module.state_dict().items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, b[name]) for name, tensor in a.items())
