# SPDX-License-Identifier: Apache-2.0
"""Every strategy learns the digits as well as one process alone, to within a point, under the settings declared here.

Four workers, twenty epochs, three seeds; SGD with momentum 0.9. The rates are those for all workers together, divided
by as many updates as their gradients make one after the other (`Strategy.updates`): four for an asynchronous server.

Strategy-Switch runs on with no momentum after the switch, and then a constant rate leaves x where the last few noisy
gradients moved it (87 to 97 % by the seed). Its rate therefore falls to zero, as in its study; all-reduce with the same
falling rate scores the same.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

import orchestra
from orchestra import Epochs, Local, ParameterServer, Polynomial, Simulated, Solo, Strategy, recipes
from orchestra.cli.sources import arguments
from orchestra.engine.expression import parse
from orchestra.strategies.catalogue import STRATEGIES
from orchestra.strategies.parameter_server.consistency import CONSISTENCIES

pytestmark = pytest.mark.nightly

WORKERS, SEEDS, EPOCHS = 4, range(3), 20
ALONE = 0.05
RATES = {
    "allreduce": 0.1,
    "ps": 0.1,
    "localsgd": 0.1,
    "slowmo(tau=4)": 0.1,
    "ps(consistency=asp())": 0.05,
    "ps(consistency=ssp())": 0.05,
    "ps(consistency=backupworkers(b=1))": 0.1,
    "ps(consistency=ksync(k=3))": 0.1,
    "ps(consistency=kasync(k=2))": 0.1,
    "ps(consistency=kbatchasync(k=2))": 0.07,
    "ps(consistency=softsync(n=2))": 0.07,
    "ps(consistency=asp(), correction=delaycompensated())": 0.07,
    "downpour(n_push=2, n_fetch=2)": 0.03,
    "easgd": 0.1,
    "synceasgd": 0.1,
    "hogwild": 0.0125,
    "switch(when=atshare(share=0.4))": 0.1,
    "switch(first=ps(consistency=asp()), then=allreduce(), when=atshare(share=0.4))": 0.07,
}
# These rates fall linearly to zero.
FALLING = {"switch(when=atshare(share=0.4))"}
# More than a point behind at the best of a few rates; their pages say by how much.
BEHIND = {"ps(consistency=boundeddelay())": 0.05, "ps(consistency=kbatchsync(k=4))": 0.2}


def accuracy(strategy: Strategy[Any], workers: int, rate: float, seed: int, falling: bool = False) -> float:
    """Percent, after `EPOCHS` epochs."""
    world = Simulated(workers=workers, compute_time="lognormal:0.05,0.3", network="1gbit,50us")
    optimizer = partial(torch.optim.SGD, lr=rate / strategy.layout.updates.per_round_of(workers), momentum=0.9)
    with tempfile.TemporaryDirectory() as folder:
        asked = arguments(recipes.get("digits")) | {
            "strategy": strategy, "seed": seed, "out": Path(folder) / "run", "progress": False,
            "optimizer": optimizer, "budget": Epochs(EPOCHS), "cluster": world if workers > 1 else Local(workers=1),
            "schedule": Polynomial(epochs=EPOCHS, power=1) if falling else None,
        }  # fmt: skip
        return 100 * orchestra.train(**asked).metrics["accuracy"]


@pytest.fixture(scope="module")
def alone() -> float:
    return fmean(accuracy(Solo(), 1, ALONE, seed) for seed in SEEDS)


@pytest.mark.parametrize("text", [*RATES, *BEHIND])
def test_every_strategy_learns_the_digits(text: str, alone: float) -> None:
    found = fmean(accuracy(parse(text), WORKERS, (RATES | BEHIND)[text], seed, text in FALLING) for seed in SEEDS)
    print(f"{text}: {found:.2f}, alone {alone:.2f}")
    assert found >= alone - (1 if text in RATES else 2)


def test_every_strategy_and_consistency_is_there() -> None:
    known = [parse(text) for text in RATES | BEHIND]
    assert {type(s) for s in known} == {*STRATEGIES} - {Solo}
    consistencies = {type(s.consistency) for s in known if isinstance(s, ParameterServer)}
    assert consistencies == {*CONSISTENCIES}
