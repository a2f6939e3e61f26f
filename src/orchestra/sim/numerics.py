# SPDX-License-Identifier: Apache-2.0
"""Many gradients in one call: those of all workers that are computing, when the first of them is due.

    a worker begins to compute     note its parameters and its mini-batch
    a gradient is due              if it is not there: take the gradients of everyone noted so far in one
                                   `torch.func.vmap`, and keep those that are not due yet

None is needed before its virtual time, and each is that at the parameters held when it began, so the result is that of
one gradient at a time but for rounding. Models that draw random numbers or change their buffers in training (dropout,
BatchNorm) are not taken: whether a model is, a trial shows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from orchestra.replica import Loss, flatten, trainable

_TOLERANCE = 1e-4  # of the largest element: how far a gradient taken together may be from one taken alone


@dataclass(eq=False)
class Pending:
    """A gradient under way."""

    x: Tensor
    batch: Sequence[Tensor]
    answer: tuple[Tensor, float] | None = None  # g and the loss


class Batched:
    """The gradients of one model at many parameters."""

    def __init__(self, module: nn.Module, loss: Loss) -> None:
        self._module = module.train()
        self._loss = loss
        self._shapes = {name: p.shape for name, p in trainable(module).items()}
        self._fixed = {n: p.detach() for n, p in module.named_parameters() if n not in self._shapes}
        self._gradients: Callable[..., tuple[Tensor, Tensor]] = vmap(grad_and_value(self._value), randomness="error")
        self._waiting: dict[tuple[Any, ...], list[Pending]] = {}
        self.calls = 0
        self.taken = 0

    def _value(self, x: Tensor, *batch: Tensor) -> Tensor:
        parameters, start = dict(self._fixed), 0
        for name, shape in self._shapes.items():
            stop = start + math.prod(shape)
            parameters[name] = x[start:stop].view(shape)
            start = stop
        *inputs, target = batch
        return self._loss(functional_call(self._module, parameters, tuple(inputs)), target)

    def begin(self, x: Tensor, batch: Sequence[Tensor]) -> Pending:
        """A worker begins: its parameters may change from now on."""
        pending = Pending(x.clone(), [piece.to(x.device) for piece in batch])
        key = tuple((tuple(piece.shape), piece.dtype) for piece in batch)
        self._waiting.setdefault(key, []).append(pending)
        return pending

    def end(self, pending: Pending) -> tuple[Tensor, float]:
        """Its gradient is due."""
        if pending.answer is None:
            for group in self._waiting.values():
                self._take(group)
            self._waiting.clear()
        assert pending.answer is not None
        return pending.answer

    def _take(self, group: list[Pending]) -> None:
        self.calls += 1
        self.taken += len(group)
        x = torch.stack([pending.x for pending in group])
        batch = [torch.stack(column) for column in zip(*(pending.batch for pending in group), strict=True)]
        with torch.enable_grad():
            g, losses = self._gradients(x, *batch)
        finite = torch.isfinite(g.sum(1))
        values = torch.where(finite, losses, math.nan).tolist()  # the one wait for a GPU
        for pending, row, value in zip(group, g, values, strict=True):
            pending.answer = (row, value)


def why_not(module: nn.Module, loss: Loss, batch: Sequence[Tensor]) -> str | None:
    """Why gradients of a model cannot be taken together, or None if they can."""
    if len({p.dtype for p in trainable(module).values()}) > 1:
        return "the parameters have several dtypes"
    if list(module.buffers()):
        return "the model has buffers, which would change while it trains"
    x0 = flatten(module)
    try:
        batched = Batched(copy.deepcopy(module), loss)
        both = [batched.begin(x, batch) for x in (x0, 1.01 * x0)]
        g, value = batched.end(both[0])
        alone, single = grad_and_value(batched._value)(x0, *batch)
    except Exception as error:  # anything that a user's model may do
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
    close = float((g - alone).abs().max()) <= _TOLERANCE * max(1e-12, float(alone.abs().max()))
    return None if close and abs(value - float(single)) <= _TOLERANCE * max(1e-12, abs(value)) else "the values differ"
