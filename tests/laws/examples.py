# SPDX-License-Identifier: Apache-2.0
"""Instances of every strategy in the catalogue; one that is new there is tested by itself."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args, get_origin, get_type_hints

from orchestra import ASP, AllReduce, LocalSGD, ParameterServer, SlowMo, Strategy
from orchestra.strategies import PARTS, STRATEGIES

WORKERS = 3

MORE: tuple[Strategy[Any], ...] = (
    ParameterServer(servers=3),
    ParameterServer(consistency=ASP(), servers=2),
    SlowMo(tau=2, base=AllReduce()),
    SlowMo(tau=4, base=LocalSGD(tau=2)),
)


def variants(cls: type[Any]) -> list[Any]:
    """The defaults, the same with short rounds, and one instance for every other value that a field may take."""
    hints = get_type_hints(cls)
    fields = dataclasses.fields(cls)
    # A round of twelve steps would be longer than the runs here.
    short = {f.name: 2 for f in fields if hints[f.name] is int and isinstance(f.default, int) and f.default > 3}
    found = [cls(), cls(**short)]
    for f in fields:
        kind = get_origin(hints[f.name]) or hints[f.name]
        if kind is Literal:
            found += [cls(**short, **{f.name: value}) for value in get_args(hints[f.name])]
        elif kind is int and f.default == 1:
            found.append(cls(**short, **{f.name: 2}))
        elif isinstance(kind, type):
            found += [cls(**short, **{f.name: part()}) for part in PARTS if issubclass(part, kind)]
    return found


def all_examples() -> list[Strategy[Any]]:
    every = [s for cls in STRATEGIES for s in variants(cls)]
    return list(dict.fromkeys([*every, *MORE]))


EXAMPLES = all_examples()
SYNCHRONOUS = [s for s in EXAMPLES if s.synchronous]


def workers_for(strategy: Strategy[Any], wanted: int = WORKERS) -> int:
    """As many as wanted, unless the strategy takes only one."""
    return 1 if [*strategy.demands(wanted)] else wanted


def alone(strategy: Strategy[Any]) -> Strategy[Any]:
    """The case of a strategy in which a world of one is plain training."""
    if isinstance(strategy, SlowMo):
        return dataclasses.replace(strategy, alpha=1.0, beta=0.0, buffers="maintain")
    return strategy
