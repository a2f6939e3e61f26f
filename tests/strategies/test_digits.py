# SPDX-License-Identifier: Apache-2.0
"""Every strategy learns the digits as well as one process alone, to within a point, under the settings declared here.

The recipe's own: SGD with momentum 0.9 and its learning rate, divided by as many updates as the gradients of all workers
make one after the other (`Strategy.updates`): an asynchronous server with four workers takes a quarter of it.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from tests.laws.examples import EXAMPLES

import orchestra
from orchestra import Epochs, Local, Simulated, Solo, Strategy, recipes
from orchestra.cli.sources import arguments
from orchestra.expression import show
from orchestra.strategies import STRATEGIES

pytestmark = pytest.mark.exhaustive

WORKERS, SEEDS = 4, range(3)
RATE = 0.05
# Those that learn from momentum as workers do, or need another setting, with the reason on their pages.
OTHERWISE: dict[str, Any] = {}


def accuracy(strategy: Strategy[Any], workers: int, seed: int) -> float:
    """Percent, after the recipe's epochs."""
    recipe = recipes.get("digits")
    rate = RATE / strategy.updates(workers)
    optimizer = OTHERWISE.get(type(strategy).__name__, partial(torch.optim.SGD, momentum=0.9))
    with tempfile.TemporaryDirectory() as folder:
        asked = arguments(recipe) | {
            "strategy": strategy, "seed": seed, "out": Path(folder) / "run", "progress": False,
            "optimizer": partial(optimizer, lr=rate), "budget": Epochs(20),
            "cluster": Local(workers=1) if workers == 1
            else Simulated(workers=workers, delay="lognormal:0.05,0.3", network="1gbit,50us"),
        }  # fmt: skip
        return 100 * orchestra.train(**asked).metrics["accuracy"]


@pytest.fixture(scope="module")
def alone() -> float:
    return fmean(accuracy(Solo(), 1, seed) for seed in SEEDS)


@pytest.mark.parametrize("strategy", [s for s in EXAMPLES if not [*s.demands(WORKERS)]], ids=show)
def test_it_learns_the_digits(strategy: Strategy[Any], alone: float) -> None:
    found = fmean(accuracy(strategy, WORKERS, seed) for seed in SEEDS)
    print(f"{show(strategy)}: {found:.2f} (alone {alone:.2f})")
    assert found >= alone - 1


def test_the_catalogue_is_covered() -> None:
    assert {type(s) for s in EXAMPLES} == set(STRATEGIES)
