# SPDX-License-Identifier: Apache-2.0
"""Does a simulated all-reduce cost more per gradient with more workers? Against a mean of one range at a time."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import orchestra
from benchmarks.batched import BATCH, WORKLOADS, data
from benchmarks.common import Outcome, Rounds, main
from orchestra.inner import Inner
from orchestra.ops import Group, MeanUpdate
from orchestra.replica import flatten
from orchestra.sim.collectives import CARRY_OUT
from orchestra.vectors import ranges, weighted_mean

WORKERS = (4, 16, 64, 128)
MODELS = ("LeNet-5", "MLP 784-256-10")
GRADIENTS = 384  # of further steps, all workers together
OURS, BY_RANGE = "whole", "by range"
SGD = functools.partial(torch.optim.SGD, lr=0.001, momentum=0.9)


def by_range(group: Group, ops: Sequence[MeanUpdate]) -> list[None]:
    """The form before 2026-11-18: N means of N pieces each, and N² comparisons of addresses."""
    weights = [op.weight for op in ops]
    parts = ranges(ops[0].g.numel(), len(ops))
    for op, part in zip(ops, parts, strict=True):
        mine = op.g[part]
        weighted_mean(mine, [other.g[part] for other in ops], weights)
        op.apply(mine)
    for op, part in zip(ops, parts, strict=True):
        for other in ops:
            if other.x.data_ptr() != op.x.data_ptr():
                other.x[part].copy_(op.x[part])
    return [None for _ in ops]


FORMS: dict[str, Callable[..., list[None]]] = {BY_RANGE: by_range, OURS: CARRY_OUT[MeanUpdate]}


@contextmanager
def form(name: str) -> Iterator[None]:
    """Let simulations take means in this form."""
    CARRY_OUT[MeanUpdate] = FORMS[name]
    try:
        yield
    finally:
        CARRY_OUT[MeanUpdate] = FORMS[OURS]


def collective(model: Any, workers: int) -> Callable[[], float]:
    """Set up the mean and update of one step; gives what measures processor µs per gradient of one form."""
    x = flatten(model())
    group = Group(tuple(range(workers)))
    inners = [Inner(SGD, x[part]) for part in ranges(x.numel(), workers)]
    ops = [MeanUpdate(x, torch.randn(x.numel()), group, float(BATCH), inner.step) for inner in inners]

    def measure() -> float:
        carry_out, times = CARRY_OUT[MeanUpdate], max(2, GRADIENTS // workers)
        carry_out(group, ops)
        began = time.process_time()
        for _ in range(times):
            carry_out(group, ops)
        return (time.process_time() - began) / times / workers * 1e6

    return measure


def simulation(model: Any, shape: tuple[int, ...], numerics: Any, workers: int) -> float:
    """Processor ms per gradient of further steps of a whole simulation."""
    further = max(2, GRADIENTS // workers)
    short, long = (_seconds(model, shape, numerics, workers, steps) for steps in (2, 2 + further))
    return (long - short) / further / workers * 1e3


def _seconds(model: Any, shape: tuple[int, ...], numerics: Any, workers: int, steps: int) -> float:
    cluster = orchestra.Simulated(
        workers=workers, numerics=numerics, network="10gbit,50us", delay="lognormal:0.05,0.3", device="cpu"
    )
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        orchestra.train(
            model=model,
            data=functools.partial(data, shape),
            loss=F.cross_entropy,
            optimizer=SGD,
            strategy="allreduce",
            cluster=cluster,
            batch=BATCH,
            budget=orchestra.Steps(steps),
            out=Path(folder) / "run",
            progress=False,
        )
        return time.process_time() - began


def measure(rounds: int) -> Outcome:
    """Both forms in turn."""
    outcome = Outcome(
        "Simulated all-reduce",
        f"All-reduce by {', '.join(map(str, WORKERS))} simulated workers, batch {BATCH}, SGD with momentum, one "
        "thread. *By range*: the mean of each worker's range by itself, N² operations a step, as it was before "
        "2026-11-18. *Whole*: the mean of the whole vector once, N operations, the same bits. Processor time per "
        f"gradient, which other programs hardly change; {rounds} rounds in turn, every other one backwards; ratios "
        "within a round. LeNet-5 with 4 workers is so small that every worker averages and updates everything, so both "
        "forms do the same in a simulation.",
    )
    for numerics in (None, "real", "batched"):
        rows = []
        for name in MODELS:
            rows += _rows(name, numerics, rounds)
        what = "Mean and update alone, µs" if numerics is None else f'Whole simulation, numerics="{numerics}", ms'
        outcome.say(f"{what} per gradient. *Growth* is against 16 workers.")
        outcome.table(["model", "workers", "by range", "whole", "times as fast", "growth, by range", "growth"], rows)
    return outcome


def _rows(name: str, numerics: str | None, rounds: int) -> Iterator[list[str]]:
    model, shape = WORKLOADS[name]
    took = {workers: Rounds() for workers in WORKERS}
    digits = 0 if numerics is None else 2
    contestants: list[tuple[int, str, Callable[[], float]]] = []
    for workers in WORKERS:
        run = (
            collective(model, workers)
            if numerics is None
            else functools.partial(simulation, model, shape, numerics, workers)
        )
        contestants += [(workers, each, run) for each in FORMS]
    for number in range(rounds):
        for workers, each, run in contestants if number % 2 == 0 else reversed(contestants):
            with form(each):
                took[workers].add(each, run())
    for workers in WORKERS:
        mine, few = took[workers], took[16]
        growth = Rounds()
        for each in FORMS:
            for a, b in zip(mine[each].values, few[each].values, strict=True):
                growth.add(each, a / b)
        yield [
            name, str(workers), mine[BY_RANGE].show(digits), mine[OURS].show(digits),
            mine.ratio(BY_RANGE, OURS).show(2), growth[BY_RANGE].show(2), growth[OURS].show(2),
        ]  # fmt: skip


if __name__ == "__main__":
    main(measure, rounds=5)
