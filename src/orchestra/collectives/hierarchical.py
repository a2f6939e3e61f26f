# SPDX-License-Identifier: Apache-2.0
"""Hierarchical: a ring within each group of workers that are close, rings across the groups for a g-th each.

    within a group of g:   reduce-scatter, so that each member holds the group's sum of a g-th
    across the groups:     the members with the same chunk add it up in a ring of p/g
    within a group:        all-gather

Each worker sends 2 (p-1)/p n bytes, as in one ring, but only 1/g of the vector leaves a group, and rounds are
2 (g-1) + 2 (p/g - 1) instead of 2 (p-1).
"""

from __future__ import annotations

from torch import Tensor

from orchestra.collectives.ring import all_gather, reduce_scatter, ring_among
from orchestra.node import Comm
from orchestra.vectors import split


def hierarchical(comm: Comm, x: Tensor, weight: float) -> float:
    """x ← Σ xᵢ; gives Σ wᵢ."""
    members = comm.workers.members
    g, r = group_size(len(members)), members.index(comm.rank)
    within, across = members[r - r % g : r - r % g + g], members[r % g :: g]
    chunks = [x[part] for part in split(x.numel(), g)]
    weights = [weight] * g
    mine = reduce_scatter(comm, chunks, weights, within)
    weights[mine] = ring_among(comm, chunks[mine], weights[mine], across)
    all_gather(comm, chunks, weights, within)
    return weights[0]


def group_size(p: int) -> int:
    """The divisor of p nearest to its root from below: few rounds within and across.

    >>> [group_size(p) for p in (2, 4, 6, 7, 8, 16)]
    [1, 2, 2, 1, 2, 4]
    """
    return max(g for g in range(1, p + 1) if p % g == 0 and g * g <= p)
