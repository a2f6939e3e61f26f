# SPDX-License-Identifier: Apache-2.0
"""Double binary tree: two trees, each for half of the vector; a leaf of one tree is an inner node of the other.

Sanders, Speck, Träff. "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 2009.

    tree A   in-order over 0 ... p-1: the root of any interval is the number i with the most zeros at the end of i+1,
             so even numbers are leaves
    tree B   the same over the workers in reverse order if p is even, shifted by one if p is odd
    c chunks of each half; H the depth of the trees, d of a worker in one of them
    round t:   receive chunk t - (H-d) of each half from the children, add it up, then send it to the parent
    round t:   receive chunk t - d of each half from the parent, then send it to the children

On the way up a worker sends each half once, and receives twice the half in whose tree it is an inner node; on the way
down it receives each half once and sends that one twice. So in each direction a worker sends n and receives n bytes,
and with many chunks all links are busy both ways all the time: 2 n β + 2 lg p α, and less than H/c of that more while
the trees fill and empty.

A message sent in one round is received in the next. Without the shift by depth, the root of one tree would wait for
chunks to reach it before it sends its next one as a leaf of the other tree, and so would all workers that wait for that
chunk: links would idle, the longer the deeper the trees. With the shift, two messages at a time between two workers are
enough.

Messages of a worker: in each tree c to its parent and c to each child: at most 4 c, and 2 n bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from orchestra.core.comm import Comm
from orchestra.core.vectors import split

_CHUNKS, _LEAST = 64, 1 << 14  # chunks of each half; numbers that are worth a message of their own


def chunks_of(numel: int) -> int:
    """Return into how many chunks each half of a vector is divided."""
    return max(1, min(_CHUNKS, numel // 2 // _LEAST))


@dataclass(frozen=True)
class TreePosition:
    """The place of a worker in a tree."""

    depth: int  # the root has 0
    parent: int | None
    children: tuple[int, ...]


@lru_cache
def trees(p: int) -> tuple[dict[int, TreePosition], dict[int, TreePosition]]:
    """Return both trees over p workers.

    >>> a, b = trees(4)
    >>> {worker: place.children for worker, place in a.items() if place.children}
    {1: (0, 2), 3: (1,)}
    >>> {worker: place.children for worker, place in b.items() if place.children}
    {2: (3, 1), 0: (2,)}
    """
    order = [p - 1 - i for i in range(p)] if p % 2 == 0 else [(i + 1) % p for i in range(p)]
    places: tuple[dict[int, TreePosition], dict[int, TreePosition]] = ({}, {})
    for into, workers in zip(places, (list(range(p)), order), strict=True):
        _build(0, p, None, workers, into)
    return places


def _build(
    low: int, high: int, parent: int | None, workers: list[int], into: dict[int, TreePosition], depth: int = 0
) -> int | None:
    if low >= high:
        return None
    top = max(range(low, high), key=lambda i: (i + 1) & -(i + 1))
    children = [_build(*part, workers[top], workers, into, depth + 1) for part in ((low, top), (top + 1, high))]
    into[workers[top]] = TreePosition(depth, parent, tuple(worker for worker in children if worker is not None))
    return workers[top]


def double_tree(comm: Comm, x: Tensor, weight: float) -> float:
    """x ← Σ xᵢ; returns Σ wᵢ."""
    both, count = trees(len(comm.workers)), chunks_of(x.numel())
    halves = [
        _Half(tree[comm.rank], [x[half][part] for part in split(half.stop - half.start, count)], [weight] * count)
        for tree, half in zip(both, split(x.numel(), 2), strict=True)
    ]
    # In every round, receive, then send: a round depends only on earlier rounds, so workers cannot wait in a cycle.
    inside, leaf = sorted(halves, key=lambda half: not half.place.children)
    height = max(place.depth for place in both[0].values())
    for t in range(height + count):
        for half in (inside, leaf):
            half.up(comm, t - (height - half.place.depth))
    for t in range(height + count):
        for half in (leaf, inside):
            half.down(comm, t - half.place.depth)
    return leaf.weights[0]


@dataclass
class _Half:
    """The chunks of one half of the vector, at one worker of its tree."""

    place: TreePosition
    chunks: list[Tensor]
    weights: list[float]

    def up(self, comm: Comm, c: int) -> None:
        """If chunk c exists: add what the children send, then send it to the parent."""
        if not 0 <= c < len(self.chunks):
            return
        for child in self.place.children:
            came = comm.recv(child)
            comm.add_(self.chunks[c], came.x)
            self.weights[c] += came.weight
        if self.place.parent is not None:
            comm.send(self.place.parent, self.chunks[c], weight=self.weights[c])

    def down(self, comm: Comm, c: int) -> None:
        """If chunk c exists: receive it from the parent, then send it to the children."""
        if not 0 <= c < len(self.chunks):
            return
        if self.place.parent is not None:
            came = comm.recv(self.place.parent)
            self.chunks[c].copy_(came.x)
            self.weights[c] = came.weight
        for child in self.place.children:
            comm.send(child, self.chunks[c], weight=self.weights[c])
