# SPDX-License-Identifier: Apache-2.0
"""Tunings whose outcomes and costs are known beforehand, and a script whose data is a stream."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from orchestra.cli import compare, sources
from orchestra.cli.candidates import Setting
from orchestra.cli.options import Options
from orchestra.cli.tuning import Tuning
from orchestra.cli.tuning_plan import Costs
from orchestra.cli.tuning_results import TuningResult

COSTS = Costs(run=0.1, score=0.0, epoch=0.1, real=0.1)


def made(
    found: Callable[[Setting], TuningResult], names: tuple[str, ...], out: Path, seeds: int = 3, *,
    costs: Costs = COSTS, sim: bool = True,
) -> Tuning:  # fmt: skip
    """A tuning of which the outcomes are known beforehand, and what runs cost."""
    shared = Options(workers=2, sim=sim or None)
    race = compare.prepare(sources.find("digits"), [*names], shared, seeds, None, out)
    tuned = Tuning(race, seeds, quiet=True)
    tuned._measure = lambda: costs  # type: ignore[method-assign]
    tuned._one = lambda setting, epochs, seed, **of: found(setting)  # type: ignore[method-assign]
    return tuned


def best_at(rate: float) -> Callable[[Setting], TuningResult]:
    return lambda setting: TuningResult(curve=((1.0, -abs(math.log(setting.rate / rate))),))


QUICK = ("--sim", "-n", "2", "--epochs", "2", "--target", "accuracy=0.6", "--seeds", "1", "--out", "out")

STREAM = """
import torch
import orchestra
from torch.utils.data import IterableDataset

class Stream(IterableDataset):
    def __iter__(self):
        random = torch.Generator().manual_seed(0)
        for _ in range(640):
            x = torch.randn(4, generator=random)
            yield x, x[:3].argmax()

def test():
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(1))
    return x, x[:, :3].argmax(1)

def accuracy(model, data):
    return {"accuracy": float((model(data[0]).argmax(1) == data[1]).float().mean())}

def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.5)

def linear():
    return torch.nn.Linear(4, 3)

what = dict(model=linear, data=Stream, loss=torch.nn.functional.cross_entropy, optimizer=sgd, batch=16)
what |= dict(evaluate=accuracy, evaluation_data=test)
"""


AS_RECIPE = 'RECIPE = orchestra.Recipe(name="a", about="", epochs=2.0, target="accuracy=0.8", **what)'
