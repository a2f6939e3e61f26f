# SPDX-License-Identifier: Apache-2.0
"""Folding, for algorithms that need a power of two: each worker beyond it first adds its vector to another's.

    p = q + e, q the largest power of two
    of the first 2e workers, the even ones send their vectors to the next odd ones, and wait for the result
    the q that are left compute the sum among themselves

This takes two more rounds, and one more message of n bytes from each of the 2e; those that fold send nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from orchestra.core.comm import Comm


def folded(comm: Comm, x: Tensor, weight: float, among: Callable[[list[int], float], float]) -> float:
    """Fold, let `among` compute the sum over the q members that are left and return its weight, unfold."""
    p, rank = len(comm.workers), comm.rank
    e = p - (1 << (p.bit_length() - 1))
    if rank < 2 * e and rank % 2 == 0:
        comm.send(rank + 1, x, weight=weight)
        result = comm.recv(rank + 1)
        x.copy_(result.x)
        return result.weight
    if rank < 2 * e:
        came = comm.recv(rank - 1)
        comm.add_(x, came.x)
        weight += came.weight
    total = among([*range(1, 2 * e, 2), *range(2 * e, p)], weight)
    if rank < 2 * e:
        comm.send(rank - 1, x, weight=total)
    return total
