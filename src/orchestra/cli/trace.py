# SPDX-License-Identifier: Apache-2.0
"""`orchestra trace`: the timeline of a run, for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestra.errors import ConfigError, Problem

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, real or simulated.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="FILE", help="Default: trace.json.gz in the run folder. Without .gz: plain."),
]


def trace(run: Run, out: Out = None) -> None:
    """Export a run as a trace that Perfetto and chrome://tracing open: lanes, slices, arrows.

    It has a lane for each worker and server with what it computed, sent, received and waited for, and an arrow for each
    message. That needs a run with --trace. Of any other run it shows how the time of each step was spent.

    For example:

      orchestra sim digits -s ps -n 4 --steps 20 --trace --out runs/traced
      orchestra trace runs/traced     then open trace.json.gz on ui.perfetto.dev
    """
    from orchestra.report import perfetto  # unused by --help
    from orchestra.runs.reading import Unreadable

    path = out or run / "trace.json.gz"
    if not path.parent.is_dir():
        raise ConfigError([Problem("out", str(path), f"there is no folder {path.parent}")])
    traced = any(run.glob("trace-*.jsonl"))
    try:
        count = perfetto.write(run, path)
    except Unreadable as error:
        raise ConfigError([Problem("RUN", str(run), f"is not a run that can be read: {error}")]) from None
    except OSError as error:
        raise ConfigError([Problem("out", str(path), f"cannot be written: {error.strerror}")]) from None
    what = "every op and every message" if traced else "steps only: run with --trace for every message"
    typer.echo(f"{path}: {count:,} entries, {what}")
    typer.echo("open it on https://ui.perfetto.dev or in chrome://tracing", err=True)
