# SPDX-License-Identifier: Apache-2.0
"""Strategy-Switch: all-reduce until the loss has settled, then an asynchronous parameter server.

Provatas, Chalas, Konstantinou, Koziris. "Strategy-Switch", IEEE Access 13, 2025.
https://ieeexplore.ieee.org/document/10836684
Li et al. "Sync-Switch", ICDCS 2021 (the share of synchronous training, the order, the rate at the switch).
https://arxiv.org/abs/2104.08364

    all-reduce          γ for the mean of 8 gradients
    asynchronous        each gradient by itself, at the rate that is best for that, ρ γ
    rule                all-reduce until s ≤ θ, then asynchronous at ρ γ; once with momenta kept, once without
    5 % ... 50 %        all-reduce for that share of the samples, then asynchronous at ρ γ
    asynchronous first  the other way round, for half of the samples each
    momenta ..., rate ...   as 25 %, but for what becomes of momenta and of γ at the switch

All see the same samples equally often. LeNet-5 on Fashion-MNIST, 8 workers in virtual time, real gradients.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from experiments.common import Figures, Study, options, train
from orchestra import (
    ASP,
    AllReduce,
    AtShare,
    Epochs,
    ParameterServer,
    Plateau,
    Simulated,
    StepDecay,
    Strategy,
    StrategySwitch,
    recipes,
)
from orchestra.data import fashion_mnist
from orchestra.events import Logged
from orchestra.metrics import accuracy
from orchestra.report.facts import events_of

WORKERS, BATCH, EPOCHS = 8, 8, 4
SAMPLES, SEEN = 10_000, 2_000  # training images; test images along the way (the final model is scored on all 10,000)
GAMMA = 0.05  # γ, the best of those in tune.py
RHO = 0.08  # ρ: the asynchronous rate over γ, likewise
PLAIN = 0.04  # the asynchronous rate without momentum, likewise
# Now and then a worker is 10 times as slow for two steps or so; in the long run all are equally fast.
CLUSTER = Simulated(workers=WORKERS, network="1gbit,0.5ms", delay="markov:0.03,10,0.05,0.5", numerics="real")
THETA = 0.1  # θ: rounds of 1,250 samples are too noisy for the paper's 0.01

SYNC, ASYNC = AllReduce(), ParameterServer(consistency=ASP())
Switch = partial(StrategySwitch, scale=RHO)
Rule = partial(Plateau, every=0.125)


@lru_cache
def images(split: Any, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first of them; read once for all runs."""
    inputs, labels = fashion_mnist(split)
    return inputs[:count], labels[:count]


def measure(seed: int, *, strategy: Strategy[Any], lr: float = GAMMA, momentum: float = 0.9) -> Figures:
    """Train once."""
    with tempfile.TemporaryDirectory() as folder:
        result, scores = train(
            recipes.get("fashion-lenet"), strategy=strategy, cluster=CLUSTER, batch=BATCH, seed=seed,
            data=partial(images, "train", SAMPLES), evaluation_data=partial(images, "test", SEEN),
            optimizer=partial(torch.optim.SGD, lr=lr, momentum=momentum), schedule=StepDecay(at=(0.75 * EPOCHS,)),
            budget=Epochs(EPOCHS), evaluate_every=Epochs(0.25), out=Path(folder) / "run",
        )  # fmt: skip
        settling = [e for e in events_of(result.run) if isinstance(e, Logged) and e.node == 0 and e.name == "s"]
    summary = result.summary
    return {
        "accuracy": percent(accuracy(result.model, images("test", 10_000))),
        "seconds": round(summary.seconds, 2),
        "synchronous": round(100 * summary.happened[0] / summary.steps, 1) if summary.happened else None,
        "missing": summary.missing,
        "staleness": summary.staleness_mean,
        "curve": [(round(score.t, 2), score.samples, percent(score.metrics)) for score in scores],
        "s": [(e.step, round(e.value, 4)) for e in settling],
    }


def percent(metrics: Mapping[str, float]) -> float:
    """The accuracy."""
    return round(100 * metrics["accuracy"], 2)


VARIANTS = {
    "all-reduce": partial(measure, strategy=SYNC),
    "asynchronous": partial(measure, strategy=ASYNC, lr=RHO * GAMMA),
    "rule": partial(measure, strategy=Switch(when=Rule(threshold=THETA))),
    "rule, momenta reset": partial(measure, strategy=Switch(when=Rule(threshold=THETA), momenta="reset")),
    "5 %": partial(measure, strategy=Switch(when=AtShare(share=0.05))),
    "10 %": partial(measure, strategy=Switch(when=AtShare(share=0.10))),
    "25 %": partial(measure, strategy=Switch(when=AtShare(share=0.25))),
    "50 %": partial(measure, strategy=Switch(when=AtShare(share=0.50))),
    "asynchronous first": partial(
        measure, lr=RHO * GAMMA, strategy=Switch(first=ASYNC, then=SYNC, when=AtShare(share=0.50), scale=1 / RHO)
    ),
    "momenta reset": partial(measure, strategy=Switch(when=AtShare(share=0.25), momenta="reset")),
    "momenta / 8": partial(measure, strategy=Switch(when=AtShare(share=0.25), momenta="scale")),
    "rate / 8": partial(measure, strategy=Switch(when=AtShare(share=0.25), scale=None)),
    "rate kept": partial(measure, strategy=Switch(when=AtShare(share=0.25), scale=1.0)),
    "asynchronous, no momentum": partial(measure, strategy=ASYNC, lr=PLAIN, momentum=0.0),
}
NEVER = {"rule, θ = 0": partial(measure, strategy=Switch(when=Rule(threshold=0.0)))}  # one seed shows it
SWEEP = {"asynchronous": 0.0, "5 %": 0.05, "10 %": 0.10, "25 %": 0.25, "50 %": 0.50, "all-reduce": 1.0}
# Of a run that diverged.
LOST: Figures = {
    "accuracy": 10.0, "seconds": 0.0, "synchronous": None, "missing": None, "staleness": None, "curve": [], "s": []
}  # fmt: skip


def race(study: Study) -> None:
    """How many times sooner than all-reduce a run has what that has in the end, but for half a point; 0 if never."""
    for row in study.rows:
        (rival,) = (r for r in study.rows if r["variant"] == "all-reduce" and r["seed"] == row["seed"])
        target = rival["curve"][-1][2] - 0.5
        reached = next((t for t, _, scored in row["curve"] if scored >= target), None)
        row["times sooner"] = round(_first(rival, target) / reached, 2) if reached else 0.0


def _first(row: Mapping[str, Any], target: float) -> float:
    return next(float(t) for t, _, scored in row["curve"] if scored >= target)


def sweep(study: Study) -> str:
    """By the share of synchronous training, in the shape of Sync-Switch's tables."""
    lines = [f"| synchronous | {' | '.join(f'{share:.0%}' for share in SWEEP.values())} |", "|---" * 7 + "|"]
    lines += [
        f"| {figure} | {' | '.join(f'{study[name, figure].mean:.2f}' for name in SWEEP)} |"
        for figure in ("accuracy", "seconds", "times sooner")
    ]
    return "\n".join(lines)


def judge(study: Study) -> None:
    """What Strategy-Switch and Sync-Switch found."""
    scored = {name: study[name, "accuracy"].mean for name in VARIANTS}
    lasted = {name: study[name, "seconds"].mean for name in VARIANTS}
    for name in ("rule", "rule, momenta reset"):
        behind = scored["all-reduce"] - scored[name]
        study.expect(f"Strategy-Switch ({name}) is within 0.5 points of all-reduce", behind <= 0.5, behind=behind)
        sooner = study[name, "times sooner"].mean
        words = f"Strategy-Switch ({name}) is at all-reduce's final accuracy less 0.5 points at least 1.5 times sooner"
        study.expect(words, sooner >= 1.5, times_sooner=sooner)
    best = min(scored["all-reduce"], scored["rule"])
    words = "asynchronous at equal samples is less accurate than both"
    study.expect(words, scored["asynchronous"] < best, asynchronous=scored["asynchronous"], worse_of_both=best)
    _judge_sweep(study, scored, lasted)
    first = {"all_reduce_first": scored["50 %"], "asynchronous_first": scored["asynchronous first"]}
    words = "all-reduce first is more accurate than asynchronous first, half of the samples each"
    study.expect(words, first["all_reduce_first"] > first["asynchronous_first"], **first)
    kept = {"kept": scored["rate kept"], "times_rho": scored["25 %"]}
    words = "with all-reduce's learning rate kept at the switch training fails: 5 points behind at least"
    study.expect(words, kept["kept"] <= kept["times_rho"] - 5, **kept)
    _judge_rule(study)


def _judge_sweep(study: Study, scored: Mapping[str, float], lasted: Mapping[str, float]) -> None:
    early, late = {name: scored[name] for name in ("5 %", "25 %")}, {name: lasted[name] for name in ("25 %", "50 %")}
    study.expect("a switch at 5 % costs accuracy, against one at 25 %", early["5 %"] < early["25 %"], **early)
    study.expect("a switch at 50 % costs time, against one at 25 %", late["25 %"] < late["50 %"], **late)
    quarter, whole = (scored[name] - scored["asynchronous"] for name in ("25 %", "all-reduce"))
    words = "accuracy saturates: a quarter of synchronous training has three quarters of what all of it gains"
    study.expect(words, quarter >= 0.75 * whole > 0, quarter=quarter, all=whole)
    start, whole = lasted["asynchronous"], lasted["all-reduce"] - lasted["asynchronous"]
    off = max(abs(lasted[name] - start - share * whole) / whole for name, share in SWEEP.items())
    study.expect("time is linear in the share, within a twentieth of the whole difference", off <= 0.05, off=off)


def _judge_rule(study: Study) -> None:
    shares = [row["synchronous"] for row in study.rows if row["variant"] == "rule"]
    fired = [share for share in shares if share is not None]
    words = "the rule fires in every run, after the first tenth and before half of the samples"
    study.expect(
        words,
        fired == shares and all(10 <= share <= 50 for share in fired),
        least=min(fired, default=0),
        most=max(fired, default=0),
    )
    (never,) = (row for row in study.rows if row["variant"] in NEVER)
    (same,) = (r for r in study.rows if r["variant"] == "all-reduce" and r["seed"] == never["seed"])
    said = "NEVER SWITCHED" in (never["missing"] or "") and never["accuracy"] == same["accuracy"]
    words = "with θ = 0 the run says NEVER SWITCHED, and ends with all-reduce's model"
    study.expect(words, said, least_s=min(s for _, s in never["s"]))


def main() -> int:
    """Run the study."""
    asked = options(__doc__, seeds=3)
    study = Study("Strategy-Switch on Fashion-MNIST", folder=asked.out or Path(__file__).parent)
    study.run(VARIANTS, seeds=range(asked.seeds), diverged=LOST)
    study.run(NEVER, seeds=[0])
    race(study)
    judge(study)
    print(f"\n{sweep(study)}")
    return study.conclude()


if __name__ == "__main__":
    raise SystemExit(main())
