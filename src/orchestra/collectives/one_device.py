# SPDX-License-Identifier: Apache-2.0
"""Reduction to one device: all workers send to worker 0, which adds in rank order and sends the sum to all.

TensorFlow calls it ReductionToOneDevice; it is also a synchronous server that computes gradients as well.

    worker i > 0:   send x to worker 0;  x ← the answer
    worker 0:       x += the vectors of workers 1, 2, ... p-1;   send x to each of them

Messages: p-1 of worker 0, one of each other. (p-1) n bytes through one link, in both directions: the time grows with
the number of workers.
"""

from __future__ import annotations

from torch import Tensor

from orchestra.core.comm import Comm


def one_device(comm: Comm, x: Tensor, weight: float) -> float:
    """x ← Σ xᵢ; returns Σ wᵢ."""
    first, *others = comm.workers.members
    if comm.rank != first:
        comm.send(first, x, weight=weight)
        result = comm.recv(first)
        x.copy_(result.x)
        return result.weight
    for other in others:
        came = comm.recv(other)
        comm.add_(x, came.x)
        weight += came.weight
    for other in others:
        comm.send(other, x, weight=weight)
    return weight
