# SPDX-License-Identifier: Apache-2.0
"""One node's copy of the model, as two flat vectors.

`x` holds every trainable parameter and `g` its gradient; the module's parameters and their `.grad` are views of them,
so every algorithm is one line of vector arithmetic, and sharding, transport and checkpoints are ranges of a buffer.

- A parameter used in several places (tied weights) is in x once.
- Frozen parameters are not in x: they never change. A parameter without a gradient in some step is marked as absent in
  g (see gradient_mask), so that optimizers do not update it.
- x has one dtype, the widest among the parameters. A parameter of another dtype is a rounded copy, refreshed
  before every forward pass: x is its master copy.
- Buffers (BatchNorm's running statistics) stay with the module. Each is a linear function of what its worker saw, so
  the mean over the workers, taken when a model is evaluated or saved, is the same as averaging all along. The mean is
  weighted by the samples that each worker saw; a worker without samples has weight zero. Of whole numbers (BatchNorm's
  counter of batches) the value of the first worker with samples is taken. A gradient that is skipped leaves the
  buffers as they were before its forward pass (see buffers).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from orchestra.core.gradient_mask import ABSENT, GradientMask
from orchestra.core.vectors import LARGE
from orchestra.data.batches import Loss, Pieces, each, loss_of
from orchestra.errors import Problem
from orchestra.model import error_hints
from orchestra.model.buffers import BufferCopies

Ready = Callable[[slice], None]


def problems_of(module: nn.Module) -> Iterator[Problem]:
    """Yield everything about a model that cannot be trained."""
    if not isinstance(module, nn.Module):
        yield Problem("model", module, "must be a function that returns an nn.Module")
        return
    lazy = [name for name, p in module.named_parameters() if isinstance(p, UninitializedParameter)]
    for name in lazy:
        yield Problem(f"model.{name}", "lazy", "is not built yet: run one batch through the model inside its factory")
    if lazy:
        return
    if not any(p.requires_grad and p.numel() for p in module.parameters()):
        yield Problem("model", type(module).__name__, "has no trainable parameter, so there is nothing to train")
    for name, p in module.named_parameters():
        if p.requires_grad and not p.is_floating_point():
            yield Problem(f"model.{name}", str(p.dtype), "only real floating-point parameters can be trained")
        if p.layout is not torch.strided:
            yield Problem(f"model.{name}", str(p.layout), "only dense parameters can be trained")
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            yield Problem(
                f"model.{name or type(part).__name__}.sparse",
                True,
                "sparse gradients are not supported: use sparse=False",
            )


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that make up x, by name, each once."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def in_order(module: nn.Module, names: Sequence[str]) -> dict[str, nn.Parameter]:
    """Return the parameters with these names, in this order, which may differ from that of their registration."""
    known = dict(module.named_parameters(remove_duplicate=False))
    return {name: known[name] for name in names}


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that belong to the model's state, by name, without those that every copy recomputes."""
    state = set(module.state_dict(keep_vars=True))
    return {name: buffer for name, buffer in module.named_buffers() if name in state}


def vector_dtype(module: nn.Module) -> torch.dtype:
    """Return the widest dtype among the trainable parameters."""
    dtype: torch.dtype | None = None
    for p in trainable(module).values():
        dtype = p.dtype if dtype is None else torch.promote_types(dtype, p.dtype)
    assert dtype is not None
    return dtype


def flatten(module: nn.Module) -> Tensor:
    """Return a new flat vector with the values of the trainable parameters."""
    dtype = vector_dtype(module)
    return torch.cat([p.detach().reshape(-1).to(dtype) for p in trainable(module).values()])


class Replica:
    """A module whose parameters and gradients are views of two flat vectors; `cuts`: edges of other nodes' ranges."""

    def __init__(
        self,
        module: nn.Module,
        x: Tensor,
        g: Tensor,
        *,
        loss: Loss | None,
        bf16: bool = False,
        accumulate: int = 1,
        cuts: Sequence[int] = (),
        names: Sequence[str] | None = None,
    ) -> None:
        self.module = module
        self.x = x
        self.g = g
        self._loss = loss
        self._bf16 = bf16
        self._accumulate = accumulate
        named = trainable(module) if names is None else in_order(module, names)
        self._names = list(named)
        self.parameters = list(named.values())
        self._slots: list[Tensor] = []
        self._ranges: list[slice] = []  # of x and g, by parameter
        self._hooked: set[Tensor] = set()  # parameters whose gradients a hook copies during backward
        self._ready: Ready | None = None  # called with every range of g that is final
        self._ours = False  # whether this class runs the present backward pass, not the module
        self._filled: set[Tensor] = set()  # parameters whose part of g is of this mini-batch
        self._masters: list[tuple[nn.Parameter, Tensor]] = []
        self.before = BufferCopies(module)  # this forward pass
        self._lay_out()
        self._marks = _marks(self._ranges, cuts, g)
        self._hook(least=LARGE)

    def _lay_out(self) -> None:
        """Make every parameter a view of its part of x; a parameter of another dtype stays a copy."""
        x, g, start = self.x, self.g, 0
        for p in self.parameters:
            stop = start + p.numel()
            self._ranges.append(slice(start, stop))
            self._slots.append(g[start:stop].view(p.shape))
            here = x[start:stop].view(p.shape)
            if p.dtype == x.dtype:
                p.data = here
            else:
                p.data = p.data.to(x.device)
                self._masters.append((p, here))
            start = stop

    @property
    def is_whole(self) -> bool:
        """Whether every parameter is a view of x, none a copy of another dtype."""
        return not self._masters

    def _hook(self, least: int) -> None:
        """Register hooks that copy the gradients of parameters of at least this size during backward."""
        for p, slot, part in zip(self.parameters, self._slots, self._ranges, strict=True):
            if p.numel() >= least and p not in self._hooked:
                hook = partial(self._take_early, slot=slot, part=part)
                p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._hooked.add(p)

    def gradient(self, batch: Pieces, size: int, ready: Ready | None = None) -> float:
        """Fill g with the mean gradient over a batch of `size` samples and return the mean loss.

        `ready` is called with ranges of g that are final during backward, though not with all of them.
        """
        if ready is not None:
            self._hook(least=1)
        self.refresh()
        self.before.keep()
        self.module.train()
        given = batch
        if self.x.device.type != "cpu":
            batch = each(lambda piece: piece.to(self.x.device, non_blocking=True), batch)
        total: Tensor | float = 0.0
        self._filled.clear()
        parts = list(_parts(batch, size, self._accumulate))
        for i, (part, share) in enumerate(parts):
            self._ready = ready if i == len(parts) - 1 else None
            for p in self.parameters:
                p.grad = None
            with self._autocast():
                loss = self._loss_of(part, given)
            scaled = loss if share == 1 else loss * share
            self._ours = True
            try:
                torch.autograd.backward(scaled)
            finally:
                self._ours = False
            total = total + scaled.detach()
            self._collect()
        self._hand_back()
        return float(total)

    def _loss_of(self, batch: Pieces, given: Pieces) -> Tensor:
        """Return the loss; add the values of the labels to an error about them."""
        try:
            return loss_of(self.module, batch, self._loss)
        except (IndexError, RuntimeError) as error:
            error_hints.add_note(error, given)
            raise

    @torch.no_grad()
    def take(self) -> None:
        """Copy the gradients that the user's backward pass left into g."""
        self._filled.clear()
        self._collect()
        self._hand_back()

    @torch.no_grad()
    def loss_of(self, batch: Pieces) -> float:
        """Return the mean loss over a batch, with the model in evaluation mode."""
        self.refresh()
        self.module.eval()
        with self._autocast():
            return float(self._loss_of(each(lambda piece: piece.to(self.x.device), batch), batch))

    def refresh(self) -> None:
        """Update parameters of another dtype from x."""
        with torch.no_grad():
            for p, master in self._masters:
                p.copy_(master)

    def _collect(self) -> None:
        """Copy the gradients that backward left into g, or add them.

        Backward may leave a new tensor, one of the module's own, or none; copying afterwards handles all cases, and
        costs no more than clearing g first and adding into it.
        """
        fresh: tuple[list[Tensor], list[Tensor]] = [], []
        more: tuple[list[Tensor], list[Tensor]] = [], []
        for name, p, slot in zip(self._names, self.parameters, self._slots, strict=True):
            if p.grad is None:
                continue
            if p.grad.layout is not torch.strided:
                raise TypeError(
                    f"the gradient of {name} is sparse, which is not supported. Use sparse=False in its layer."
                )
            slots, grads = more if p in self._filled else fresh
            slots.append(slot)
            grads.append(p.grad)
            self._filled.add(p)
        if fresh[0]:
            torch._foreach_copy_(*fresh)
        if more[0]:
            torch._foreach_add_(*more)

    def present(self) -> None:
        """Mark every parameter as having a gradient in g."""
        self._marks.clear_(self.g)

    def _hand_back(self) -> None:
        """Set every parameter's gradient to its part of g; mark in g those that have none."""
        self.present()
        for p, slot in zip(self.parameters, self._slots, strict=True):
            if p in self._filled:
                p.grad = slot if slot.dtype == p.dtype else None
            else:
                slot.fill_(ABSENT)
                p.grad = None

    def _take_early(self, p: Tensor, slot: Tensor, part: slice) -> None:
        """Copy a gradient during backward, while it is in the cache, so that its memory can be reused."""
        grad = p.grad
        if not self._ours or grad is None or grad.layout is not torch.strided:
            return
        if p in self._filled:
            slot.add_(grad)
        else:
            slot.copy_(grad)
        self._filled.add(p)
        p.grad = None
        if self._ready is not None:
            slot.view(-1)[:1].add_(0.0)  # marks it as present before it is sent: −0 becomes 0
            self._ready(part)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.x.device.type, dtype=torch.bfloat16) if self._bf16 else nullcontext()

    def buffers(self) -> dict[str, Tensor]:
        """Return the module's persistent buffers, by name."""
        return persistent_buffers(self.module)


def _marks(layers: Sequence[slice], cuts: Sequence[int], g: Tensor) -> GradientMask:
    """Return a mask of the first elements of every layer of g and of every piece that another node holds."""
    heads = {*cuts, *(layer.start for layer in layers if layer.start < layer.stop)}
    return GradientMask((slice(head, head + 1) for head in sorted(heads)), g.device)


def _parts(batch: Pieces, size: int, count: int) -> Iterator[tuple[Pieces, float]]:
    """Cut a batch into micro-batches, each with its share of the samples."""
    if count == 1:
        yield batch, 1.0
        return
    small, larger = divmod(size, count)
    start = 0
    for i in range(count):
        stop = start + small + (i < larger)
        if stop > start:
            yield each(itemgetter(slice(start, stop)), batch), (stop - start) / size
        start = stop
