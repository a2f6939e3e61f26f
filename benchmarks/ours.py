# SPDX-License-Identifier: Apache-2.0
"""A real `orchestra.train` that takes turns with the peers (see `wrappers.Paced`); it runs until it is killed.

python -m benchmarks.ours WORKLOAD STRATEGY WORKERS STEPS GATE [--without-gradient] [--plain-sgd] [--unmetered]
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import orchestra
from benchmarks.workloads import WORKLOADS, Workload, loss, sgd
from benchmarks.wrappers import Paced, WithoutGradient
from orchestra.core.strategy import Strategy
from orchestra.engine import expression


def unmetered(workload: Workload) -> nn.Module:
    """The workload's module, made in a process where from now on nothing is counted and nothing is written."""
    import orchestra.engine.node_loop
    from orchestra.engine.middleware import Metered
    from orchestra.runs.events import EventLog

    Metered.start = lambda self, op: self.inner.start(op)  # type: ignore[method-assign]
    EventLog.write = lambda self, event: None  # type: ignore[method-assign]
    orchestra.engine.node_loop.record = orchestra.engine.node_loop.report = lambda runtime: None
    return workload.module()


def main() -> None:
    """Train."""
    name, text, workers, steps, gate, *options = sys.argv[1:]
    torch.set_num_threads(1)
    workload = WORKLOADS[name]
    strategy: Strategy[Any] = expression.parse(text)
    if "--without-gradient" in options:
        strategy = WithoutGradient(base=strategy)
    orchestra.train(
        model=functools.partial(unmetered, workload) if "--unmetered" in options else workload.module,
        data=workload.data,
        loss=loss,
        optimizer=functools.partial(torch.optim.SGD, lr=1e-3) if "--plain-sgd" in options else sgd,
        strategy=Paced(base=strategy, gate=gate, every=int(steps)),
        cluster=orchestra.Local(workers=int(workers), threads=1, patience=3600.0),
        batch=workload.batch,
        budget=orchestra.Steps(2**31 - 1),
        out=Path(gate) / "run",
    )


if __name__ == "__main__":
    # What travels to the workers is named by its module, which must not be __main__.
    from benchmarks import ours

    ours.main()
