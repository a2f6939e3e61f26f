# SPDX-License-Identifier: Apache-2.0
"""Which momentum and rate after the switch: a few of them, on seeds that the judgement does not use.

    as before   momentum 0.9 and γ/8, as the papers have it
    0.9, half   momentum 0.9 and γ/16
    0, third    no momentum, γ/8 · √10
    0, half     no momentum, γ/8 · 5
    0, whole    no momentum, γ/8 · 10, so that γ/(1 − μ) stays

The last one became the default; the first was it before.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from experiments.common import Study
from experiments.strategy_switch.__main__ import seed_by_seed
from experiments.strategy_switch.setting import LOST, SYNC, THETA, WORKERS, Rule, Switch, measure

SEEDS = range(100, 110)
After = partial(Switch, when=Rule(threshold=THETA))
VARIANTS = {
    "all-reduce": partial(measure, strategy=SYNC),
    "as before": partial(measure, strategy=After(momentum=0.9)),
    "0.9, half": partial(measure, strategy=After(momentum=0.9, scale=0.5 / WORKERS)),
    "0, third": partial(measure, strategy=After(momentum=0.0, scale=10**0.5 / WORKERS)),
    "0, half": partial(measure, strategy=After(momentum=0.0, scale=5 / WORKERS)),
    "0, whole": partial(measure, strategy=After()),
}


def main() -> int:
    """Try them all."""
    study = Study("Momentum and rate after the switch", folder=Path(__file__).parent / "choosing")
    study.run(VARIANTS, seeds=SEEDS, diverged=LOST)
    print("\n\n".join(seed_by_seed(study, variant) for variant in VARIANTS if variant != "all-reduce"))
    return study.conclude()


if __name__ == "__main__":
    raise SystemExit(main())
