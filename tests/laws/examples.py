# SPDX-License-Identifier: Apache-2.0
"""Instances of every strategy in the catalogue; one that is new there is tested by itself."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from tests.zoo import BATCH, SEED, make_data

from orchestra import (
    ASP,
    EASGD,
    SSP,
    AllReduce,
    AtShare,
    BackupWorkers,
    BoundedDelay,
    DelayCompensated,
    Downpour,
    Everything,
    Hogwild,
    KAsync,
    KBatchSync,
    KSync,
    LocalSGD,
    ParameterServer,
    Plateau,
    RandomSkip,
    Significant,
    SlowMo,
    SoftSync,
    Solo,
    Strategy,
    StrategySwitch,
    SyncEASGD,
)
from orchestra.collectives.double_tree import trees
from orchestra.core.vectors import ranges, share_of_mean, split
from orchestra.data.feed import IndexedFeed
from orchestra.engine.expression import show
from orchestra.strategies import PARTS, STRATEGIES

WORKERS = 3

MORE: tuple[Strategy[Any], ...] = (
    AllReduce(algorithm="hierarchical", group=2),
    ParameterServer(servers=3),
    ParameterServer(servers=3, placement="layers"),
    ParameterServer(servers=WORKERS, colocated=True),
    ParameterServer(consistency=ASP(), servers=WORKERS + 1, colocated=True),
    ParameterServer(consistency=ASP(), servers=2),
    ParameterServer(consistency=SSP(staleness=0), servers=2),
    ParameterServer(consistency=BackupWorkers(b=1), pieces=2),
    ParameterServer(consistency=KSync(k=2)),
    ParameterServer(consistency=KSync(k=WORKERS)),
    ParameterServer(consistency=KAsync(k=2), pieces=3),
    ParameterServer(filter=Significant(threshold=0.01), cache_keys=True),
    ParameterServer(consistency=ASP(), correction=DelayCompensated(lam=2.0, adaptive=True)),
    SlowMo(tau=2, base=AllReduce()),
    SlowMo(tau=4, base=LocalSGD(tau=2)),
    Downpour(n_push=3, n_fetch=2),
    Downpour(n_push=2, n_fetch=4, servers=2),
    SyncEASGD(tau=1, alpha=0.4),
    StrategySwitch(when=AtShare(share=0.5), then=ParameterServer(servers=2)),
    StrategySwitch(when=AtShare(share=0.4), then=ParameterServer(consistency=ASP(), servers=2)),
    StrategySwitch(when=AtShare(share=0.4), first=ParameterServer(), then=LocalSGD(tau=2)),
    StrategySwitch(when=AtShare(share=0.4), then=ParameterServer(), promote=True),
    StrategySwitch(when=AtShare(share=0.4), then=ParameterServer(consistency=ASP(), servers=2), promote=True),
    StrategySwitch(when=AtShare(share=0.4), first=ParameterServer(consistency=ASP()), then=AllReduce()),
    StrategySwitch(when=AtShare(share=0.4), first=LocalSGD(tau=2), then=AllReduce(algorithm="ring")),
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
    return [strategy for strategy in found if not [*strategy.demands(WORKERS)] or cls is Solo]


def all_examples() -> list[Strategy[Any]]:
    every = [s for cls in STRATEGIES for s in variants(cls)]
    return list(dict.fromkeys([*every, *MORE]))


EXAMPLES = all_examples()
SYNCHRONOUS = [s for s in EXAMPLES if s.synchronous]


def cancels(strategy: Strategy[Any]) -> bool:
    """Whether some mini-batches of a strategy may never be looked at."""
    match strategy:
        case ParameterServer(consistency=KSync(k=k)):
            return k < WORKERS
        case ParameterServer(consistency=KBatchSync()):
            return True
    return False


CERTAIN = [s for s in EXAMPLES if not cancels(s)]


def counted(strategy: Strategy[Any]) -> bool:
    """Whether it does not depend on timing how much is sent."""
    match strategy:
        case ParameterServer(consistency=SoftSync() | BoundedDelay()):
            return False
    return not cancels(strategy)


COUNTED = [s for s in EXAMPLES if counted(s)]


def seldom(strategy: Strategy[Any]) -> bool:
    """Whether its like is among the examples, so that it need not be tried every time."""
    match strategy:
        case AllReduce(algorithm="native" | "ring", group=None) | AllReduce(group=2):
            return False
        case AllReduce():  # each has tests of its own
            return True
        case StrategySwitch(momenta=momenta):
            return momenta != "keep"
        case SlowMo(buffers=buffers):
            return buffers == "maintain"
        case EASGD(tau=tau, servers=1) | SyncEASGD(tau=tau):
            return tau == 2
        case Downpour(n_push=n_push, n_fetch=n_fetch, servers=1):
            return n_push + n_fetch == 3
    return show(strategy) in (
        "localsgd(tau=2)", "ps(servers=2)", "ps(placement='layers')", "ps(pieces=2)", "ps(filter=significant)",
        "ps(consistency=backupworkers)", "ps(consistency=kasync)", "ps(consistency=kbatchasync)", "slowmo(tau=2)",
        "ps(consistency=ssp(staleness=0), servers=2)", "ps(consistency=asp, servers=2)", "downpour(servers=2)",
        "slowmo(tau=2, base=allreduce)", "switch(when=atshare)", "ps(filter=kkt)",
    )  # fmt: skip


def each_of(examples: Sequence[Strategy[Any]], *, slow: bool = False) -> pytest.MarkDecorator:
    """One test for each; some only in `make nightly`, and of a slow test more of them: none of `MORE`."""
    left_out = {s for s in examples if seldom(s) or (slow and s in MORE)}
    marked = [pytest.param(s, marks=pytest.mark.nightly) if s in left_out else s for s in examples]
    return pytest.mark.parametrize("strategy", marked, ids=[show(s) for s in examples])


def ends_at(strategy: Strategy[Any]) -> str:
    """Where the model is at the end of a run of a few steps."""
    if isinstance(strategy, StrategySwitch) and isinstance(strategy.when, AtShare):
        return strategy.then.model_at
    return strategy.model_at


def sieves(strategy: Strategy[Any]) -> bool:
    """Whether how much is sent depends on the numbers in it."""
    return isinstance(strategy, ParameterServer) and strategy.filter != Everything()


def workers_for(strategy: Strategy[Any], wanted: int = WORKERS) -> int:
    """As many as wanted, unless the strategy takes only others."""
    return next(n for n in (wanted, WORKERS, 1) if not [*strategy.demands(n)])


def alone(strategy: Strategy[Any]) -> Strategy[Any]:
    """The case of a strategy in which a world of one is plain training."""
    match strategy:
        case SlowMo():
            return dataclasses.replace(strategy, alpha=1.0, beta=0.0, buffers="maintain")
        case ParameterServer(consistency=KSync() | KAsync() as consistency):
            return dataclasses.replace(strategy, consistency=dataclasses.replace(consistency, k=1))
        case ParameterServer(filter=RandomSkip()):
            return dataclasses.replace(strategy, filter=RandomSkip(probability=0.0))
        case ParameterServer(filter=Significant()):
            return dataclasses.replace(strategy, filter=Significant())
        case ParameterServer(consistency=BackupWorkers()):
            return dataclasses.replace(strategy, consistency=BackupWorkers(b=0))
        case Downpour():
            return dataclasses.replace(strategy, n_push=1, n_fetch=1)
        case EASGD():  # only at the end does the centre come, all the way
            return dataclasses.replace(strategy, tau=1000, alpha=1.0)
        case SyncEASGD():
            return dataclasses.replace(strategy, alpha=0.0, beta=1.0)
        case StrategySwitch(promote=True):
            return dataclasses.replace(strategy, promote=False)
    return strategy


def steps_of(strategy: Strategy[Any], workers: int, steps: int) -> int:
    """Steps of a worker to the end, if each was to do so many in the beginning: more if others make way for servers."""
    if not isinstance(strategy, StrategySwitch) or not strategy.promote:
        return steps
    assert isinstance(strategy.when, AtShare)
    feed = IndexedFeed(make_data(), batch=BATCH, seed=SEED, rank=0, size=workers)
    per_epoch, done = feed.steps_per_epoch or 0, math.ceil(strategy.when.share * steps)
    for _ in range(done):
        feed.next()
    feed.reshare(workers - strategy.servers)
    while feed.epochs * per_epoch < steps:
        feed.next()
        done += 1
    return done


def numbers_sent(algorithm: str, p: int, n: int, group: int | None = None) -> list[int]:
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
            g = group or max(g for g in range(1, p + 1) if p % g == 0 and g * g <= p)
            chunks = [part.stop - part.start for part in split(n, g)]
            m, found = -(-p // g), []
            for r in range(p):
                k, i, s = r // g, r % g, min(g, p - r // g * g)  # group, place in it, its size
                held = [chunks[part] for part in split(g, s)]
                across = [[part.stop - part.start for part in split(chunk, m)] for chunk in held[(i + 1) % s]]
                within = 2 * n - sum(held[(i + 1) % s]) - sum(held[(i + 2) % s])
                found.append(within + sum(2 * sum(c) - c[(k + 1) % m] - c[(k + 2) % m] for c in across))
            return found
        case "one_device":
            return [(p - 1) * n, *[n] * (p - 1)]
    raise AssertionError(f"give the formula of {algorithm} here, as on its page")


def held_by_servers(strategy: Strategy[Any], layers: list[int]) -> list[int]:
    """Numbers that each server holds."""
    if strategy.placement == "layers":
        every = [list(cuts) for cuts in itertools.combinations(range(1, len(layers)), strategy.servers - 1)]
        held = [[sum(layers[a:b]) for a, b in itertools.pairwise([0, *cuts, len(layers)])] for cuts in every]
        return min(held, key=lambda lengths: (max(lengths), [-length for length in lengths]))  # first ones fullest
    return [part.stop - part.start for part in ranges(sum(layers), strategy.servers)]


def bytes_sent(strategy: Strategy[Any], workers: int, steps: int, layers: list[int]) -> list[list[int]]:
    """Bytes sent by every worker and by every server, from the formulas in the docstrings."""
    numel = sum(layers)
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
        case AllReduce(algorithm=algorithm, group=group):
            return [[steps * 4 * sent for sent in numbers_sent(algorithm, workers, numel, group)], []]
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
            held = held_by_servers(strategy, layers)
            if not strategy.colocated:
                return [[steps * size] * workers, [steps * workers * 4 * length for length in held]]
            last = -len(held) % workers  # the worker with which the first server lives
            near = [4 * sum(held[(i - last) % workers :: workers]) for i in range(workers)]
            return [[steps * (size - own) for own in near], [steps * (workers - 1) * 4 * length for length in held]]
        case SlowMo(tau=tau, base=base, buffers=buffers):
            rounds = -(-steps // tau)
            # A base that has something to finish does so, and then comes the slow step.
            within = bytes_sent(base, workers, steps, layers)[0]
            means, counts = (2, 4 * (workers - 1)) if buffers == "average" else (1, 0)
            return [[w + rounds * (means * m + counts) for w, m in zip(within, mean, strict=True)], []]
        case StrategySwitch(first=first, when=Plateau()):  # not in so few steps
            return [bytes_sent(first, workers, steps, layers)[0], [0] * strategy.servers]
        case StrategySwitch(when=AtShare(share=share)):
            return bytes_of_a_switch(strategy, math.ceil(share * steps), workers, steps, layers)
    raise AssertionError(f"give the formula for the bytes of {type(strategy).__name__} here, as in its docstring")


def bytes_of_a_switch(strategy: StrategySwitch, k: int, workers: int, steps: int, layers: list[int]) -> list[list[int]]:
    """Both strategies, and what they hand over: x, one momentum and what it is called."""
    first, then, outline = strategy.first, strategy.then, len('{"momentum_buffer": "vector"}')
    left = workers - strategy.servers if strategy.promote else workers
    rest = steps_of(strategy, workers, steps) - k
    before, after = bytes_sent(first, workers, k, layers), bytes_sent(then, left, rest, layers)
    after[0] += [0] * (workers - left)
    numel = sum(layers)
    sent = [a + b for a, b in zip(before[0], after[0], strict=True)]
    served = [sum(both) for both in zip_longest(before[1], after[1], fillvalue=0)]
    parts = [4 * (part.stop - part.start) for part in ranges(numel, strategy.servers)] if strategy.servers else []
    for worker in range(workers):
        sent[worker] += share_of_mean(torch.empty(1, dtype=torch.float64), workers, worker)  # how many samples
        if first.model_at == "apart":
            sent[worker] += share_of_mean(torch.empty(numel), workers, worker)
    for server, part in enumerate(parts):
        if first.servers:
            served[server] += workers * (part if then.servers else 2 * part + outline)
        elif not strategy.promote:  # else it stays on the machine
            sent[(server - strategy.servers) % workers] += 2 * part + outline
    return [sent, served]
