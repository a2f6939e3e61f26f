# SPDX-License-Identifier: Apache-2.0
"""Earlier calls of `prepare` in this process, and earlier process groups, which conflict with servers.

A server's process serves inside `prepare`, and its script ends there. So it reaches neither a second `prepare` nor a
collective of torch.distributed: processes that wait for it would wait forever.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed

from orchestra.core.strategy import Strategy
from orchestra.errors import Problem
from orchestra.formatting import plural


@dataclass
class EarlierCalls:
    """The strategies that this process has prepared as a worker."""

    running: list[Strategy[Any]] = field(default_factory=list)
    finished: list[Strategy[Any]] = field(default_factory=list)
    servers_return: bool = False  # servers reach a second call, as in tests; those of a script do not

    def begin(self, strategy: Strategy[Any]) -> None:
        """Note that a run with other processes begins."""
        self.running.append(strategy)

    def finish(self, strategy: Strategy[Any]) -> None:
        """Note that a run has ended."""
        if strategy in self.running:
            self.running.remove(strategy)
            self.finished.append(strategy)

    def problems(self, strategy: Strategy[Any]) -> Iterator[Problem]:
        """Yield the reasons why another run cannot begin."""
        name = type(strategy).__name__
        ended = [] if self.servers_return else self.finished
        served = next((each for each in [*self.running, *ended] if each.layout.servers), None)
        if served is not None:
            first, count = type(served).__name__, plural(served.layout.servers, "process")
            message = (
                f"orchestra.prepare was called before with {first}, whose servers ({count}) end their script in that "
                "call and reach no other. Put both models into one nn.Module with one optimizer, run the second "
                "training as a script of its own, or use strategies without servers"
            )
            yield Problem("strategy", name, message)
        elif strategy.layout.servers and self.running:
            count = plural(strategy.layout.servers, "process")
            message = (
                f"needs servers ({count}), but all processes are workers of an earlier orchestra.prepare that is not "
                "finished. Call optimizer.finish() of that run before, or use a strategy without servers"
            )
            yield Problem("strategy", name, message)


EARLIER = EarlierCalls()


def problems_of_group(strategy: Strategy[Any]) -> Iterator[Problem]:
    """Yield a problem if a process group of torch.distributed is open and the strategy has servers."""
    if strategy.layout.servers and torch.distributed.is_available() and torch.distributed.is_initialized():
        size = torch.distributed.get_world_size()
        message = (
            f"was opened before orchestra.prepare, by init_process_group, Accelerator() or the like. "
            f"{type(strategy).__name__} makes {plural(strategy.layout.servers, 'process')} of it a server, which takes "
            "part in no collective of the group, so that the others would wait for it forever. Call orchestra.prepare "
            "first and then remove RANK, LOCAL_RANK, WORLD_SIZE and MASTER_ADDR from os.environ, so that a library "
            "opens no group; or use a strategy without servers"
        )
        yield Problem("process group", f"{size} processes", message)
