# SPDX-License-Identifier: Apache-2.0
"""Double binary tree: two trees, each for half of the vector; who is a leaf in one is inside the other.

Sanders, Speck, Träff. "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 2009.

    tree A   in-order over 0 ... p-1: of any stretch, the number i with the most zeros at the end of i+1 is on top,
             so even numbers are leaves
    tree B   the same over the workers in reverse order if p is even, shifted by one if p is odd
    c chunks of each half; H the depth of the trees, d of a worker in one of them
    round t:   of chunk t - (H-d) of each half, add up what comes from below, then send it up
    round t:   of chunk t - d of each half, take what comes from above, then send it down

On the way up a worker sends each half once, and receives twice the one in whose tree it is inside; on the way down it
is the other way round. So each way a worker sends n and receives n, and with many chunks all links are full both ways
all the time: 2 n β + 2 lg p α, and less than H/c of it more while the trees fill and empty.

What is sent in one round is received in the next. Without the shift by depth a worker at the top of one tree would wait
for chunks to climb it before it sends its next one as a leaf of the other, and so would those who wait for that one:
links idle, the longer the deeper the trees. With it, two messages under way between two workers are enough.

Messages of a worker: in each tree c to the one above and c to each one below: at most 4 c, and 2 n bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from orchestra.core.comm import Comm
from orchestra.core.vectors import split

_CHUNKS, _LEAST = 64, 1 << 14  # chunks of each half; numbers that are worth a message of their own


def chunks_of(numel: int) -> int:
    """In how many chunks each half of a vector travels."""
    return max(1, min(_CHUNKS, numel // 2 // _LEAST))


@dataclass(frozen=True)
class TreePosition:
    """Where a worker is in a tree."""

    depth: int  # the top has 0
    above: int | None
    below: tuple[int, ...]


@lru_cache
def trees(p: int) -> tuple[dict[int, TreePosition], dict[int, TreePosition]]:
    """Both trees over p workers.

    >>> a, b = trees(4)
    >>> {worker: place.below for worker, place in a.items() if place.below}
    {1: (0, 2), 3: (1,)}
    >>> {worker: place.below for worker, place in b.items() if place.below}
    {2: (3, 1), 0: (2,)}
    """
    order = [p - 1 - i for i in range(p)] if p % 2 == 0 else [(i + 1) % p for i in range(p)]
    places: tuple[dict[int, TreePosition], dict[int, TreePosition]] = ({}, {})
    for into, workers in zip(places, (list(range(p)), order), strict=True):
        _plant(0, p, None, workers, into)
    return places


def _plant(
    low: int, high: int, above: int | None, workers: list[int], into: dict[int, TreePosition], depth: int = 0
) -> int | None:
    if low >= high:
        return None
    top = max(range(low, high), key=lambda i: (i + 1) & -(i + 1))
    below = [_plant(*part, workers[top], workers, into, depth + 1) for part in ((low, top), (top + 1, high))]
    into[workers[top]] = TreePosition(depth, above, tuple(worker for worker in below if worker is not None))
    return workers[top]


def double_tree(comm: Comm, x: Tensor, weight: float) -> float:
    """x ← Σ xᵢ; gives Σ wᵢ."""
    both, count = trees(len(comm.workers)), chunks_of(x.numel())
    halves = [
        _Half(tree[comm.rank], [x[half][part] for part in split(half.stop - half.start, count)], [weight] * count)
        for tree, half in zip(both, split(x.numel(), 2), strict=True)
    ]
    # In every round receive, then send: then a round needs only the rounds before it, and nobody waits in a circle.
    inside, leaf = sorted(halves, key=lambda half: not half.place.below)
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
    """A half's chunks on their way up and down its tree, at one worker."""

    place: TreePosition
    chunks: list[Tensor]
    weights: list[float]

    def up(self, comm: Comm, c: int) -> None:
        """Add up what comes from below, send it up, if there is such a chunk."""
        if not 0 <= c < len(self.chunks):
            return
        for child in self.place.below:
            came = comm.recv(child)
            comm.add_(self.chunks[c], came.x)
            self.weights[c] += came.weight
        if self.place.above is not None:
            comm.send(self.place.above, self.chunks[c], weight=self.weights[c])

    def down(self, comm: Comm, c: int) -> None:
        """Take what comes from above, send it down, if there is such a chunk."""
        if not 0 <= c < len(self.chunks):
            return
        if self.place.above is not None:
            came = comm.recv(self.place.above)
            self.chunks[c].copy_(came.x)
            self.weights[c] = came.weight
        for child in self.place.below:
            comm.send(child, self.chunks[c], weight=self.weights[c])
