# SPDX-License-Identifier: Apache-2.0
"""`orchestra export`: runs for TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestra.cli import summary
from orchestra.cli.patience import patiently
from orchestra.errors import ConfigError, Problem
from orchestra.formatting import plural

Runs = Annotated[
    list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders of runs.", show_default=False)
]
TensorBoard = Annotated[
    Path | None, typer.Option("--tensorboard", metavar="DIR", help="Event files below this folder.")
]
Wandb = Annotated[str | None, typer.Option("--wandb", metavar="PROJECT", help="A project of Weights & Biases.")]
Mlflow = Annotated[str | None, typer.Option("--mlflow", metavar="URI", help="A tracking server, database or folder.")]


def export(runs: Runs, tensorboard: TensorBoard = None, wandb: Wandb = None, mlflow: Mlflow = None) -> None:
    """Export the figures of runs to another tool: losses, scores, times, bytes, staleness of gradients, by step.

    Runs may be real or simulated, complete or still running; each becomes a run of that tool. The tool has to be
    installed: there is an extra of that name.

    For example:

      orchestra export runs/demo --tensorboard tb
      orchestra export runs/a runs/b --wandb my-project
      orchestra export runs/demo --mlflow sqlite:///mlflow.db
    """
    if tensorboard is None and wandb is None and mlflow is None:
        raise ConfigError([Problem("export", "", "give --tensorboard DIR, --wandb PROJECT or --mlflow URI")])
    if missing := [path for path in runs if not path.is_dir()]:
        raise ConfigError([Problem("RUN", str(path), "there is no such folder") for path in missing])
    from orchestra.report import exporters

    chosen = [
        *([exporters.tensorboard(tensorboard)] if tensorboard is not None else []),
        *([exporters.wandb(wandb)] if wandb is not None else []),
        *([exporters.mlflow(mlflow)] if mlflow is not None else []),
    ]
    with patiently(f"looking through {', '.join(map(str, runs))} for runs, and exporting them ..."):
        done, refused = exporters.export(runs, chosen)
    for why in refused:
        summary.say(f"left out: {why}")
    if not done:
        raise ConfigError([Problem("RUN", str(runs[0]), "holds no run that can be read")])
    for name in done:
        print(name)
    summary.say(f"exported {plural(len(done), 'run')}")
    if tensorboard is not None:
        summary.say(f"next: tensorboard --logdir {tensorboard}")
