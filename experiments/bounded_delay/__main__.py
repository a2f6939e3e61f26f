# SPDX-License-Identifier: Apache-2.0
"""Waiting against staleness.

Li et al. "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014, §5.1.
https://www.usenix.org/conference/osdi14/technical-sessions/presentation/li_mu
(the bound τ on the delay: waiting falls from half of the time at τ = 0 to 1.7 % at 16, while more work is needed; τ = 8
reaches the goal first)

    bounded delay τ     an iteration begins once all but the last τ before it are finished
    SSP s               no worker is more than s steps ahead of the slowest; a gradient is applied when it comes

8 workers whose steps have a heavy tail, one of them three times as slow, every 8 steps another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from experiments.common import Figures, Study, options, train
from orchestra import SSP, BoundedDelay, Epochs, ParameterServer, Simulated, Steps, Target, recipes
from orchestra.engine.compute_times import ComputeTime, Pareto, uniform
from orchestra.strategies.parameter_server.consistency import Consistency

WORKERS, BATCH = 8, 8
BOUNDS = (0, 1, 2, 4, 8, 16)
GAMMA = 0.07  # staleness hurts a little: at 0.14 τ = 16 does not arrive, at 0.05 there is less to see
GOAL = Target("loss", 0.5)  # of the 360 test digits, in nats
TIMED = Steps(400)  # the same for all: who takes longer to the goal meets more of the tail


@dataclass(frozen=True)
class Roaming(ComputeTime):
    """One of the workers takes longer; every so many steps another, by lot."""

    base: ComputeTime
    workers: int
    factor: float
    steps: int

    def seconds(self, seed: int, worker: int, step: int) -> float:
        """Return the base's time, or a multiple of it for the worker that is slow now."""
        slow = int(uniform(seed, step // self.steps, self.workers) * self.workers)
        return self.base.seconds(seed, worker, step) * (self.factor if worker == slow else 1.0)

    def mean(self) -> float:
        """Return the mean of a worker that is not slowed."""
        return self.base.mean()


DELAY = Roaming(Pareto(0.05, 2.0), WORKERS, 3.0, 8)


def measure(seed: int, *, consistency: Consistency) -> Figures:
    """Where the time goes, over many steps without numbers; and how soon the goal is reached, with numbers."""
    cluster: dict[str, Any] = {"workers": WORKERS, "network": "1gbit,0.1ms", "compute_time": DELAY}
    given: dict[str, Any] = {"strategy": ParameterServer(consistency=consistency), "batch": BATCH, "seed": seed}
    recipe = recipes.get("digits")
    timed, _ = train(recipe, cluster=Simulated(**cluster, numerics="off"), budget=TIMED, **given)
    optimizer = partial(torch.optim.SGD, lr=GAMMA)
    _, scores = train(
        recipe, cluster=Simulated(**cluster), optimizer=optimizer, budget=GOAL | Epochs(90), evaluate_every=Steps(3),
        **given,
    )  # fmt: skip
    reached = next((score for score in scores if GOAL.reached(score.metrics)), None)
    if reached is None:
        raise RuntimeError(f"{consistency} did not reach {GOAL} with seed {seed}: the rate is too large for it")
    return {
        "waiting %": 100 * timed.summary.share("wait"),
        "iterations": reached.samples / (WORKERS * BATCH),
        "seconds": reached.t,
        "loss by time": [[round(s.t, 3), round(s.metrics["loss"], 4)] for s in scores[::6]],
    }


VARIANTS = {f"bounded delay {tau}": partial(measure, consistency=BoundedDelay(tau=tau)) for tau in BOUNDS}
VARIANTS |= {f"SSP {s}": partial(measure, consistency=SSP(staleness=s)) for s in BOUNDS}


def judge(study: Study) -> None:
    """Check the findings of Li et al., and compare them with SSP."""
    figures = {
        (kind, figure): [study[f"{kind} {bound}", figure].mean for bound in BOUNDS]
        for kind in ("bounded delay", "SSP")
        for figure in ("waiting %", "iterations", "seconds")
    }
    waiting, iterations, seconds = (figures["bounded delay", f] for f in ("waiting %", "iterations", "seconds"))
    words = "the share of time that is waited falls with every larger τ"
    study.expect(words, all(a > b for a, b in pairwise(waiting)), first=waiting[0], last=waiting[-1])
    words = "the iterations to the goal rise with every larger τ"
    study.expect(words, all(a < b for a, b in pairwise(iterations)), first=iterations[0], last=iterations[-1])
    best = seconds.index(min(seconds))
    words = "the goal is reached first with a τ in between, by more than 5 % before either end"
    before = min(seconds[0], seconds[-1]) / seconds[best]
    study.expect(words, 0 < best < len(BOUNDS) - 1 and before > 1.05, best=BOUNDS[best], times=before)
    apart = max(abs(a - b) for a, b in zip(waiting, figures["SSP", "waiting %"], strict=True))
    study.expect("SSP with the same bound waits as long, to a tenth of a point", apart <= 0.1, apart=apart)
    less = [a / b for a, b in zip(figures["SSP", "iterations"], iterations, strict=True)]
    words = "SSP needs no more iterations than bounded delay: what comes is applied at once"
    study.expect(words, max(less) <= 1.02, most=max(less), least=min(less))


def main() -> int:
    """Run the study."""
    asked = options(__doc__, seeds=3)
    study = Study("Waiting against staleness", folder=asked.out or Path(__file__).parent)
    study.run(VARIANTS, seeds=range(asked.seeds))
    judge(study)
    return study.conclude()


if __name__ == "__main__":
    raise SystemExit(main())
