# SPDX-License-Identifier: Apache-2.0
"""Recursive halving and doubling: pairs exchange halves, each time at half the distance; then the same in reverse.

Rabenseifner. "Optimization of Collective Reduction Operations", ICCS 2004.
Thakur, Rabenseifner, Gropp. "Optimization of Collective Communication Operations in MPICH", IJHPCA 2005.

    q workers, a power of two (the others fold: folding.py); chunks 0 ... q-1; a window, at first all of them
    d = q/2, q/4 ... 1:   send the half of the window on the partner's side (r xor d); add to the other: the new window
    d = 1, 2 ... q/2:     exchange windows with the partner: the window doubles

Messages of each of the q: 2 lg q, and 2 (q-1)/q n bytes: as few bytes as a ring, in fewer rounds. Folding adds its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from orchestra.collectives.folding import folded
from orchestra.core.comm import Comm
from orchestra.core.vectors import split


def halving_doubling(comm: Comm, x: Tensor, weight: float) -> float:
    """x ← Σ xᵢ; returns Σ wᵢ."""
    return folded(comm, x, weight, partial(_among, comm, x))


def _among(comm: Comm, x: Tensor, members: Sequence[int], weight: float) -> float:
    q, r = len(members), members.index(comm.rank)
    cuts = [part.start for part in split(x.numel(), q)] + [x.numel()]
    low, size = 0, q  # the window, in chunks
    while size > 1:
        size //= 2
        partner = members[r ^ size]
        kept, given = (low + size, low) if r & size else (low, low + size)
        comm.send(partner, x[cuts[given] : cuts[given + size]], weight=weight)
        came = comm.recv(partner)
        comm.add_(x[cuts[kept] : cuts[kept + size]], came.x)
        weight += came.weight
        low = kept
    while size < q:
        partner = members[r ^ size]
        comm.send(partner, x[cuts[low] : cuts[low + size]], weight=weight)
        came = comm.recv(partner)
        theirs = low - size if r & size else low + size
        x[cuts[theirs] : cuts[theirs + size]].copy_(came.x)
        low, size = min(low, theirs), 2 * size
    return weight
