# SPDX-License-Identifier: Apache-2.0
"""The setting that all studies of Strategy-Switch share: LeNet-5 on Fashion-MNIST, 8 workers in virtual time.

Real gradients; every variant sees the same samples equally often.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from experiments.common import Figures, Study, train
from orchestra import (
    ASP,
    AllReduce,
    Epochs,
    ParameterServer,
    Plateau,
    Polynomial,
    Simulated,
    Strategy,
    StrategySwitch,
    recipes,
)
from orchestra.data import fashion_mnist
from orchestra.metrics import accuracy
from orchestra.runs.events import Logged
from orchestra.runs.facts import events_of

WORKERS, BATCH, EPOCHS = 8, 32, 8
SAMPLES, SEEN = 60_000, 2_000  # training images; test images along the way (the final model is scored on all 10,000)
GAMMA = 0.05  # γ, the best of those in tune.py
ALONE = 0.005  # the asynchronous rate where nothing went before, likewise
PLAIN = 0.05  # the same without momentum, likewise
# Now and then a worker is 10 times as slow for two steps or so; in the long run all are equally fast.
Cluster = partial(Simulated, workers=WORKERS, network="100mbit,0.5ms", compute_time="markov:0.1,10,0.05,0.5")
THETA = 0.03  # θ: rounds of 7,500 samples are too noisy for the paper's 0.01

SYNC, ASYNC = AllReduce(), ParameterServer(consistency=ASP(), servers=4)
Switch = partial(StrategySwitch, first=SYNC, then=ASYNC)
Rule = partial(Plateau, every=0.125)


@lru_cache
def images(split: Any, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first `count` images of a split, read once for all runs."""
    inputs, labels = fashion_mnist(split)
    return inputs[:count], labels[:count]


def measure(
    seed: int, *, strategy: Strategy[Any], lr: float = GAMMA, momentum: float = 0.9, device: Any = "cpu"
) -> Figures:
    """Train once."""
    with tempfile.TemporaryDirectory() as folder:
        result, scores = train(
            recipes.get("fashion-lenet"), strategy=strategy, cluster=Cluster(device=device), batch=BATCH, seed=seed,
            data=partial(images, "train", SAMPLES), evaluation_data=partial(images, "test", SEEN),
            optimizer=partial(torch.optim.SGD, lr=lr, momentum=momentum), schedule=Polynomial(epochs=EPOCHS, power=1),
            budget=Epochs(EPOCHS), evaluate_every=Epochs(0.25), out=Path(folder) / "run",
        )  # fmt: skip
        settling = [e for e in events_of(result.run) if isinstance(e, Logged) and e.node == 0 and e.name == "s"]
    summary = result.summary
    steps = EPOCHS * -(-len(images("train", SAMPLES)[0]) // (WORKERS * BATCH))  # of each, as long as there are 8
    return {
        "accuracy": percent(accuracy(result.model, images("test", 10_000))),
        "seconds": round(summary.seconds, 2),
        "synchronous": round(100 * summary.happened[0] / steps, 1) if summary.happened else None,
        "missing": summary.missing,
        "staleness": summary.staleness_mean,
        "curve": [(round(score.t, 2), score.samples, percent(score.metrics)) for score in scores],
        "s": [(e.step, round(e.value, 4)) for e in settling],
    }


def percent(metrics: Mapping[str, float]) -> float:
    """Return the accuracy in percent."""
    return round(100 * metrics["accuracy"], 2)


def race(study: Study, variants: Iterable[str]) -> dict[str, float]:
    """How many times sooner than all-reduce a variant has what that has in the end, but for half a point; 0 if never.

    On curves averaged over the seeds: 2,000 images tell the accuracy of a single run to 0.7 points only.
    """
    target = _curve(study, "all-reduce")[-1][1] - 0.5
    reached = {v: next((t for t, scored in _curve(study, v) if scored >= target), None) for v in variants}
    whole = reached["all-reduce"]
    assert whole is not None
    return {variant: round(whole / t, 2) if t else 0.0 for variant, t in reached.items()}


def _curve(study: Study, variant: str) -> list[tuple[float, float]]:
    """Seconds and accuracy, averaged over the seeds."""
    curves = [row["curve"] for row in study.rows if row["variant"] == variant]
    points = zip(*curves, strict=False)  # of a run that was lost there are none
    return [(fmean(t for t, _, _ in point), fmean(scored for _, _, scored in point)) for point in points]


# Of a run that diverged.
LOST: Figures = {
    "accuracy": 10.0, "seconds": 0.0, "synchronous": None, "missing": None, "staleness": None, "curve": [], "s": []
}  # fmt: skip
