# SPDX-License-Identifier: Apache-2.0
"""Which worker a process is, before `prepare`: so that a loop can cut its data first.

    samples = samples[orchestra.rank() :: orchestra.world_size()]

Ranks are those that the launcher gave. Servers come last, so the workers are 0 to world_size() − 1.
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
    """Give the rank of this process as it was started: 0 to `world_size()` − 1 in workers, above that in servers.

    Asking keeps the processes of the run in this order, where `train` would choose one by the network's speed.
    """
    environment.keep_order()
    return _place()[0]


def world_size(strategy: Strategy[Any] | str | None = None) -> int:
    """Give the number of workers: of all processes that were started but the servers.

    Args:
        strategy: the one that is given to `prepare`, where it has servers. What `orchestra run --strategy` says takes
            its place. `prepare` refuses to go on if it finds another number of workers than was told here.

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
    environment.tell_workers(workers)
    return workers


def _place() -> tuple[int, int]:
    """This process's rank, and how many there are."""
    if problems := environment.half_set():
        raise ConfigError(problems)
    if not environment.launched():
        return 0, 1
    place = ProcessRank.of(os.environ)
    return place.rank, place.size


def other_answer(strategy: Strategy[Any], workers: int) -> Problem | None:
    """What is wrong if the loop cut its data for another number of workers."""
    told = environment.told_workers()
    if not told or workers in told:
        return None
    name, servers = type(strategy).__name__, strategy.layout.servers
    message = (
        f"was told to this process, which may have cut its data by it, but {name} has "
        f"{plural(workers, 'worker')} beside {plural(servers, 'server')}: ask with the strategy, "
        f'orchestra.world_size("{expression.show(strategy)}")'
    )
    return Problem("orchestra.world_size()", max(told), message)
