# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on flat vectors that several modules must do in exactly the same way."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

# A block of every operand fits the second-level cache, so that summing N vectors costs one trip to memory, not N.
BLOCK = 1 << 16


# From this length on a vector is cut at multiples of a cache line and optimizers use torch's fused kernels. Those treat
# the last few elements of a range slightly differently; with such cuts that happens only at the end of the vector,
# so the result does not depend on how many ranges there are.
LARGE = 1 << 16
LINE = 64


def is_small(length: int, parts: int) -> bool:
    """Return whether summing `parts` whole vectors on every node is faster than dividing the sum among the nodes."""
    return length * parts <= 1 << 18


def cut(length: int, parts: int, i: int) -> int:
    """Return the start of part `i` of `range(length)` cut into `parts` pieces whose sizes differ by at most one."""
    small, larger = divmod(length, parts)
    return i * small + min(i, larger)


def split(length: int, parts: int) -> list[slice]:
    """Cut `range(length)` into `parts` consecutive slices whose sizes differ by at most one.

    >>> split(10, 3)
    [slice(0, 4, None), slice(4, 7, None), slice(7, 10, None)]
    """
    return [slice(cut(length, parts, i), cut(length, parts, i + 1)) for i in range(parts)]


@lru_cache(maxsize=1 << 14)
def range_of(length: int, parts: int, i: int) -> slice:
    """Return range `i` of a vector cut into `parts` of nearly equal size; long vectors are cut at cache lines."""
    if length < max(LARGE, LINE * parts):
        return slice(cut(length, parts, i), cut(length, parts, i + 1))
    lines = length // LINE
    stop = length if i == parts - 1 else cut(lines, parts, i + 1) * LINE
    return slice(cut(lines, parts, i) * LINE, stop)


def ranges(length: int, parts: int) -> list[slice]:
    """Return all ranges of a vector cut into `parts`.

    >>> ranges(100_000, 2)
    [slice(0, 49984, None), slice(49984, 100000, None)]
    """
    return [range_of(length, parts, i) for i in range(parts)]


def ranges_of_layers(layers: Sequence[int], parts: int) -> list[slice]:
    """Return ranges that cut no layer of a vector, such that the largest range is as small as possible.

    >>> ranges_of_layers([6, 2, 2, 2, 5], 3)
    [slice(0, 6, None), slice(6, 12, None), slice(12, 17, None)]
    """
    low, high = max(layers), sum(layers)
    while low < high:
        most = (low + high) // 2
        low, high = (low, most) if len(_filled(layers, parts, most)) <= parts else (most + 1, high)
    cuts = [0, *accumulate(_filled(layers, parts, low))]
    return [slice(start, stop) for start, stop in pairwise(cuts)]


def _filled(layers: Sequence[int], parts: int, most: int) -> list[int]:
    """Return the lengths of ranges filled with whole layers in order; every range has at least one layer."""
    lengths = [0]
    for i, layer in enumerate(layers):
        needed = len(layers) - i <= parts - len(lengths)  # each remaining layer needs its own range
        if i and (needed or lengths[-1] + layer > most):
            lengths.append(0)
        lengths[-1] += layer
    return lengths


def share_of_mean(x: Tensor, parts: int, index: int) -> int:
    """Return the bytes that one of `parts` members sends, and also receives, in an all-reduce of x.

    By reduce-scatter and all-gather, the minimum between machines: all ranges but the member's own go to their owners,
    then its own goes to all others.
    """
    mine = range_of(x.numel(), parts, index)
    own: int = (mine.stop - mine.start) * x.element_size()
    return x.numel() * x.element_size() - own + (parts - 1) * own


def clip_(g: Tensor, most: float) -> None:
    """Scale g down to a norm of `most` if it is longer, as `torch.nn.utils.clip_grad_norm_` does."""
    with torch.no_grad():
        g.mul_(torch.clamp(most / (torch.linalg.vector_norm(g) + 1e-6), max=1.0))


def weighted_mean(out: Tensor, vectors: Sequence[Tensor], weights: Sequence[float]) -> None:
    """Write Σ wᵢ vᵢ / Σ wᵢ into `out`, which may be one of the vectors.

    The vectors are added in the given order, not in order of arrival, so that the result does not depend on speed. A
    vector of weight zero is not read at all, so a gradient that is not finite never reaches its peers. Each vector is
    blended into the mean of those before it, so low precision does not overflow, and the mean of equal numbers is that
    number.
    """
    shares = [(v, w / total) for v, w, total in zip(vectors, weights, accumulate(weights), strict=True) if w]
    with torch.no_grad():
        (first, _), *rest = shares
        if not rest:
            out.copy_(first)
        elif len(rest) == 1:  # one pass over memory
            _blend(first, *rest[0], out)
        else:
            _blend_blocks(first, rest, out)


def _blend_blocks(first: Tensor, rest: Sequence[tuple[Tensor, float]], out: Tensor) -> None:
    """Blend several vectors into the first, a block of all of them at a time."""
    aliased = any(v.data_ptr() == out.data_ptr() for v, _ in rest[1:])
    for start in range(0, out.numel(), BLOCK):
        stop = start + BLOCK
        block = out.new_empty(min(BLOCK, out.numel() - start)) if aliased else out[start:stop]
        mean = first[start:stop]
        for v, share in rest:
            _blend(mean, v[start:stop], share, block)
            mean = block
        if aliased:
            out[start:stop] = block


def _blend(a: Tensor, b: Tensor, share: float, out: Tensor) -> None:
    """Write a + share (b − a) into `out`: −0 where both are (see gradient_mask), as torch's lerp does from 0.5 on."""
    if share < 0.5:
        torch.lerp(b, a, 1 - share, out=out)
    else:
        torch.lerp(a, b, share, out=out)


def checksum(tensor: Tensor, before: int = 0) -> int:
    """Return a checksum of all bits, continuing the checksum `before`."""
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data, before)
