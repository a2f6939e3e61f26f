# SPDX-License-Identifier: Apache-2.0
"""Ways to reduce gradients, and why they agree.

    solo            one process with the whole batch
    native N        N workers with an N-th of the batch each, the mean taken by the best there is
    one_device N    likewise, the gradients added up on worker 0 and sent back (TensorFlow's ReductionToOneDevice)
    server N        likewise, pushed to a parameter server that makes the update (BSP)

With the same seed all of them see the same samples in every step, so all follow one path, but for rounding. Then what
makes tables of such runs disagree, one deviation at a time, with 4 workers and the native mean unless it says so:

    batch not divided     every worker takes the whole batch: 4 times the batch, a quarter of the steps
    summed                gradients are added up, not averaged: 4 times the learning rate
    uneven                workers hold 8, 4, 2 and 1 fifteenths of the weeks, and their means count by their samples
    uneven, unweighted    and each mean counts the same
    Adam                  another optimizer, in one process
    Adam, other rows      and the rows that are held out are drawn at random from all weeks

All are real processes on this machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.common import Figures, Study, options, train
from orchestra import AllReduce, Epochs, Local, ParameterServer, Solo, Steps, recipes
from orchestra.core.node import Node
from orchestra.core.strategy import Strategy
from orchestra.data.load import ROOMS, appliances
from orchestra.metrics import regression_scores
from orchestra.model.flat_optimizer import Factory
from orchestra.recipes.models import mlp

BATCH, EPOCHS = 64, 6  # samples of a step, of all workers together
RECIPE = recipes.get("regression")
ALIKE: dict[str, tuple[Strategy[Any], int]] = {
    "solo": (Solo(), 1),
    **{f"native {n}": (AllReduce(), n) for n in (2, 4)},
    **{f"one_device {n}": (AllReduce(algorithm="one_device"), n) for n in (2, 4)},
    **{f"server {n}": (ParameterServer(), n) for n in (2, 4)},
}
OPTIMIZERS: dict[str, Factory] = {
    "SGD": RECIPE.optimizer,
    "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=1e-3),
    "Adam": partial(torch.optim.Adam, lr=1e-3),
}


@torch.no_grad()
def scores(model: nn.Module, data: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Errors over all outputs, and R² in three ways and of every output.

    Mean: of the outputs' own. Pooled: 1 − Σ squared errors / Σ squared deviations, each from its own output's mean, of
    all outputs together; an output that varies more counts more. Worst: the least of the outputs' own.
    """
    inputs, target = data
    error = (model(inputs) - target).double()
    deviation = target.double() - target.double().mean(0)
    own = 1 - error.square().sum(0) / deviation.square().sum(0)
    whole = regression_scores(model, data)
    pooled = float(1 - error.square().sum() / deviation.square().sum())
    figures = {"MAE": whole["mae"], "MSE": whole["mse"], "R² mean": whole["r2"], "R² pooled": pooled}
    return figures | {"R² worst": whole["r2_min"]} | dict(zip(ROOMS, own.tolist(), strict=True))


def measure(seed: int, *, strategy: Strategy[Any], workers: int, batch: int | None = None, **more: Any) -> Figures:
    """Train for real, score once, at the end."""
    result, _ = train(
        RECIPE, strategy=strategy, cluster=Local(workers=workers), batch=batch or BATCH // workers, seed=seed,
        **{"budget": Epochs(EPOCHS), "evaluate": scores, "evaluate_every": Epochs(EPOCHS)} | more,
    )  # fmt: skip
    figures = {name: value for name, value in result.metrics.items() if name not in ROOMS}
    by_room = {room: round(result.metrics[room], 6) for room in ROOMS}
    times = {"setting up s": result.summary.setup, "training s": result.summary.seconds}
    return times | figures | {"R² by room": by_room}


# In both precisions.


def cast(split: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the same data in some precision."""
    inputs, targets = appliances(split)
    return inputs.to(dtype), targets.to(dtype)


def perceptron(dtype: torch.dtype, *, smooth: bool) -> nn.Module:
    """Return the same model in some precision; `smooth`: with tanh instead of ReLU."""
    layers = mlp(17, 64, 64, 9)
    return nn.Sequential(*(nn.Tanh() if smooth and isinstance(layer, nn.ReLU) else layer for layer in layers)).to(dtype)


def measure_agreement(seed: int, *, optimizer: Factory, dtype: torch.dtype, smooth: bool = False) -> Figures:
    """How far the others' weights end from solo's at most, as a share of their norm, after one epoch."""
    weights = {}
    for name, (strategy, workers) in ALIKE.items():
        result, _ = train(
            RECIPE, model=partial(perceptron, dtype, smooth=smooth), data=partial(cast, "train", dtype), evaluate=None,
            optimizer=optimizer, strategy=strategy, cluster=Local(workers=workers), batch=BATCH // workers, seed=seed,
            budget=Epochs(1),
        )  # fmt: skip
        weights[name] = torch.cat([p.detach().flatten() for p in result.model.parameters()])
    solo = weights["solo"]
    return {"apart at most": max(float((x - solo).norm() / solo.norm()) for x in weights.values())}


# What makes tables disagree.


@dataclass(frozen=True)
class Uneven:
    """Runs of weeks of very different lengths."""

    shares: tuple[int, ...] = (8, 4, 2, 1)

    def shards(self, labels: Tensor, size: int, seed: int) -> list[Tensor]:
        """In order of time."""
        rows, whole = torch.arange(len(labels)), sum(self.shares)
        cuts = [len(labels) * sum(self.shares[:i]) // whole for i in range(len(self.shares) + 1)]
        return [rows[a:b] for a, b in pairwise(cuts)]


@dataclass(frozen=True, kw_only=True)
class Unweighted(Strategy[None]):
    """All-reduce as it must not be: every worker's mean counts the same, however few samples are behind it."""

    def init(self, node: Node) -> None:
        """Nothing to remember."""

    def step(self, node: Node, s: None) -> None:
        """ḡ ← Σ gᵢ / N."""
        g = node.gradient()
        node.comm.mean_(g)
        node.update(g)


def redrawn(split: str) -> tuple[Tensor, Tensor]:
    """All rows, and as many of them held out as there were, but at random: most have a neighbour to copy from."""
    columns = [torch.cat(both) for both in zip(appliances("train"), appliances("test"), strict=True)]
    order = torch.randperm(len(columns[0]), generator=torch.Generator().manual_seed(0))
    cut = len(appliances("train")[0])
    rows = order[:cut] if split == "train" else order[cut:]
    return columns[0][rows], columns[1][rows]


FOUR: dict[str, Any] = {"strategy": AllReduce(), "workers": 4}
ALONE: dict[str, Any] = {"strategy": Solo(), "workers": 1, "optimizer": OPTIMIZERS["Adam"]}
SUMMED = partial(torch.optim.SGD, lr=4 * 0.01, weight_decay=1e-3 / 4)  # the decay is not summed
DEVIANT: dict[str, Callable[[int], Figures]] = {
    "batch not divided": partial(measure, **FOUR, batch=BATCH),
    "summed": partial(measure, **FOUR, optimizer=SUMMED),
    "uneven": partial(measure, **FOUR, batch=34, partition=Uneven()),
    "uneven, unweighted": partial(measure, **FOUR | {"strategy": Unweighted()}, batch=34, partition=Uneven()),
    "Adam": partial(measure, **ALONE),
    "Adam, other rows": partial(
        measure, **ALONE, data=partial(redrawn, "train"), evaluation_data=partial(redrawn, "test")
    ),
}  # fmt: skip
PRECISIONS: dict[str, dict[str, Any]] = {
    "double precision": {"dtype": torch.float64},
    "single precision": {"dtype": torch.float32},
    "single precision, tanh": {"dtype": torch.float32, "smooth": True},
}
VARIANTS: dict[str, Callable[[int], Figures]] = {
    **{name: partial(measure, strategy=strategy, workers=n) for name, (strategy, n) in ALIKE.items()},
    **DEVIANT,
    **{
        f"{precision}, {name}": partial(measure_agreement, optimizer=optimizer, **how)
        for precision, how in PRECISIONS.items()
        for name, optimizer in OPTIMIZERS.items()
    },
}


def judge(study: Study) -> None:
    """Whether it is all the same how gradients are reduced, and what is not."""
    for precision, digits in zip(PRECISIONS, (12, 3, 5), strict=True):
        apart = max(max(study[f"{precision}, {name}", "apart at most"].values) for name in OPTIMIZERS)
        words = f"{precision}: all ways end an epoch with solo's weights, to {digits} digits, Adam's as well"
        study.expect(words, apart <= 10**-digits, apart=apart)
    alike = max(_apart(study, name, "solo", figure) for name in ALIKE for figure in ("R² mean", "R² pooled"))
    study.expect("after all epochs no R² differs from solo's by 0.0001", alike < 1e-4, differ=alike)
    rooms = max(_rooms_apart(study, name, "solo") for name in ALIKE)
    study.expect("nor does that of any room by 0.001", rooms < 1e-3, differ=rooms)
    for name, other in (("batch not divided", "solo"), ("summed", "solo"), ("Adam", "solo"),
                        ("uneven, unweighted", "uneven"), ("Adam, other rows", "Adam")):  # fmt: skip
        r2 = {each: study[each, "R² mean"].mean for each in (other, name)}
        study.expect(f"{name}: R² differs from {other}'s by more than 0.01", abs(r2[name] - r2[other]) > 0.01, **r2)
    means = (study["solo", "R² mean"].mean, study["solo", "R² pooled"].mean, study["solo", "R² worst"].mean)
    words = "one and the same model has R² that differ by more than 0.05, by the way outputs are put together"
    study.expect(words, max(means) - min(means) > 0.05, mean=means[0], pooled=means[1], worst=means[2])


def _apart(study: Study, name: str, other: str, figure: str) -> float:
    """How far a figure is from another's with the same seed, at most."""
    return max(abs(a - b) for a, b in zip(study[name, figure].values, study[other, figure].values, strict=True))


def _rooms_apart(study: Study, name: str, other: str) -> float:
    """Likewise R² of any one output."""
    by_room: dict[str, list[dict[str, float]]]
    by_room = {each: [r["R² by room"] for r in study.rows if r["variant"] == each] for each in (name, other)}
    return max(abs(a[room] - b[room]) for a, b in zip(by_room[name], by_room[other], strict=True) for room in ROOMS)


def main() -> int:
    """Run the study."""
    asked = options(__doc__, seeds=2)
    study = Study("Ways to reduce gradients", folder=asked.out or Path(__file__).parent)
    measure(0, strategy=Solo(), workers=1, budget=Steps(1))  # the first run of all starts what the others find ready
    study.run(VARIANTS, seeds=range(asked.seeds))
    judge(study)
    return study.conclude()


if __name__ == "__main__":
    raise SystemExit(main())
