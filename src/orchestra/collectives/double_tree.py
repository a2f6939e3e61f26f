# SPDX-License-Identifier: Apache-2.0
"""Double binary tree: two trees, each for half of the vector; who is a leaf in one is inside the other.

Sanders, Speck, Träff. "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 2009.

    tree A   in-order over 0 ... p-1: of any stretch, the number i with the most zeros at the end of i+1 is on top,
             so even numbers are leaves
    tree B   the same over the workers in reverse order if p is even, shifted by one if p is odd
    for every chunk of both halves:   add up what comes from below, send it up
    for every chunk of both halves:   send what comes from above down

A worker inside receives two and sends one, then receives one and sends two; a leaf sends one and receives one. Over
both trees that is at most 2 n sent and 2 n received, in about 2 lg p rounds. The least is 2 n β; since what a worker
sends to several others shares its link, it is about 4 n β here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from orchestra.node import Comm
from orchestra.vectors import split

_CHUNKS, _LEAST = 16, 1 << 12  # chunks of each half; numbers that are worth a message of their own


@dataclass(frozen=True)
class Place:
    """Where a worker is in a tree."""

    above: int | None
    below: tuple[int, ...]


@lru_cache
def trees(p: int) -> tuple[dict[int, Place], dict[int, Place]]:
    """Both trees over p workers.

    >>> a, b = trees(4)
    >>> {worker: place.below for worker, place in a.items() if place.below}
    {1: (0, 2), 3: (1,)}
    >>> {worker: place.below for worker, place in b.items() if place.below}
    {2: (3, 1), 0: (2,)}
    """
    order = [p - 1 - i for i in range(p)] if p % 2 == 0 else [(i + 1) % p for i in range(p)]
    places: tuple[dict[int, Place], dict[int, Place]] = ({}, {})
    for into, workers in zip(places, (list(range(p)), order), strict=True):
        _plant(0, p, None, workers, into)
    return places


def _plant(low: int, high: int, above: int | None, workers: list[int], into: dict[int, Place]) -> int | None:
    if low >= high:
        return None
    top = max(range(low, high), key=lambda i: (i + 1) & -(i + 1))
    below = [_plant(*part, workers[top], workers, into) for part in ((low, top), (top + 1, high))]
    into[workers[top]] = Place(above, tuple(worker for worker in below if worker is not None))
    return workers[top]


def double_tree(comm: Comm, x: Tensor, weight: float) -> float:
    """x ← Σ xᵢ; gives Σ wᵢ."""
    halves = [x[part] for part in split(x.numel(), 2)]
    count = max(1, min(_CHUNKS, x.numel() // 2 // _LEAST))
    tasks = [
        [_Task(tree[comm.rank], half[part], weight) for part in split(half.numel(), count)]
        for tree, half in zip(trees(len(comm.workers)), halves, strict=True)
    ]
    # Who waits for nobody goes first, one chunk ahead: what it sends is under way while the other tree is waited for.
    first, second = sorted(tasks, key=lambda chunks: len(chunks[0].place.below))
    for c in range(-1, count):
        if c + 1 < count:
            first[c + 1].up(comm)
        if c >= 0:
            second[c].up(comm)
    for c in range(count):
        second[c].down(comm)
        first[c].down(comm)
    return first[0].weight


@dataclass
class _Task:
    """One chunk's way up and down a tree, at one worker."""

    place: Place
    piece: Tensor
    weight: float

    def up(self, comm: Comm) -> None:
        """Add up what comes from below, send it up."""
        for child in self.place.below:
            came = comm.recv(child)
            self.piece.add_(came.x)
            self.weight += came.weight
        if self.place.above is not None:
            comm.send(self.place.above, self.piece, weight=self.weight)

    def down(self, comm: Comm) -> None:
        """Send what comes from above down."""
        if self.place.above is not None:
            came = comm.recv(self.place.above)
            self.piece.copy_(came.x)
            self.weight = came.weight
        for child in self.place.below:
            comm.send(child, self.piece, weight=self.weight)
