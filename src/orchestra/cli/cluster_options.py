# SPDX-License-Identifier: Apache-2.0
"""The cluster of a run, from the options and the environment: local processes, a simulation, or several machines."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from typing import TYPE_CHECKING, Any

from orchestra.engine.environment import launched
from orchestra.engine.overrides import Change
from orchestra.errors import ConfigError, Problem
from orchestra.formatting import plural

if TYPE_CHECKING:
    from orchestra.cli.options import Options


def read_cluster(o: Options) -> dict[str, Change]:
    """Return what the options change in the cluster."""
    if o.network is not None and not o.sim:
        raise ConfigError([Problem("network", o.network, "needs --sim: the network of this machine cannot be changed")])
    given: dict[str, Any] = {"workers": o.workers, "device": o.device, "compute_time": o.compute_time}
    if o.sim:
        given |= {"network": o.network, "numerics": o.numerics}
    given = {name: value for name, value in given.items() if value is not None}
    if o.straggler is not None:
        read_straggler(o.straggler)
    if o.workers is None and o.strategy is not None and is_solo(o.strategy):
        given["workers"] = 1
    joins = not o.sim and launched()
    if joins:
        given = _as_one_of_many(o, given)
    else:
        of_many = {"token-file": o.token_file, "trusted-network": o.trusted, "order": o.order, "grace": o.grace}
        message = "is for processes that torchrun or `orchestra launch` started, which this one is not"
        if wrong := [Problem(name, value, message) for name, value in of_many.items() if value is not None]:
            raise ConfigError(wrong)
    if not given and not o.sim and not joins and o.straggler is None:
        return {}

    def change(old: Any) -> Any:
        cluster = _changed(old, given, sim=bool(o.sim), joins=joins)
        return cluster if o.straggler is None else _with_straggler(cluster, o.straggler)

    return {"cluster": change}


def _changed(old: Any, given: dict[str, Any], *, sim: bool, joins: bool) -> Any:
    """Return the old cluster with the given values, or a new one if the old one is of another kind."""
    from orchestra.clusters.attached import Attached
    from orchestra.clusters.local import Local

    if joins:
        return dataclasses.replace(old if isinstance(old, Attached) else Attached(), **given)
    if not sim:
        return dataclasses.replace(old or Local(), **given)
    from orchestra.clusters.simulated import Simulated

    if isinstance(old, Simulated):
        return dataclasses.replace(old, **given)
    return Simulated(**({} if old is None else {"workers": old.workers}) | given)


def read_straggler(text: str) -> tuple[int, float]:
    """Return N and F of `NxF`: how many are how many times slower.

    >>> read_straggler("1x5")
    (1, 5.0)
    """
    found = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)", text)
    if found is None or float(found[2]) == 0:
        raise ConfigError([Problem("straggler", text, "write how many are how many times slower, such as 1x5")])
    return int(found[1]), float(found[2])


def _with_straggler(cluster: Any, straggler: str) -> Any:
    """Return the cluster with some workers slower than its own compute times."""
    from orchestra.cli.options import COMPUTE_TIME
    from orchestra.clusters.attached import Attached
    from orchestra.engine.compute_times import Slow

    count, factor = read_straggler(straggler)
    if count > cluster.workers and not isinstance(cluster, Attached):  # its number of workers is not known yet
        message = f"there are {plural(cluster.workers, 'worker')}: at most so many can be slow"
        raise ConfigError([Problem("straggler", straggler, message)])
    base = cluster.compute_time or COMPUTE_TIME
    slow = f"{base} slow:{straggler}" if isinstance(base, str) else Slow(base, count, factor)
    return dataclasses.replace(cluster, compute_time=slow)


def refuse_under_launcher(verb: str) -> None:
    """Raise under a launcher: each of its processes would start all runs of the command."""
    if launched():
        message = (
            f"orchestra {verb} starts its runs itself: start it once, without torchrun or `orchestra launch`. "
            "`orchestra compare --lab 100mbit,1ms` gives every node a host of its own, --sim simulates a whole cluster"
        )
        raise ConfigError([Problem("WORLD_SIZE", int(os.environ["WORLD_SIZE"]), message)])


def _as_one_of_many(o: Options, given: dict[str, Any]) -> dict[str, Any]:
    """Return the values that fit a cluster whose processes a launcher started."""
    if o.workers is not None:
        message = "all processes that were started are workers, except for the servers: leave it out"
        raise ConfigError([Problem("workers", o.workers, message)])
    given.pop("workers", None)
    order: str | tuple[int, ...] | None = o.order
    if o.order is not None and o.order.replace(",", "").isdecimal():
        order = tuple(int(process) for process in o.order.split(",") if process)
    if o.grace is not None and not 0 <= o.grace < math.inf:
        raise ConfigError([Problem("grace", o.grace, "must be a number of seconds; 0: do not reconnect")])
    more = {"token_file": o.token_file, "trusted": o.trusted, "order": order, "grace": o.grace}
    return given | {name: value for name, value in more.items() if value is not None}


def is_solo(text: str) -> bool:
    """Return whether a strategy is `Solo`. A misspelt one is not: it is refused elsewhere."""
    from orchestra.engine import expression
    from orchestra.strategies.catalogue import Solo

    try:
        return isinstance(expression.parse(text), Solo)
    except ConfigError:
        return False
