# SPDX-License-Identifier: Apache-2.0
"""Instances of every strategy in the catalogue; one that is new there is tested by itself."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args, get_origin, get_type_hints

from orchestra import ASP, AllReduce, LocalSGD, ParameterServer, SlowMo, Solo, Strategy
from orchestra.strategies import PARTS, STRATEGIES
from orchestra.vectors import ranges

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


def bytes_sent(strategy: Strategy[Any], workers: int, steps: int, numel: int) -> list[list[int]]:
    """Bytes sent by every worker and by every server, from the formulas in the docstrings."""
    size = 4 * numel
    own = [4 * (part.stop - part.start) for part in ranges(numel, workers)]
    mean = [size - mine + (workers - 1) * mine for mine in own]  # reduce-scatter, all-gather
    assert sum(mean) == 2 * (workers - 1) * size
    match strategy:
        case Solo():
            return [[0] * workers, []]
        case AllReduce():
            return [[steps * m for m in mean], []]
        case LocalSGD(tau=tau):
            return [[-(-steps // tau) * m for m in mean], []]
        case ParameterServer(servers=servers):
            per_server = [4 * (part.stop - part.start) for part in ranges(numel, servers)]
            return [[steps * size] * workers, [steps * workers * part for part in per_server]]
        case SlowMo(tau=tau, base=base, buffers=buffers):
            rounds = -(-steps // tau)
            # A base that has something to finish does so, and then comes the slow step.
            within = bytes_sent(base, workers, steps, numel)[0]
            means, counts = (2, 4 * (workers - 1)) if buffers == "average" else (1, 0)
            return [[w + rounds * (means * m + counts) for w, m in zip(within, mean, strict=True)], []]
    raise AssertionError(f"give the formula for the bytes of {type(strategy).__name__} here, as in its docstring")
