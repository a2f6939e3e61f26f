# SPDX-License-Identifier: Apache-2.0
"""Ring: everybody sends to the next and receives from the one before, a p-th of the vector at a time.

Patarasuk, Yuan. "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.

    chunk r goes to r+1, in c pieces; then, of s = 0 ... 2p-3 and piece by piece, what comes from r-1 is
    s < p-1:   added to chunk r-s-1                 reduce-scatter: worker r ends with chunk r+1 complete
    s ≥ p-1:   chunk r-s-1                          all-gather
    and goes on to r+1, unless that was the last

While one piece is added up the other is under way: with one, everybody's link is idle between two rounds until the
slowest has added. Messages of a worker: 2 (p-1) c, and 2 (p-1)/p n bytes: no algorithm sends less.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from orchestra.core.comm import Comm
from orchestra.core.vectors import split

_PIECES, _LEAST = 2, 1 << 14  # of a chunk; numbers that are worth a message of their own


def ring(comm: Comm, x: Tensor, weight: float) -> float:
    """x ← Σ xᵢ; gives Σ wᵢ."""
    around = comm.workers.members
    return ring_among(comm, x, weight, around, c=pieces_of(x.numel() // len(around)))


def pieces_of(numel: int) -> int:
    """In how many pieces a chunk travels."""
    return max(1, min(_PIECES, numel // _LEAST))


def ring_among(comm: Comm, x: Tensor, weight: float, around: Sequence[int], *, c: int = 1) -> float:
    """The same among some of the workers, with chunks of c pieces."""
    p = len(around)
    chunks, weights = [x[part] for part in split(x.numel(), p)], [weight] * p
    _travel(comm, chunks, weights, around, range(2 * (p - 1)), c)
    return weights[0]


def reduce_scatter(comm: Comm, chunks: Sequence[Tensor], weights: list[float], around: Sequence[int]) -> int:
    """Add up, so that every chunk is complete somewhere; gives which one is here."""
    p = len(around)
    _travel(comm, chunks, weights, around, range(p - 1))
    return (around.index(comm.rank) + 1) % p


def all_gather(comm: Comm, chunks: Sequence[Tensor], weights: list[float], around: Sequence[int]) -> None:
    """Spread what `reduce_scatter` completed."""
    p = len(around)
    _travel(comm, chunks, weights, around, range(p - 1, 2 * (p - 1)))


def _travel(
    comm: Comm, chunks: Sequence[Tensor], weights: list[float], around: Sequence[int], rounds: range, c: int = 1
) -> None:
    """Some of the 2 (p-1) rounds."""
    if not rounds:
        return
    p, r = len(around), around.index(comm.rank)
    before, after = around[r - 1], around[(r + 1) % p]
    pieces = [[chunk[part] for part in split(chunk.numel(), c)] for chunk in chunks]
    first = (r - rounds.start) % p
    for piece in pieces[first]:
        comm.send(after, piece, weight=weights[first])
    for s in rounds:
        i = (r - s - 1) % p
        own = weights[i]
        for piece in pieces[i]:
            came = comm.recv(before)
            if s < p - 1:
                comm.add_(piece, came.x)
                weights[i] = own + came.weight
            else:
                piece.copy_(came.x)
                weights[i] = came.weight
            if s + 1 in rounds:
                comm.send(after, piece, weight=weights[i])
