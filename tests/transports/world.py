# SPDX-License-Identifier: Apache-2.0
"""A world of nodes in one process, for tests of the shared memory: every node is a thread."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from orchestra.core.comm import Comm
from orchestra.core.ops import Group
from orchestra.core.view import View
from orchestra.engine.middleware import Metered
from orchestra.worlds.shared_memory import layout
from orchestra.worlds.shared_memory.layout import Arena, ArenaLayout
from orchestra.worlds.shared_memory.transport import SharedMemoryTransport

T = TypeVar("T")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


class World:
    """A mapping, and a node of it for every rank."""

    def __init__(
        self,
        workers: int,
        *,
        servers: int = 0,
        numel: int = 64,
        dtype: torch.dtype = torch.float32,
        shared_x: bool = False,
        patience: float = 10,
    ) -> None:
        self.plan = ArenaLayout(workers=workers, servers=servers, numel=numel, dtype=dtype, shared_x=shared_x)
        fd = layout.create(self.plan)
        self.arenas = [Arena(fd, self.plan) for _ in range(self.plan.nodes)]
        os.close(fd)
        self.transports = [SharedMemoryTransport(a, r, patience=patience) for r, a in enumerate(self.arenas)]
        groups = Group(tuple(range(workers))), Group(tuple(range(workers, workers + servers)))
        self.comms = [Comm(Metered(t), View(0, *groups)) for t in self.transports]

    def run(self, life: Callable[[int, Comm], T]) -> list[T]:
        """Every node lives at once; gives what each one's life gave."""
        with ThreadPoolExecutor(self.plan.nodes) as pool:
            return list(pool.map(life, range(self.plan.nodes), self.comms))

    def x(self, rank: int) -> Tensor:
        return self.arenas[rank].vector("x", rank)


def vectors(count: int, numel: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(count)]
