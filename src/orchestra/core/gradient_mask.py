# SPDX-License-Identifier: Apache-2.0
"""Parameters without a gradient, which the vector g marks by the sign of its zeros.

    absent      every element of the parameter's part of g is −0
    present     its first element is not −0, nor is that of any range in which a server or a worker holds a piece of it

PyTorch does not update a parameter that has no gradient in a step: no weight decay, no momentum, no step of Adam
counted. Here g is one vector, summed by shared memory, sockets, Gloo, NCCL and every algorithm in `collectives/`. The
zeros carry the mark through all of them without an extra byte: −0 + −0 = −0, c · −0 = −0 for c > 0, and −0 + 0 =
a − a = 0. So a parameter is absent in a mean if and only if no worker had a gradient for it, as in
DistributedDataParallel with `find_unused_parameters=True`; if some workers had one, the others count as zeros.

The rule for code that handles gradients: sums begin with a term or with `ABSENT`, never with 0, and factors are
positive. A vector of weight zero takes no part, or takes part as all `ABSENT`.

Two present gradients are taken for absent: one of which a filter lets nothing pass, in that push; and one of which
every element is negative and underflows when it is multiplied by its worker's share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

ABSENT = -0.0


def pieces_of(lengths: Sequence[int], part: slice) -> list[slice]:
    """Return the slices of a range of x that belong to its layers, relative to the range; empty layers have none.

    >>> pieces_of([4, 0, 3, 3], slice(2, 8))
    [slice(0, 2, None), slice(2, 5, None), slice(5, 6, None)]
    """
    bounds = ((max(a, part.start), min(b, part.stop)) for a, b in pairwise(accumulate(lengths, initial=0)))
    return [slice(low - part.start, high - part.start) for low, high in bounds if low < high]


class GradientMask:
    """Finds absent pieces of a gradient, and marks pieces as present."""

    def __init__(self, pieces: Iterable[slice], device: torch.device) -> None:
        self.pieces = list(pieces)
        self._heads = torch.tensor([piece.start for piece in self.pieces], dtype=torch.int64, device=device)

    def absent(self, g: Tensor) -> list[slice]:
        """Return the pieces without a gradient. In the usual case this reads one element of each piece."""
        return [piece for piece in self._marked(g) if torch.signbit(g[piece]).all() and not g[piece].any()]

    def clear_(self, g: Tensor) -> None:
        """Mark every piece as present: its first element becomes 0 if it is −0."""
        if g.device.type != "cpu":  # without synchronising with the device
            g.index_copy_(0, self._heads, g.index_select(0, self._heads) + 0.0)
            return
        for piece in self._marked(g):
            g[piece.start] = 0.0

    def _marked(self, g: Tensor) -> list[slice]:
        """Return the pieces whose first element is −0."""
        heads = g.index_select(0, self._heads).tolist()
        if 0.0 not in heads:
            return []
        return [piece for piece, v in zip(self.pieces, heads, strict=True) if v == 0 and math.copysign(1, v) < 0]
