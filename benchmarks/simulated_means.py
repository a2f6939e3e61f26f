# SPDX-License-Identifier: Apache-2.0
"""Does a simulated all-reduce cost more per gradient with more workers? Against a mean of one range at a time."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

import orchestra
from benchmarks.batched import BATCH, WORKLOADS, data
from benchmarks.common import Outcome, Rounds, main, scratch
from orchestra.core.ops import Group, MeanUpdate
from orchestra.core.vectors import is_small, ranges, weighted_mean
from orchestra.model.flat_optimizer import FlatOptimizer
from orchestra.model.replica import flatten
from orchestra.worlds.simulated.collectives import CARRY_OUT

WORKERS = (4, 16, 64, 128)
MODELS = ("LeNet-5", "MLP 784-256-10")
GRADIENTS = 384  # in a turn of the mean and update alone, all workers together
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


def collective(model: Any, workers: int, rounds: int) -> Rounds:
    """Processor µs per gradient of the mean and update of a step, by itself."""
    x = flatten(model())
    group = Group(tuple(range(workers)))
    inners = [FlatOptimizer(SGD, x[part]) for part in ranges(x.numel(), workers)]
    ops = [MeanUpdate(x, torch.randn(x.numel()), group, float(BATCH), inner.step) for inner in inners]
    took = Rounds()
    for number in range(-1, rounds):
        for name in in_turn(number):
            began = time.process_time()
            for _ in range(times := max(2, GRADIENTS // workers)):
                FORMS[name](group, ops)
            if number >= 0:
                took.add(name, (time.process_time() - began) / times / workers * 1e6)
    return took


def in_turn(number: int) -> list[str]:
    """The order of the forms in a round."""
    return list(FORMS) if number % 2 == 0 else list(reversed(FORMS))


class Turns:
    """Takes the means of a simulation in both forms, step by step, and notes the processor ms per gradient.

    A step begins and ends with a mean: all workers meet there.
    """

    def __init__(self) -> None:
        self.took = Rounds()
        self._steps, self._before = 0, 0.0

    def __call__(self, group: Group, ops: Sequence[MeanUpdate]) -> list[None]:
        number, which = divmod(self._steps, 2)
        name = in_turn(number)[which]
        FORMS[name](group, ops)
        now = time.process_time()
        if number:  # the first two steps choose kernels and make momenta
            self.took.add(name, (now - self._before) / len(ops) * 1e3)
        self._steps, self._before = self._steps + 1, now
        return [None for _ in ops]


def simulation(model: Any, shape: tuple[int, ...], numerics: Any, workers: int, rounds: int) -> Rounds:
    """Processor ms per gradient of the steps of a whole simulation."""
    turns = Turns()
    CARRY_OUT[MeanUpdate] = turns
    try:
        with scratch() as folder:
            orchestra.train(
                model=model,
                data=functools.partial(data, shape),
                loss=F.cross_entropy,
                optimizer=SGD,
                strategy="allreduce",
                cluster=orchestra.Simulated(
                    workers=workers,
                    numerics=numerics,
                    network="10gbit,50us",
                    compute_time="lognormal:0.05,0.3",
                    device="cpu",
                ),
                batch=BATCH,
                budget=orchestra.Steps(2 + 2 * rounds),
                out=folder / "run",
                progress=False,
            )
    finally:
        CARRY_OUT[MeanUpdate] = FORMS[OURS]
    return turns.took


def measure(rounds: int) -> Outcome:
    """Both forms in turn."""
    outcome = Outcome(
        "Simulated all-reduce",
        f"All-reduce by {', '.join(map(str, WORKERS))} simulated workers, batch {BATCH}, SGD with momentum, one "
        "thread. *By range*: the mean of each worker's range by itself, N² operations a step, as it was before "
        "2026-11-18. *Whole*: the mean of the whole vector once, N operations, the same bits. Processor time per "
        f"gradient, which other programs hardly change; {rounds} rounds in turn, every other one backwards; ratios "
        "within a round. In a simulation the forms take turns step by step; set-up is left out. LeNet-5 with 4 workers "
        "is so small that every worker averages and updates everything, so it has neither form there.",
    )
    alone: dict[tuple[str, int], Rounds] = {}
    for numerics in (None, "real", "batched"):
        found = {}
        for name, workers in itertools.product(MODELS, WORKERS):
            model, shape = WORKLOADS[name]
            if numerics is None:
                found[name, workers] = collective(model, workers, rounds)
            elif not is_small(flatten(model()).numel(), workers):
                found[name, workers] = simulation(model, shape, numerics, workers, rounds)
        what = "Mean and update alone, µs" if numerics is None else f'Whole simulation, numerics="{numerics}", ms'
        outcome.say(f"{what} per gradient. *Growth* is the ratio of the medians to those with 16 workers.")
        rows = [_row(*key, found, digits=0 if numerics is None else 2) for key in found]
        outcome.table(["model", "workers", "by range", "growth", "whole", "growth", "times as fast"], rows)
        alone = alone or found
    most = max(_growth(name, 128, OURS, alone) for name in MODELS)
    outcome.goal(f"mean and update per gradient, 128 workers by 16, at most 1.2 (here {most:.2f})", most <= 1.2)
    return outcome


def _growth(name: str, workers: int, form: str, found: dict[tuple[str, int], Rounds]) -> float:
    return found[name, workers][form].median / found[name, 16][form].median


def _row(name: str, workers: int, found: dict[tuple[str, int], Rounds], digits: int) -> list[str]:
    mine = found[name, workers]
    figures = [[mine[form].show(digits), f"{_growth(name, workers, form, found):.2f}"] for form in FORMS]
    return [name, str(workers), *itertools.chain(*figures), mine.ratio(BY_RANGE, OURS).show(2)]


if __name__ == "__main__":
    main(measure, rounds=5)
