# SPDX-License-Identifier: Apache-2.0
"""The rank of a process before `prepare`, so that a loop can divide its data first.

    samples = samples[orchestra.rank() :: orchestra.world_size()]

Ranks are those of the launcher. Servers have the last ranks, so the workers are 0 to world_size() − 1.
"""

from __future__ import annotations

import os
from typing import Any

from orchestra.clusters.attached import ProcessRank
from orchestra.core.strategy import Strategy
from orchestra.engine import environment, expression, overrides
from orchestra.errors import ConfigError, Problem
from orchestra.formatting import plural


def rank() -> int:
    """Return the rank with which this process was started: 0 to `world_size()` − 1 in workers, above that in servers.

    This call fixes the order of the processes, which `train` would otherwise choose by the network's speed.
    """
    environment.keep_order()
    return _place()[0]


def world_size(strategy: Strategy[Any] | str | None = None) -> int:
    """Return the number of workers: of all processes that were started, without the servers.

    Args:
        strategy: the one that is given to `prepare`, if it has servers; `orchestra run --strategy` replaces it.
            `prepare` raises if it finds another number of workers than this call returned.

    """
    environment.keep_order()
    size = _place()[1]
    if (change := overrides.current().get("strategy")) is not None:
        strategy = change(strategy)
    if strategy is None:
        said = os.environ.get(environment.WORKERS, "")
        workers = int(said) if environment.launched() and said.isdecimal() else size
    else:
        servers = (expression.parse(strategy) if isinstance(strategy, str) else strategy).layout.servers
        workers = size - servers
        if workers < 1:
            message = f"the strategy has {plural(servers, 'server')}: start more than {plural(servers, 'process')}"
            raise ConfigError([Problem("WORLD_SIZE", size, message)])
    environment.record_worker_count(workers)
    return workers


def _place() -> tuple[int, int]:
    """Return this process's rank, and the number of processes."""
    if problems := environment.half_set():
        raise ConfigError(problems)
    if not environment.launched():
        return 0, 1
    place = ProcessRank.of(os.environ)
    return place.rank, place.size


def other_answer(strategy: Strategy[Any], workers: int) -> Problem | None:
    """Return a problem if the loop divided its data for another number of workers."""
    found = environment.recorded_worker_counts()
    if not found or workers in found:
        return None
    name, servers = type(strategy).__name__, strategy.layout.servers
    message = (
        f"was returned to this process, which may have divided its data by it, but {name} has "
        f"{plural(workers, 'worker')} beside {plural(servers, 'server')}: ask with the strategy, "
        f'orchestra.world_size("{expression.show(strategy)}")'
    )
    return Problem("orchestra.world_size()", max(found), message)
