# SPDX-License-Identifier: Apache-2.0
"""Instances of every strategy in the catalogue; one that is new there is tested by itself."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from tests.cases import few
from tests.zoo import BATCH, SEED, make_data

from orchestra import (
    AtShare,
    BackupWorkers,
    BoundedDelay,
    Everything,
    KAsync,
    KBatchSync,
    KSync,
    ParameterServer,
    Plateau,
    RandomSkip,
    Significant,
    SoftSync,
    Solo,
    Strategy,
    StrategySwitch,
)
from orchestra.core.traffic import RunSize
from orchestra.data.feed import IndexedFeed
from orchestra.engine.expression import parse, show
from orchestra.strategies.catalogue import PARTS, ROWS, STRATEGIES, expected_traffic, row_of

WORKERS = 3

MORE: tuple[Strategy[Any], ...] = tuple(parse(text) for row in ROWS for text in row.examples)


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
    return [strategy for strategy in found if not [*strategy.problems(WORKERS)] or cls is Solo]


def all_examples() -> list[Strategy[Any]]:
    every = [s for cls in STRATEGIES for s in variants(cls)]
    return list(dict.fromkeys([*every, *MORE]))


EXAMPLES = all_examples()
SYNCHRONOUS = [s for s in EXAMPLES if s.layout.updates.synchronous]


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


def path(strategy: Strategy[Any]) -> tuple[Any, ...]:
    """What decides which code carries a run out: where the model is, and which nodes go in lockstep, in each phase."""
    return tuple(
        (phase.model_location, bool(strategy.layout.servers), phase.lockstep, phase.colocated, bool(phase.promoted))
        for phase in strategy.layout.phases()
    )


def first_phase(strategy: Strategy[Any]) -> Any:
    """The path up to the first switch."""
    return path(strategy)[0]


def kind(strategy: Strategy[Any]) -> tuple[Any, ...]:
    """The strategy and the path."""
    return type(strategy), *path(strategy)


def state(strategy: Strategy[Any]) -> tuple[Any, ...]:
    """What there is to be saved: each part may keep something."""
    values = (getattr(strategy, f.name) for f in dataclasses.fields(strategy))  # type: ignore[arg-type]
    return *kind(strategy), *(type(value) for value in values if dataclasses.is_dataclass(value))


def one_of_each(examples: Sequence[Strategy[Any]], of: Callable[[Strategy[Any]], Any] = kind) -> list[Strategy[Any]]:
    """Return one example of each kind: the first that is not all defaults, since the rounds of these may be long."""
    found: dict[Any, Strategy[Any]] = {}
    for strategy in sorted(examples, key=lambda s: s == type(s)()):
        found.setdefault(of(strategy), strategy)
    return [s for s in examples if s in found.values()]


def each_of(examples: Sequence[Strategy[Any]]) -> pytest.MarkDecorator:
    """One test for each, for what takes milliseconds."""
    return pytest.mark.parametrize("strategy", examples, ids=show)


def in_processes(examples: Sequence[Strategy[Any]], of: Callable[[Strategy[Any]], Any] = kind) -> pytest.MarkDecorator:
    """One test for one example of each kind; the others take part in `make nightly`."""
    return pytest.mark.parametrize("strategy", few(examples, one_of_each(examples, of)), ids=[*map(show, examples)])


def each_with(name: str, values: Mapping[str, Any], examples: Sequence[Strategy[Any]]) -> pytest.MarkDecorator:
    """Every example with one of the values, in turn, one of each kind with all; all with all in `make nightly`."""
    chosen, cases = one_of_each(examples), []
    for i, strategy in enumerate(examples):
        for j, (label, value) in enumerate(values.items()):
            marks = [] if strategy in chosen or i % len(values) == j else [pytest.mark.nightly]
            cases.append(pytest.param(strategy, value, id=f"{show(strategy)}-{label}", marks=marks))
    return pytest.mark.parametrize(("strategy", name), cases)


def ends_at(strategy: Strategy[Any]) -> str:
    """Where the model is at the end of a run of a few steps."""
    if isinstance(strategy, StrategySwitch) and isinstance(strategy.when, AtShare):
        return strategy.then.layout.model_location
    return strategy.layout.model_location


def sieves(strategy: Strategy[Any]) -> bool:
    """Whether how much is sent depends on the numbers in it."""
    return isinstance(strategy, ParameterServer) and strategy.filter != Everything()


def workers_for(strategy: Strategy[Any], wanted: int = WORKERS) -> int:
    """As many as wanted, unless the strategy takes only others."""
    return next(n for n in (wanted, WORKERS, 1) if not [*strategy.problems(n)])


def alone(strategy: Strategy[Any]) -> Strategy[Any]:
    """The case of a strategy in which a world of one is plain training."""
    strategy = dataclasses.replace(strategy, **row_of(strategy).alone)  # type: ignore[type-var]
    match strategy:
        case ParameterServer(consistency=KSync() | KAsync() as consistency):
            return dataclasses.replace(strategy, consistency=dataclasses.replace(consistency, k=1))
        case ParameterServer(filter=RandomSkip()):
            return dataclasses.replace(strategy, filter=RandomSkip(probability=0.0))
        case ParameterServer(filter=Significant()):
            return dataclasses.replace(strategy, filter=Significant())
        case ParameterServer(consistency=BackupWorkers()):
            return dataclasses.replace(strategy, consistency=BackupWorkers(b=0))
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
    feed.deal_to(range(workers - strategy.layout.servers))
    while feed.epochs * per_epoch < steps:
        feed.next()
        done += 1
    return done


def bytes_sent(strategy: Strategy[Any], workers: int, steps: int, layers: list[int]) -> list[list[int]]:
    """Bytes sent by every worker and by every server, as the catalogue has them."""
    run = RunSize(workers=workers, steps=steps, layers=tuple(layers), momenta={"momentum_buffer": "vector"})
    assert sum(run.average()) == 2 * (workers - 1) * 4 * sum(layers)
    match strategy:
        case StrategySwitch(first=first, when=Plateau()):  # which does not fire in so few steps
            return [bytes_sent(first, workers, steps, layers)[0], [0] * strategy.layout.servers]
        case StrategySwitch(promote=True):
            return bytes_of_a_promotion(strategy, run, layers)
    expected = expected_traffic(strategy, run)
    assert expected is not None, f"give {type(strategy).__name__} a function `traffic`, as its docstring has it"
    assert expected.servers is not None
    return [expected.workers, expected.servers]


def bytes_of_a_promotion(strategy: StrategySwitch, run: RunSize, layers: list[int]) -> list[list[int]]:
    """Both strategies, the second on fewer workers; what is handed over stays on the machines."""
    assert isinstance(strategy.when, AtShare)
    k, servers = math.ceil(strategy.when.share * run.steps), strategy.layout.servers
    rest = steps_of(strategy, run.workers, run.steps) - k
    before = bytes_sent(strategy.first, run.workers, k, layers)
    after = bytes_sent(strategy.then, run.workers - servers, rest, layers)
    agreed = run.average(1, 8)  # how many samples there were
    return [[sum(sent) for sent in zip(before[0], after[0] + [0] * servers, agreed, strict=True)], after[1]]
