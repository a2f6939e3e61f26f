# SPDX-License-Identifier: Apache-2.0
"""The effect of collectives on the members' vectors, in rank order, and the bytes that each member moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from orchestra.core.ops import Broadcast, Gather, Group, Mean, MeanUpdate
from orchestra.core.vectors import ranges, share_of_mean, weighted_mean


def _mean(group: Group, ops: Sequence[Mean]) -> list[float]:
    weights = [op.weight for op in ops]
    total = sum(weights)
    if total and len(ops) > 1 and not ops[0].x.is_meta:
        mean = torch.empty_like(ops[0].x)
        weighted_mean(mean, [op.x for op in ops], weights)
        for op in ops:
            op.x.copy_(mean)
    return [total for _ in ops]


def _mean_update(group: Group, ops: Sequence[MeanUpdate]) -> list[None]:
    """Average the whole of g once, then let each member update the range of x that it owns.

    The mean is element-wise, so its bits equal those of the means of ranges, which real workers compute; for N members
    it takes N operations, not N².
    """
    weights = [op.weight for op in ops]
    if any(weights) and not ops[0].g.is_meta:
        mean = ops[0].g
        weighted_mean(mean, [op.g for op in ops], weights)
        parts = ranges(mean.numel(), len(ops))
        for op, part in zip(ops, parts, strict=True):
            op.apply(mean[part])
        _share([op.x for op in ops], parts)
    return [None for _ in ops]


def _share(vectors: Sequence[Tensor], parts: Sequence[slice]) -> None:
    """Copy each member's own range to all members: into one vector, then from there to the others."""
    whole = vectors[0]
    apart = [(x, part) for x, part in zip(vectors, parts, strict=True) if x.data_ptr() != whole.data_ptr()]
    for x, part in apart:
        whole[part].copy_(x[part])
    for x, _ in apart:
        x.copy_(whole)


def _broadcast(group: Group, ops: Sequence[Broadcast]) -> list[None]:
    source = ops[group.index(ops[0].root)].x
    for op in ops:
        if op.x is not source and not source.is_meta:
            op.x.copy_(source)
    return [None for _ in ops]


def _gather(group: Group, ops: Sequence[Gather]) -> list[list[Tensor]]:
    """Return a separate copy of all vectors for every member, which may change it: one operation for all N vectors."""
    vectors = [op.x.detach() for op in ops]
    if vectors[0].is_meta:
        return [vectors.copy() for _ in ops]
    rows = torch.stack(vectors)
    return [list(rows.clone().unbind()) for _ in ops]


CARRY_OUT: dict[type[Any], Callable[..., list[Any]]] = {
    Mean: _mean,
    MeanUpdate: _mean_update,
    Broadcast: _broadcast,
    Gather: _gather,
}


def vector_of(op: Any) -> Tensor:
    """Return the vector of a collective."""
    vector: Tensor = op.g if isinstance(op, MeanUpdate) else op.x
    return vector


def nbytes(x: Tensor) -> int:
    """Return the length of a message with this vector."""
    size: int = x.numel() * x.element_size()
    return size


def bytes_of(op: Any, rank: int) -> tuple[int, int]:
    """Return the bytes that a member of a collective sends and receives."""
    x, peers = vector_of(op), len(op.group) - 1
    match op:
        case Mean() | MeanUpdate():
            both = share_of_mean(x, len(op.group), op.group.index(rank))
            return both, both
        case Broadcast():
            return (peers * nbytes(x), 0) if rank == op.root else (0, nbytes(x))
        case _:
            return peers * nbytes(x), peers * nbytes(x)
