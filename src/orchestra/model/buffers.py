# SPDX-License-Identifier: Apache-2.0
"""Copies of a module's buffers before a forward pass, to restore them if the gradient of that pass is not used.

A sample that is not finite changes BatchNorm's running statistics in the forward pass, before its gradient is skipped,
and would stay in them forever.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BufferCopies:
    """Copies of all buffers at the last `keep`. A module without buffers costs nothing."""

    def __init__(self, module: nn.Module) -> None:
        self._homes = [part._buffers for part in module.modules()]
        self._places: list[tuple[dict[str, Tensor | None], str]] = []
        self._copies: list[Tensor] = []

    def keep(self) -> None:
        """Copy the buffers, into the memory of the previous copies if they fit."""
        found = [(home, name, b) for home in self._homes for name, b in home.items() if b is not None]
        buffers = [buffer for _, _, buffer in found]
        if list(map(_kind, buffers)) != list(map(_kind, self._copies)):
            self._copies = [b.detach().clone(memory_format=torch.contiguous_format) for b in buffers]
        elif buffers:
            torch._foreach_copy_(self._copies, buffers)
        self._places = [(home, name) for home, name, _ in found]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffers to their values at `keep`."""
        for (home, name), copy in zip(self._places, self._copies, strict=True):
            now = home.get(name)
            if now is None or _kind(now) != _kind(copy):
                home[name] = copy.clone()
            elif not torch.equal(now, copy):  # an expanded buffer cannot be written, and does not change
                now.copy_(copy)

    def spoiled(self) -> bool:
        """Return whether a number that was finite at `keep` no longer is."""
        pairs = zip((home.get(name) for home, name in self._places), self._copies, strict=True)
        return any(
            bool((copy.isfinite() & ~now.isfinite()).any())
            for now, copy in pairs
            if now is not None and now.is_floating_point() and _kind(now) == _kind(copy)
        )


def _kind(t: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return t.shape, t.dtype, t.device
