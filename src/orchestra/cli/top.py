# SPDX-License-Identifier: Apache-2.0
"""`orchestra top`: a running run in a terminal."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestra.cli import options as o
from orchestra.cli import summary
from orchestra.errors import ConfigError, EnvironmentProblem, Problem

if TYPE_CHECKING:
    from orchestra.live.moment import RunNow

Run = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN", help="A run folder, or a folder of runs: the newest in it. Default: the newest below runs/.",
        show_default=False,
    ),
]  # fmt: skip
Plain = Annotated[bool, o.output("--plain", help="Print a table every second instead of drawing a screen.")]
Once = Annotated[bool, o.output("--once", help="Print one table and exit.")]


def top(run: Run = None, plain: Plain = False, once: Once = False, json_: o.Json = False) -> None:
    """Watch a run in the terminal: a row for each worker with its step, loss, staleness, waiting and rate.

    The run may be real or simulated, running, complete or dead. Nothing here changes it. If standard output is not a
    terminal, --plain is implied. On the screen, ? lists the keys.

    For example:

      orchestra top
      orchestra top runs/mine
      orchestra top runs/mine --once
      orchestra top runs/mine --plain | tee log.txt
    """
    from orchestra.live.follower import Latest
    from orchestra.live.moment import moment

    folder = run if run is not None else Path("runs")
    latest = Latest(folder)

    def look() -> RunNow | None:
        now = time.time()
        found = latest.look(now)
        return None if found is None else moment(found, now)

    first = look()
    if first is None:
        what = "holds no run that can be read" if folder.is_dir() else "there is no such folder"
        raise ConfigError([Problem("RUN", str(folder), f"{what}: give a folder with a config.json")])
    if json_:
        summary.print_json(first.as_dict())
        return
    if once or plain or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        _print(first, look, once=once)
        return
    if importlib.util.find_spec("textual") is None:
        raise EnvironmentProblem(
            "the screen of `orchestra top` needs Textual: pip install 'neural-orchestra[top]'. "
            "Without it: orchestra top --plain"
        )
    from orchestra.live.screen import Top

    Top(look).run()


def _print(first: RunNow, look: Callable[[], RunNow | None], *, once: bool) -> None:
    """Print a table every second until the run is over."""
    from orchestra.live import text

    now: RunNow | None = first
    while True:
        if now is not None:
            print(text.plain(now), end="\n\n", flush=True)
        if once or now is None or now.over:
            return
        time.sleep(1.0)
        now = look()
