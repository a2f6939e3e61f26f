# SPDX-License-Identifier: Apache-2.0
"""Instances of every strategy in the catalogue; one that is new there is tested by itself."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args, get_origin, get_type_hints

from orchestra import (
    ASP,
    EASGD,
    AllReduce,
    Downpour,
    Hogwild,
    LocalSGD,
    ParameterServer,
    SlowMo,
    Solo,
    Strategy,
    SyncEASGD,
)
from orchestra.collectives.double_tree import trees
from orchestra.strategies import PARTS, STRATEGIES
from orchestra.vectors import ranges, split

WORKERS = 3

MORE: tuple[Strategy[Any], ...] = (
    ParameterServer(servers=3),
    ParameterServer(consistency=ASP(), servers=2),
    SlowMo(tau=2, base=AllReduce()),
    SlowMo(tau=4, base=LocalSGD(tau=2)),
    Downpour(n_push=3, n_fetch=2),
    Downpour(n_push=2, n_fetch=4, servers=2),
    SyncEASGD(tau=1, alpha=0.4),
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
    if isinstance(strategy, Downpour):
        return dataclasses.replace(strategy, n_push=1, n_fetch=1)
    if isinstance(strategy, EASGD):
        return dataclasses.replace(strategy, tau=1000, alpha=1.0)  # only at the end does the centre come, all the way
    if isinstance(strategy, SyncEASGD):
        return dataclasses.replace(strategy, alpha=0.0, beta=1.0)
    return strategy


def numbers_sent(algorithm: str, p: int, n: int) -> list[int]:
    """Numbers that every worker sends in an all-reduce of n of them, from the pages in `collectives`."""
    if p == 1:
        return [0]
    sizes = [part.stop - part.start for part in split(n, p)]
    q = 1 << (p.bit_length() - 1)
    e, stages = p - q, q.bit_length() - 1
    folds = [(n, 0) if r % 2 == 0 else (n, 1) for r in range(2 * e)] + [(0, 1)] * (p - 2 * e)  # more, takes part
    members = [*range(1, 2 * e, 2), *range(2 * e, p)]
    powers = [2**k for k in range(stages + 1)]
    match algorithm:
        case "ring":
            return [2 * n - sizes[(r + 1) % p] - sizes[(r + 2) % p] for r in range(p)]
        case "halving_doubling":
            cuts = [part.start for part in split(n, q)] + [n]
            doubling = [sum(cuts[i // d * d + d] - cuts[i // d * d] for d in powers[:stages]) for i in range(q)]
            windows = [n - cuts[i + 1] + cuts[i] + doubling[i] for i in range(q)]
            return [more + (windows[members.index(r)] if active else 0) for r, (more, active) in enumerate(folds)]
        case "butterfly":
            return [more + active * stages * n for more, active in folds]
        case "tree":
            below = [sum(r % (2 * d) == 0 and r + d < p for d in powers) for r in range(p)]
            return [n * (below[r] + (r > 0)) for r in range(p)]
        case "double_tree":
            halves = [part.stop - part.start for part in split(n, 2)]
            placed = [[tree[r] for tree in trees(p)] for r in range(p)]
            return [
                sum(h * (len(at.below) + (at.above is not None)) for h, at in zip(halves, both, strict=True))
                for both in placed
            ]
        case "hierarchical":
            g = max(g for g in range(1, p + 1) if p % g == 0 and g * g <= p)
            within = [part.stop - part.start for part in split(n, g)]
            found = []
            for r in range(p):
                i, k, m = r % g, r // g, p // g
                mine = within[(i + 1) % g]
                across = [part.stop - part.start for part in split(mine, m)]
                inner = 2 * n - mine - within[(i + 2) % g] if g > 1 else 0
                found.append(inner + 2 * mine - across[(k + 1) % m] - across[(k + 2) % m])
            return found
        case "one_device":
            return [(p - 1) * n, *[n] * (p - 1)]
    raise AssertionError(f"give the formula of {algorithm} here, as on its page")


def bytes_sent(strategy: Strategy[Any], workers: int, steps: int, numel: int) -> list[list[int]]:
    """Bytes sent by every worker and by every server, from the formulas in the docstrings."""
    size = 4 * numel
    own = [4 * (part.stop - part.start) for part in ranges(numel, workers)]
    mean = [size - mine + (workers - 1) * mine for mine in own]  # reduce-scatter, all-gather
    assert sum(mean) == 2 * (workers - 1) * size
    per_server = [4 * (part.stop - part.start) for part in ranges(numel, strategy.servers)] if strategy.servers else []
    match strategy:
        case Solo() | Hogwild():
            return [[0] * workers, []]
        case AllReduce(algorithm="native"):
            return [[steps * m for m in mean], []]
        case AllReduce(algorithm=algorithm):
            return [[steps * 4 * sent for sent in numbers_sent(algorithm, workers, numel)], []]
        case LocalSGD(tau=tau):
            return [[-(-steps // tau) * m for m in mean], []]
        case Downpour(n_push=n_push, n_fetch=n_fetch):
            pushes = -(-steps // n_push)
            # The last push may come as if its interval were over, and be answered as at its end.
            fetches = steps // n_fetch + (pushes * n_push > steps and pushes * n_push % n_fetch == 0)
            return [[pushes * size] * workers, [fetches * workers * part for part in per_server]]
        case EASGD(tau=tau):
            exchanges = -(-steps // tau) + 1
            return [[exchanges * size] * workers, [exchanges * workers * part for part in per_server]]
        case SyncEASGD(tau=tau):
            return [[(-(-steps // tau) + 1) * m for m in mean], []]
        case ParameterServer():
            return [[steps * size] * workers, [steps * workers * part for part in per_server]]
        case SlowMo(tau=tau, base=base, buffers=buffers):
            rounds = -(-steps // tau)
            # A base that has something to finish does so, and then comes the slow step.
            within = bytes_sent(base, workers, steps, numel)[0]
            means, counts = (2, 4 * (workers - 1)) if buffers == "average" else (1, 0)
            return [[w + rounds * (means * m + counts) for w, m in zip(within, mean, strict=True)], []]
    raise AssertionError(f"give the formula for the bytes of {type(strategy).__name__} here, as in its docstring")
