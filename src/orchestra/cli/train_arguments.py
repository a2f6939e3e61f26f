# SPDX-License-Identifier: Apache-2.0
"""What options change in a call of `train`: one function for each of its arguments."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

from orchestra.cli.cluster_options import read_cluster
from orchestra.engine.overrides import Change
from orchestra.errors import ConfigError, Problem, nearest

if TYPE_CHECKING:
    from orchestra.cli.options import Options
    from orchestra.data.partitions import Partition
    from orchestra.runs.budget import Target


def read(o: Options, *, of_script: bool) -> tuple[dict[str, Change], list[Problem]]:
    """Return what options change, and what is wrong with those that cannot be read."""
    problems: list[Problem] = []
    found: dict[str, Change] = {}
    for part in (_plain, _strategy, read_cluster, _budget, _optimizer, _schedule, _partition):
        try:
            found |= _later(o) if of_script and part is _strategy else part(o)
        except ConfigError as error:
            problems.extend(error.problems)
    return found, problems


def read_target(text: str) -> Target:
    """Read `accuracy=0.95` as a `Target`."""
    from orchestra.runs.budget import Target

    name, equals, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not name.strip() or not equals or not math.isfinite(number):
        raise ConfigError([Problem("target", text, "must be a score and a number, e.g. accuracy=0.95")])
    return Target(name.strip(), number)


def read_partition(text: str) -> Partition:
    """Read `iid`, `label-sorted` or `dirichlet:ALPHA` as a partition."""
    from orchestra.data.partitions import IID, Dirichlet, LabelSorted

    name, colon, value = text.partition(":")
    match name:
        case "iid" if not colon:
            return IID()
        case "label-sorted" if not colon:
            return LabelSorted()
        case "dirichlet":
            try:
                return Dirichlet(alpha=float(value)) if colon else Dirichlet()
            except ValueError:
                raise ConfigError([Problem("partition", text, "needs a number, e.g. dirichlet:0.5")]) from None
    known = ("iid", "label-sorted", "dirichlet")
    message = f"takes no number: {name}" if name in known else f"is not a partition; {nearest(name, known)}"
    raise ConfigError([Problem("partition", text, message)])


def _set(value: Any) -> Change:
    return lambda old: value


def _plain(o: Options) -> dict[str, Change]:
    """Return the arguments that take the option's value as it is."""
    from orchestra.runs.budget import Epochs, Steps

    every = None if o.checkpoint_every is None else Steps(o.checkpoint_every)
    scored = None if o.evaluate_every is None else Epochs(o.evaluate_every)
    if o.checkpoint_every is not None and o.checkpoint_every < 1:
        raise ConfigError([Problem("checkpoint-every", o.checkpoint_every, "must be at least 1 step")])
    values = {
        "seed": o.seed, "batch": o.batch, "clip": o.clip, "precision": o.precision, "out": o.out,
        "checkpoint_every": every, "evaluate_every": scored, "trace": o.trace,
        "score_afterwards": o.score_afterwards,
    }  # fmt: skip
    return {name: _set(value) for name, value in values.items() if value is not None}


def _strategy(o: Options) -> dict[str, Change]:
    from orchestra.engine import expression

    if o.strategy is None and o.servers is None:
        return {}
    chosen = None if o.strategy is None else expression.parse(o.strategy)

    def change(old: Any) -> Any:
        strategy = chosen or (expression.parse(old) if isinstance(old, str) else old)
        return strategy if o.servers is None else _with_servers(strategy, o.servers)

    if chosen is not None:
        change(None)  # report a strategy without servers now, with the other problems
    return {"strategy": change}


def _later(o: Options) -> dict[str, Change]:
    """Return the strategy as a change that reads it when the script calls `train`."""
    if o.strategy is None and o.servers is None:
        return {}
    return {"strategy": lambda old: _strategy(o)["strategy"](old)}


def _with_servers(strategy: Any, servers: int) -> Any:
    from orchestra.engine import expression

    if "servers" not in {field.name for field in dataclasses.fields(strategy)}:
        name = expression.show(strategy)
        raise ConfigError([Problem("servers", servers, f"{name} has no servers: leave it out, or use ps")])
    return dataclasses.replace(strategy, servers=servers)


def _budget(o: Options) -> dict[str, Change]:
    """Replace the old ends by the given ones, and the old target by the given one."""
    from orchestra.runs import budget as budgets

    kinds: tuple[tuple[Any, Any], ...] = (
        (budgets.Epochs, o.epochs),
        (budgets.Steps, o.steps),
        (budgets.Seconds, o.seconds),
    )
    ends: list[Any] = [kind(count) for kind, count in kinds if count is not None]
    targets: list[Any] = [] if o.target is None else [read_target(o.target)]
    if not ends and not targets:
        return {}

    def change(old: Any) -> Any:
        before = budgets.parts(old)
        old_targets = [part for part in before if isinstance(part, budgets.Target)]
        old_ends = [part for part in before if not isinstance(part, budgets.Target)]
        return functools.reduce(lambda a, b: a | b, [*(ends or old_ends), *(targets or old_targets)])

    return {"budget": change}


def _optimizer(o: Options) -> dict[str, Change]:
    if o.optimizer is None and o.lr is None and o.lr_factor is None and o.momentum is None:
        return {}
    from orchestra.engine import expression
    from orchestra.model.adjusted_optimizer import Adjusted, at_rate

    if o.lr is not None and not 0 <= o.lr < math.inf:
        raise ConfigError([Problem("lr", o.lr, "must be a finite number of at least 0")])
    if o.lr_factor is not None and not 0 < o.lr_factor < math.inf:
        raise ConfigError([Problem("lr-factor", o.lr_factor, "must be a finite number above 0")])
    if o.momentum is not None and not 0 <= o.momentum < 1:
        raise ConfigError([Problem("momentum", o.momentum, "must be at least 0 and below 1")])
    chosen = None if o.optimizer is None else expression.parse_optimizer(o.optimizer)

    def change(old: Any) -> Any:
        made = chosen or old
        made = made if o.lr is None else at_rate(made, o.lr)
        return made if o.lr_factor is None and o.momentum is None else Adjusted(made, o.lr_factor or 1.0, o.momentum)

    return {"optimizer": change}


def _schedule(o: Options) -> dict[str, Change]:
    if o.schedule is None:
        return {}
    from orchestra.engine import expression

    return {"schedule": _set(expression.parse_schedule(o.schedule))}


def _partition(o: Options) -> dict[str, Change]:
    return {} if o.partition is None else {"partition": _set(read_partition(o.partition))}
