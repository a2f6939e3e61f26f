# SPDX-License-Identifier: Apache-2.0
"""Ring: each worker sends to the next and receives from the one before, a p-th of the vector at a time.

Patarasuk, Yuan. "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.

    worker r sends chunk r to r+1, in c pieces; then for s = 0 ... 2p-3, piece by piece, what r-1 sends
    s < p-1:   is added to chunk r-s-1              reduce-scatter: worker r ends with chunk r+1 complete
    s ≥ p-1:   replaces chunk r-s-1                 all-gather
    and is sent on to r+1, except in the last round

While one piece is added, the other is being sent: with a single piece, all links would idle between two rounds until
the slowest worker has added. Messages of a worker: 2 (p-1) c, and 2 (p-1)/p n bytes: no algorithm sends less.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from orchestra.core.comm import Comm
from orchestra.core.vectors import split

_PIECES, _LEAST = 2, 1 << 14  # of a chunk; numbers that are worth a message of their own


def ring(comm: Comm, x: Tensor, weight: float) -> float:
    """x ← Σ xᵢ; returns Σ wᵢ."""
    around = comm.workers.members
    return ring_among(comm, x, weight, around, c=pieces_of(x.numel() // len(around)))


def pieces_of(numel: int) -> int:
    """Return into how many pieces a chunk is divided."""
    return max(1, min(_PIECES, numel // _LEAST))


def ring_among(comm: Comm, x: Tensor, weight: float, around: Sequence[int], *, c: int = 1) -> float:
    """x ← Σ xᵢ over some of the workers, with chunks of c pieces; returns Σ wᵢ."""
    p = len(around)
    chunks, weights = [x[part] for part in split(x.numel(), p)], [weight] * p
    _travel(comm, chunks, weights, around, range(2 * (p - 1)), c)
    return weights[0]


def reduce_scatter(comm: Comm, chunks: Sequence[Tensor], weights: list[float], around: Sequence[int]) -> int:
    """Compute the sum of each chunk on one worker; return which chunk is complete on this one."""
    p = len(around)
    _travel(comm, chunks, weights, around, range(p - 1))
    return (around.index(comm.rank) + 1) % p


def all_gather(comm: Comm, chunks: Sequence[Tensor], weights: list[float], around: Sequence[int]) -> None:
    """Send the chunks that `reduce_scatter` completed to all workers."""
    p = len(around)
    _travel(comm, chunks, weights, around, range(p - 1, 2 * (p - 1)))


def _travel(
    comm: Comm, chunks: Sequence[Tensor], weights: list[float], around: Sequence[int], rounds: range, c: int = 1
) -> None:
    """Carry out some of the 2 (p-1) rounds."""
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
