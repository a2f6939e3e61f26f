# SPDX-License-Identifier: Apache-2.0
"""Which learning rate is best for each: a few rates, on seeds that the study does not use."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from experiments.common import Study
from experiments.strategy_switch.setting import ASYNC, LOST, SYNC, measure
from orchestra import Strategy

SEEDS = (100, 101, 102)
# Strategy, momentum, rates.
GRID: dict[str, tuple[Strategy[Any], float, tuple[float, ...]]] = {
    "all-reduce": (SYNC, 0.9, (0.03, 0.05, 0.08)),
    "asynchronous": (ASYNC, 0.9, (0.0025, 0.005, 0.01)),
    "asynchronous, no momentum": (ASYNC, 0.0, (0.025, 0.05, 0.1)),
}


def main() -> int:
    """Try them all."""
    study = Study("The best rate of each", folder=Path(__file__).parent / "tuning")
    study.run(
        {
            f"{name}, {lr:g}": partial(measure, strategy=strategy, lr=lr, momentum=momentum)
            for name, (strategy, momentum, rates) in GRID.items()
            for lr in rates
        },
        seeds=SEEDS,
        diverged=LOST,
    )
    return study.conclude()


if __name__ == "__main__":
    raise SystemExit(main())
