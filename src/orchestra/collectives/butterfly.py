# SPDX-License-Identifier: Apache-2.0
"""Butterfly: recursive doubling, with chunks that pass through the stages independently of each other.

Li, Davis, Jarvis. "Optimizing Machine Learning on Apache Spark in HPC Environments", MLHPC 2017.
http://wrap.warwick.ac.uk/95878/

    task (k, c), stage k of chunk c:   chunk c += the partner's (r xor 2^k) chunk c, as it was after stage k-1
    depends on (k-1, c) on both partners, and on nothing else

So while one chunk is added, the next is being received and the one after that is being sent. Both partners add the same
two numbers, so all workers get the same bits. A power of two of the workers take part; the others fold: folding.py.

Messages of each of the q: c lg q for c chunks, and lg q n bytes: the fewest rounds, which is best for short vectors.
Folding adds its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from orchestra.collectives.folding import folded
from orchestra.core.comm import Comm
from orchestra.core.vectors import split

_CHUNKS, _LEAST = 8, 1 << 14  # chunks of a vector; numbers that are worth a message of their own


def chunks_of(numel: int) -> int:
    """Return into how many chunks a vector is divided."""
    return max(1, min(_CHUNKS, numel // _LEAST))


def butterfly(comm: Comm, x: Tensor, weight: float, *, chunks: int | None = None) -> float:
    """x ← Σ xᵢ; returns Σ wᵢ. `chunks`: c; by default that of `chunks_of`."""
    return folded(comm, x, weight, partial(_among, comm, x, chunks_of(x.numel()) if chunks is None else chunks))


def _among(comm: Comm, x: Tensor, count: int, members: Sequence[int], weight: float) -> float:
    r = members.index(comm.rank)
    partners = [members[r ^ 1 << k] for k in range(len(members).bit_length() - 1)]
    chunks = [x[part] for part in split(x.numel(), count)]
    weights = [weight] * len(chunks)
    comm.send(partners[0], chunks[0], weight=weight)
    # Tasks are carried out in diagonals: (0, t), (1, t-1), ... What a task needs was sent during the diagonal before,
    # so it arrives while other tasks of that diagonal are added.
    for t in range(len(chunks) + len(partners) - 1):
        if t + 1 < len(chunks):
            comm.send(partners[0], chunks[t + 1], weight=weight)
        for k in range(max(0, t - len(chunks) + 1), min(t + 1, len(partners))):
            c = t - k
            came = comm.recv(partners[k])
            comm.add_(chunks[c], came.x)
            weights[c] += came.weight
            if k + 1 < len(partners):
                comm.send(partners[k + 1], chunks[c], weight=weights[c])
    return weights[0]
