# SPDX-License-Identifier: Apache-2.0
"""Slow and stale gradients.

Dutta, Joshi, Ghosh, Dube, Nagpurkar. "Slow and Stale Gradients Can Win the Race: Error-Runtime Trade-offs in
Distributed SGD", AISTATS 2018. https://arxiv.org/abs/1803.01113
Chen et al. "Revisiting Distributed Synchronous SGD", 2016. https://arxiv.org/abs/1604.00981 (backup workers)

    timing      the time of an update with the first K of P = 8, against the formulas in theory.py; X exponential, and
                half of it certain
    race        K-async at one learning rate: K = 1 is asynchronous, K = 8 synchronous SGD; the objective by time

The race is of logistic regression with weight decay: strongly convex, as in the theorems. Times are in means of X.
"""

from __future__ import annotations

import math
import statistics
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiments.common import Figures, Study, options, running, train
from experiments.slow_and_stale import theory
from orchestra import (
    BackupWorkers,
    KAsync,
    KBatchAsync,
    KBatchSync,
    KSync,
    ParameterServer,
    Seconds,
    Simulated,
    Steps,
    recipes,
)
from orchestra.data.load import digits
from orchestra.engine.compute_times import Exponential, sampler
from orchestra.metrics import accuracy
from orchestra.runs.events import Logged
from orchestra.runs.facts import events_of
from orchestra.strategies.parameter_server.consistency import Consistency
from orchestra.worlds.simulated.networks import Host, Network

P, KS = 8, (1, 2, 4, 8)
FREE = Network(hosts=(Host(up=1e18, down=1e18),))  # messages take no time: the formulas have none
TIMES = {"exponential": Exponential(0.0, 1.0), "shifted": Exponential(0.5, 0.5)}
PIECES = 20  # of a run, from which its standard error is taken
N = 6  # of 8: with two backups

GAMMA, DECAY, BATCH = 0.2, 0.01, 4  # at 0.4 K = 1 overshoots and is never first
MOMENTS = (10, 20, 40, 80, 160, 320, 640, 1280)


# The time of an update.


def updates_of(seed: int, consistency: Consistency, compute_time: Exponential, pushes: int, count: int) -> list[float]:
    """When the server updated x, up to about `count` times."""
    _, most = theory.bounds(consistency, compute_time, P)
    cluster = Simulated(workers=P, compute_time=compute_time, network=FREE, numerics="off")
    strategy = ParameterServer(consistency=consistency)
    with running(
        recipes.get("digits"), strategy=strategy, cluster=cluster, seed=seed, budget=Seconds(count * most)
    ) as result:
        staleness = [e.t for e in events_of(result.run) if isinstance(e, Logged) and e.name == "staleness"]
    return [t for t in staleness[::pushes] if t <= count * most]  # later ones are of workers that are leaving


def measure_time(seed: int, *, consistency: Consistency, compute_time: Exponential, pushes: int, count: int) -> Figures:
    """Return the mean time of an update, without the beginning of the run."""
    t = updates_of(seed, consistency, compute_time, pushes, count)
    size = len(t) * 9 // 10 // PIECES
    pieces = [(b - a) / size for a, b in pairwise(t[len(t) - 1 - PIECES * size :: size])]
    least, most = theory.bounds(consistency, compute_time, P)
    figures = {"E[T] at least": least, "E[T] at most": most, "measured": statistics.fmean(pieces)}
    # Updates that follow each other may depend on each other; long pieces of the run hardly do.
    return figures | {"standard error": statistics.stdev(pieces) / math.sqrt(PIECES)}


def measure_draws(seed: int, *, compute_time: Exponential) -> Figures:
    """How far an update of K-sync with K = N is from the N-th of the draws of its step, at worst."""
    t = [0.0, *updates_of(seed, KSync(k=N), compute_time, N, 300)]
    draws = [sampler(compute_time, seed, worker) for worker in range(P)]
    apart = [abs(t[i + 1] - t[i] - sorted(draw(i) for draw in draws)[N - 1]) for i in range(len(t) - 1)]
    return {"updates": len(apart), "apart at most": max(apart)}


def timing() -> dict[str, Any]:
    """Every way to wait, with times of both kinds. Those that vary more are measured longer."""
    variants: dict[str, Any] = {}
    for kind, compute_time in TIMES.items():
        length = 1.0 if compute_time.shift == 0 else 0.2
        for make, name in ((KSync, "K-sync"), (KBatchSync, "K-batch-sync"), (KAsync, "K-async"),
                           (KBatchAsync, "K-batch-async")):  # fmt: skip
            for k in KS:
                variants[f"{name} {k}, {kind}"] = partial(
                    measure_time,
                    consistency=make(k=k),
                    compute_time=compute_time,
                    pushes=k,
                    count=int(length * 6000 / k + 900),
                )
        for b in (1, 2, 4):
            variants[f"{P - b} of {P}, {kind}"] = partial(
                measure_time, consistency=BackupWorkers(b=b), compute_time=compute_time, pushes=P - b, count=1000
            )
        variants[f"K-sync {N}, draw by draw, {kind}"] = partial(measure_draws, compute_time=compute_time)
    return variants


# The race.


def objective(model: nn.Module, data: Any) -> dict[str, float]:
    """Return the objective: the cross-entropy and the weight decay, over all of the data."""
    squares = sum(float(p.square().sum()) for p in model.parameters())
    return {"loss": accuracy(model, data)["loss"] + DECAY / 2 * squares}


def measure_race(seed: int, *, k: int) -> Figures:
    """Return the objective by time: at each moment, the mean over the preceding quarter of the time."""
    _, scores = train(
        recipes.get("digits"), model=partial(nn.Linear, 64, 10), evaluate=objective,
        evaluation_data=partial(digits, "train"), optimizer=partial(torch.optim.SGD, lr=GAMMA, weight_decay=DECAY),
        strategy=ParameterServer(consistency=KAsync(k=k)), batch=BATCH, seed=seed,
        cluster=Simulated(workers=P, compute_time=TIMES["exponential"], network=FREE),
        budget=Seconds(MOMENTS[-1]), evaluate_every=Steps(3 if k == 1 else 1),
    )  # fmt: skip
    curve = [(score.t, score.metrics["loss"]) for score in scores]
    figures = {f"at {moment}": _around(moment, curve) for moment in MOMENTS}
    return figures | {"objective by time": [[round(t, 3), round(f, 5)] for t, f in curve[::10]]}


def _around(moment: float, curve: list[tuple[float, float]]) -> float:
    """Return the mean over the quarter before a moment; if nothing was scored in it, the last score before."""
    before = [(t, f) for t, f in curve if t <= moment]
    return statistics.fmean([f for t, f in before if t >= 0.75 * moment] or [before[-1][1]])


RACE = {f"race, K = {k}": partial(measure_race, k=k) for k in KS}
VARIANTS = timing() | RACE


def judge(study: Study) -> None:
    """Check the derivations and findings of Dutta et al., and the expectation of Chen et al. on backups."""
    timed = [name for name in VARIANTS if name not in RACE and "draw" not in name]
    off = {name: _beyond(study, name) for name in timed}
    runs = len(study[timed[0], "measured"].values)
    error = {n: study[n, "standard error"].mean / math.sqrt(runs) / study[n, "measured"].mean for n in timed}
    words = "every mean time of an update is within 2 % of its formula or its bounds"
    study.expect(words, max(off.values()) <= 0.02, worst=max(off.values()))
    words = "and known well enough for that: no standard error is above 1 %"
    study.expect(words, max(error.values()) <= 0.01, largest=max(error.values()))
    apart = max(study[name, "apart at most"].mean for name in VARIANTS if "draw" in name)
    words = f"every update of K-sync with K = N takes the N-th of its {P} draws, to a millionth"
    study.expect(words, apart <= 1e-6, apart=apart)
    first, last = f"at {MOMENTS[0]}", f"at {MOMENTS[-1]}"
    alone, together = study["race, K = 1", first].mean, study["race, K = 8", first].mean
    words = "asynchronous SGD (K = 1) is first at the beginning"
    ahead = all(alone < study[name, first].mean for name in RACE if name != "race, K = 1")
    study.expect(words, ahead, asynchronous=alone, synchronous=together)
    alone, together = study["race, K = 1", last].mean, study["race, K = 8", last].mean
    words = "and ends higher than synchronous SGD (K = 8), and than all others"
    study.expect(words, all(alone > study[n, last].mean for n in RACE if n != "race, K = 1"), asynchronous=alone,
                 synchronous=together)  # fmt: skip
    leaders = {m: min(KS, key=lambda k: study[f"race, K = {k}", f"at {m}"].mean) for m in MOMENTS}
    words = "in between, a K in between leads"
    study.expect(words, any(leaders[m] in (2, 4) for m in MOMENTS[1:-1]), **{f"at {m}": k for m, k in leaders.items()})


def _beyond(study: Study, name: str) -> float:
    """How far a mean time lies outside of its bounds, as a share."""
    measured = study[name, "measured"].mean
    least, most = study[name, "E[T] at least"].mean, study[name, "E[T] at most"].mean
    return max(0.0, least / measured - 1, measured / most - 1)


def main() -> int:
    """Run the study."""
    asked = options(__doc__, seeds=3)
    study = Study("Slow and stale gradients", folder=asked.out or Path(__file__).parent)
    study.run(VARIANTS, seeds=range(asked.seeds))
    judge(study)
    return study.conclude()


if __name__ == "__main__":
    raise SystemExit(main())
