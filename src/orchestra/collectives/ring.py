# SPDX-License-Identifier: Apache-2.0
"""Ring: everybody sends to the next and receives from the one before, a p-th of the vector at a time.

Patarasuk, Yuan. "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.

    s = 0 ... p-2:   send chunk r-s to r+1;   chunk r-s-1 += what comes from r-1          reduce-scatter
    s = 0 ... p-2:   send chunk r+1-s to r+1; chunk r-s   ← what comes from r-1           all-gather

Worker r ends the first half with chunk r+1 complete. Messages of a worker: 2 (p-1), and 2 (p-1)/p n bytes: no algorithm
sends less.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from orchestra.node import Comm
from orchestra.vectors import split


def ring(comm: Comm, x: Tensor, weight: float) -> float:
    """x ← Σ xᵢ; gives Σ wᵢ."""
    return ring_among(comm, x, weight, comm.workers.members)


def ring_among(comm: Comm, x: Tensor, weight: float, around: Sequence[int]) -> float:
    """The same among some of the workers."""
    chunks = [x[part] for part in split(x.numel(), len(around))]
    weights = [weight] * len(around)
    reduce_scatter(comm, chunks, weights, around)
    all_gather(comm, chunks, weights, around)
    return weights[0]


def reduce_scatter(comm: Comm, chunks: Sequence[Tensor], weights: list[float], around: Sequence[int]) -> int:
    """Add up, so that every chunk is complete somewhere; gives which one is here."""
    p, r = len(around), around.index(comm.rank)
    for s in range(p - 1):
        mine, theirs = (r - s) % p, (r - s - 1) % p
        comm.send(around[(r + 1) % p], chunks[mine], weight=weights[mine])
        came = comm.recv(around[r - 1])
        comm.add_(chunks[theirs], came.x)
        weights[theirs] += came.weight
    return (r + 1) % p


def all_gather(comm: Comm, chunks: Sequence[Tensor], weights: list[float], around: Sequence[int]) -> None:
    """Spread what `reduce_scatter` completed."""
    p, r = len(around), around.index(comm.rank)
    for s in range(p - 1):
        mine, theirs = (r + 1 - s) % p, (r - s) % p
        comm.send(around[(r + 1) % p], chunks[mine], weight=weights[mine])
        came = comm.recv(around[r - 1])
        chunks[theirs].copy_(came.x)
        weights[theirs] = came.weight
