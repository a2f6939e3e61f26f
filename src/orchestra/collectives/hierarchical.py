# SPDX-License-Identifier: Apache-2.0
"""Hierarchical: a ring within each group of close workers, and for each chunk a ring across the groups.

    groups of g workers, the last one of those that are left; chunks 0 ... g-1
    within a group of s:   reduce-scatter: each worker gets the group's sum of a chunk, or of several if s < g
    across the m groups:   for each chunk, the workers that hold it compute its sum in a ring
    within a group:        all-gather

Messages of a worker: 2 (s-1) + 2 (m-1) for each chunk it holds. If g divides p, all send 2 (p-1)/p n bytes, as in one
ring, but in 2 (g-1) + 2 (m-1) rounds instead of 2 (p-1), and 2 (m-1)/m n bytes leave a group instead of 2 (p-1)/p n.

Where groups are racks whose links to the others are oversubscribed o times, the three parts together take
2 (g-1)/g n β + 2 (m-1)/m n β o/g, a ring of all workers 2 (p-1)/p n β o/g. So for long vectors groups are faster if
o > p, for shorter ones at smaller o already, because there are fewer rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from orchestra.collectives.ring import all_gather, reduce_scatter, ring_among
from orchestra.core.comm import Comm
from orchestra.core.vectors import split


def hierarchical(comm: Comm, x: Tensor, weight: float, *, group: int | None = None) -> float:
    """x ← Σ xᵢ; returns Σ wᵢ. `group`: g; by default that of `group_size`."""
    members = comm.workers.members
    g = group_size(len(members)) if group is None else group
    groups = [members[first : first + g] for first in range(0, len(members), g)]
    within = groups[members.index(comm.rank) // g]
    chunks, shares = split(x.numel(), g), split(g, len(within))
    pieces = [x[chunks[share.start].start : chunks[share.stop - 1].stop] for share in shares]
    weights = [weight] * len(within)
    mine = reduce_scatter(comm, pieces, weights, within)
    holders = [holders_of(each, g) for each in groups]
    # In the order of chunks on every worker, so that workers in different rings do not wait for each other.
    for j in range(shares[mine].start, shares[mine].stop):
        total = ring_among(comm, x[chunks[j]], weights[mine], [each[j] for each in holders])
    weights[mine] = total
    all_gather(comm, pieces, weights, within)
    return total


def holders_of(group: Sequence[int], g: int) -> list[int]:
    """Return which worker of a group holds each of the g chunks after the reduce-scatter.

    >>> holders_of([4, 5, 6], 3), holders_of([7, 8], 3)
    ([6, 4, 5], [8, 8, 7])
    """
    shares = split(g, len(group))
    return [group[i - 1] for i, share in enumerate(shares) for _ in range(share.start, share.stop)]


def group_size(p: int) -> int:
    """Return the largest divisor of p up to its root, for few rounds within and across groups.

    >>> [group_size(p) for p in (2, 4, 6, 7, 8, 16)]
    [1, 2, 2, 1, 2, 4]
    """
    return max(g for g in range(1, p + 1) if p % g == 0 and g * g <= p)
