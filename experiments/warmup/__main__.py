# SPDX-License-Identifier: Apache-2.0
"""Warm-up at 8 times the batch.

Goyal et al. "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017. https://arxiv.org/abs/1706.02677
(ResNet-50 at 8,192 instead of 256 samples a step, with and without warm-up)

    small       1 worker  × 16 samples, learning rate η
    no warm-up  8 workers × 16 samples, 8 η from the first step on
    constant    8 workers × 16 samples, η for 8 epochs, then 8 η at once
    gradual     8 workers × 16 samples, from η to 8 η along a straight line over 8 epochs
    LARS        8 workers × 16 samples, 8 η from the first step on, every layer at its own rate

All pass over the digits 20 times and let the rate fall to zero along a straight line.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.common import Figures, Study, options, train
from orchestra import LARS, AllReduce, Epochs, Polynomial, Simulated, Warmup, recipes
from orchestra.model.flat_optimizer import Factory

WORKERS, BATCH, EPOCHS, WARM = 8, 16, 20, 8.0
ETA = 0.08  # the largest of 0.07, 0.08, 0.09 at which a gradual warm-up was safe
SGD = partial(torch.optim.SGD, lr=ETA, momentum=0.9)
TRUSTED = partial(LARS, lr=ETA, momentum=0.9, eta=0.02)


def measure(seed: int, *, workers: int = WORKERS, optimizer: Factory = SGD, **warmup: Any) -> Figures:
    """Train once; the rate is in proportion to the samples of a step."""
    schedule = Warmup(reference=BATCH, then=Polynomial(epochs=EPOCHS, power=1), **warmup)
    result, scores = train(
        recipes.get("digits"), strategy=AllReduce(), cluster=Simulated(workers=workers), batch=BATCH, seed=seed,
        optimizer=optimizer, schedule=schedule, budget=Epochs(EPOCHS), evaluate_every=Epochs(1),
    )  # fmt: skip
    curve = [_percent(score.metrics) for score in scores[:-1]]  # the last is the final model once more
    figures = {"accuracy": _percent(result.metrics), "training loss": result.summary.loss}
    return figures | {"accuracy by epoch": curve}


def _percent(metrics: Mapping[str, float]) -> float:
    return round(100 * metrics["accuracy"], 2)


VARIANTS = {
    "small": partial(measure, workers=1),
    "no warm-up": partial(measure, epochs=0.0),
    "constant": partial(measure, epochs=WARM, how="constant"),
    "gradual": partial(measure, epochs=WARM),
    "LARS": partial(measure, optimizer=TRUSTED, epochs=0.0),
}


def judge(study: Study) -> None:
    """Check the findings of Goyal et al., and the purpose of LARS. Noise: two deviations of the small batch."""
    small, noise = study["small", "accuracy"], 2 * study["small", "accuracy"].deviation
    behind = {name: small.mean - study[name, "accuracy"].mean for name in VARIANTS}
    words = "with gradual warm-up, 8 times the batch is as accurate as the small batch, within its noise"
    study.expect(words, behind["gradual"] <= noise, behind=behind["gradual"], noise=noise)
    words = "without warm-up, 8 times the rate is worse than the small batch by more than noise"
    study.expect(words, behind["no warm-up"] > noise, behind=behind["no warm-up"], noise=noise)
    loss = {name: study[name, "training loss"].mean for name in ("gradual", "constant")}
    study.expect("gradual warm-up trains further than constant warm-up", loss["gradual"] < loss["constant"], **loss)
    worst = small.mean - min(study["LARS", "accuracy"].values)
    words = "LARS bears 8 times the rate without warm-up: no run is more than 5 points behind"
    study.expect(words, worst <= 5, behind=behind["LARS"], worst=worst)


def main() -> int:
    """Run the study."""
    asked = options(__doc__, seeds=10)
    study = Study("Warm-up at 8 times the batch", folder=asked.out or Path(__file__).parent)
    study.run(VARIANTS, seeds=range(asked.seeds), diverged={"accuracy": 10.0, "training loss": 2.303})
    judge(study)
    return study.conclude()


if __name__ == "__main__":
    raise SystemExit(main())
