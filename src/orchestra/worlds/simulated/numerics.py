# SPDX-License-Identifier: Apache-2.0
"""Batched gradients: those of all workers that are computing are computed in one call, when the first one is due.

    a worker begins to compute     note its parameters and its mini-batch
    a gradient is due              if it is not computed: compute all noted gradients in one `torch.func.vmap`, and
                                   keep those that are not due yet

No gradient is needed before its virtual time, and each is computed at the parameters from its beginning, so the results
equal those of single gradients up to rounding. Models that draw random numbers or change their buffers in training
(dropout, BatchNorm) are excluded, by a trial.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from orchestra.data.batches import Loss, Pieces, each, like, loss_of, pieces
from orchestra.model import error_hints
from orchestra.model.replica import flatten, trainable

_SMALL, _MANY = 1 << 16, 8  # maximum of parameters and minimum of workers for which batching is faster on a CPU
_TOLERANCE = 1e-4  # of the largest element: allowed difference between a batched and a single gradient


@dataclass(eq=False, slots=True)
class Pending:
    """A gradient in progress. Its worker waits for it, and no other worker writes to its x."""

    x: Tensor
    batch: Pieces  # pieces of a mini-batch; or one list of indices, where the data are known
    answer: tuple[Tensor, float] | None = None  # g and the loss


class Batched:
    """The gradients of one model at many parameters. With `data`, mini-batches are lists of indices into it."""

    def __init__(self, module: nn.Module, loss: Loss | None, data: Pieces | None = None) -> None:
        self._module = module.train()
        self._loss = loss
        self._data = data
        self._shapes = {name: p.shape for name, p in trainable(module).items()}
        self._fixed = {n: p.detach() for n, p in module.named_parameters() if n not in self._shapes}
        self._gradients: Callable[..., tuple[Tensor, Tensor]] = vmap(grad_and_value(self._value), randomness="error")
        self._waiting: dict[Any, list[Pending]] = {}
        self.calls = 0
        self.taken = 0

    def _value(self, x: Tensor, batch: Pieces) -> Tensor:
        parameters, start = dict(self._fixed), 0
        for name, shape in self._shapes.items():
            stop = start + math.prod(shape)
            parameters[name] = x[start:stop].view(shape)
            start = stop

        def forward(*inputs: Any, **named: Any) -> Any:
            return functional_call(self._module, parameters, inputs, named)

        return loss_of(forward, batch, self._loss)

    def begin(self, x: Tensor, batch: Pieces) -> Pending:
        """Note the beginning of a gradient."""
        pending = Pending(x, batch)
        each_piece = pieces(batch)
        key = tuple((piece.shape, piece.dtype) for piece in each_piece) if self._data is None else len(each_piece[0])
        self._waiting.setdefault(key, []).append(pending)
        return pending

    def end(self, pending: Pending) -> tuple[Tensor, float]:
        """Return a gradient that is due, computing all pending ones if necessary."""
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
        batches = self._batches(group, x.device)
        try:
            with torch.enable_grad():
                g, losses = self._gradients(x, batches)
        except (IndexError, RuntimeError) as error:
            self._explain(error, x, batches)
            raise
        finite = torch.isfinite(g.sum(1))
        values = torch.where(finite, losses, math.nan).tolist()  # the one wait for a GPU
        for pending, row, value in zip(group, g.unbind(), values, strict=True):
            pending.answer = (row, value)

    def _explain(self, error: Exception, x: Tensor, batches: Pieces) -> None:
        """Add notes about labels from single mini-batches: the error of a batched call refers to other shapes."""
        for i, one in enumerate(x):
            alone = each(itemgetter(i), batches)
            try:
                self._value(one, alone)
            except (IndexError, RuntimeError) as single:
                error_hints.add_note(single, alone)
                for note in getattr(single, "__notes__", []):
                    error.add_note(note)
                return

    def _batches(self, group: list[Pending], device: torch.device) -> Pieces:
        """Return all mini-batches, stacked."""
        if self._data is None:
            columns = zip(*(pieces(pending.batch) for pending in group), strict=True)
            return like(group[0].batch, (torch.stack([piece.to(device) for piece in column]) for column in columns))
        indices = torch.tensor([pieces(pending.batch)[0] for pending in group])
        picked = indices.view(-1).to(device)
        return each(lambda t: t.index_select(0, picked).view(*indices.shape, *t.shape[1:]), self._data)


def pays(module: nn.Module, device: str, workers: int) -> bool:
    """Return whether batched gradients are faster, by a rule from measurements (benchmarks/batched.py).

    A rule instead of a measurement, so that the same call gives the same run.
    """
    if device != "cpu":
        return workers > 1
    holders = [part for part in module.modules() if next(part.parameters(recurse=False), None) is not None]
    small = sum(p.numel() for p in module.parameters()) <= _SMALL
    return small and workers >= _MANY and all(isinstance(part, nn.Linear) for part in holders)


def _have_gradients(module: nn.Module, loss: Loss | None, batch: Pieces) -> list[bool]:
    """Return which parameters have a gradient: in a batched call the others would have zeros."""
    parameters = list(trainable(module.train()).values())
    found = torch.autograd.grad(loss_of(module, batch, loss), parameters, allow_unused=True)
    return [g is not None for g in found]


def why_not(module: nn.Module, loss: Loss | None, batch: Pieces) -> str | None:
    """Return why gradients of a model cannot be batched, or None if they can."""
    if len({p.dtype for p in trainable(module).values()}) > 1:
        return "the parameters have several dtypes"
    x0, twin = flatten(module), copy.deepcopy(module)
    try:
        if not all(_have_gradients(copy.deepcopy(module), loss, batch)):
            return "some parameters have no gradient"
        batched = Batched(twin, loss)
        both = [batched.begin(x, batch) for x in (x0, 1.01 * x0)]
        g, value = batched.end(both[0])
        alone, single = grad_and_value(batched._value)(x0, batch)
    except Exception as error:  # anything that a user's model may do
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
    if not all(map(torch.equal, module.buffers(), twin.buffers())):
        return "the model has buffers that change while it trains"
    close = float((g - alone).abs().max()) <= _TOLERANCE * max(1e-12, float(alone.abs().max()))
    return None if close and abs(value - float(single)) <= _TOLERANCE * max(1e-12, abs(value)) else "the values differ"
