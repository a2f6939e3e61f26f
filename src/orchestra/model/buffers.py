# SPDX-License-Identifier: Apache-2.0
"""A module's buffers before a forward pass: they come back if the gradient of that pass is not used.

A sample that is not finite reaches BatchNorm's running statistics in the forward pass, long before its gradient is
skipped, and would stay in them for ever.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BufferCopies:
    """Copies of all buffers, as they were at the last `keep`. A module without buffers costs nothing."""

    def __init__(self, module: nn.Module) -> None:
        self._homes = [part._buffers for part in module.modules()]
        self._places: list[tuple[dict[str, Tensor | None], str]] = []
        self._copies: list[Tensor] = []

    def keep(self) -> None:
        """Copy the buffers, into the memory of the last copies where these fit."""
        found = [(home, name, b) for home in self._homes for name, b in home.items() if b is not None]
        buffers = [buffer for _, _, buffer in found]
        if list(map(_kind, buffers)) != list(map(_kind, self._copies)):
            self._copies = [b.detach().clone(memory_format=torch.contiguous_format) for b in buffers]
        elif buffers:
            torch._foreach_copy_(self._copies, buffers)
        self._places = [(home, name) for home, name, _ in found]

    @torch.no_grad()
    def restore(self) -> None:
        """Undo what changed since `keep`."""
        for (home, name), copy in zip(self._places, self._copies, strict=True):
            now = home.get(name)
            if now is None or _kind(now) != _kind(copy):
                home[name] = copy.clone()
            elif not torch.equal(now, copy):  # one that was expanded cannot be written, and does not change
                now.copy_(copy)

    def spoiled(self) -> bool:
        """Whether a number that was finite at `keep` is not any more."""
        pairs = zip((home.get(name) for home, name in self._places), self._copies, strict=True)
        return any(
            bool((copy.isfinite() & ~now.isfinite()).any())
            for now, copy in pairs
            if now is not None and now.is_floating_point() and _kind(now) == _kind(copy)
        )


def _kind(t: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return t.shape, t.dtype, t.device
