# SPDX-License-Identifier: Apache-2.0
"""`orchestra watch`: runs in a browser, as they go."""

from __future__ import annotations

import contextlib
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from orchestra.cli import summary
from orchestra.errors import ConfigError, EnvironmentProblem, Problem
from orchestra.words import size

_LARGE = 20_000_000  # bytes that take a while to read

Runs = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="RUN", help="Run folders, or folders of runs. Default: the newest below runs/.", show_default=False
    ),
]
Port = Annotated[int, typer.Option(metavar="N", help="Of 127.0.0.1; 0: any that is free.", min=0, max=65535)]
NoBrowser = Annotated[bool, typer.Option("--no-browser", help="Only print the address.")]


def watch(runs: Runs = None, port: Port = 0, no_browser: NoBrowser = False) -> None:
    """See runs in a browser as they go: the pages of the report, kept up to date until Ctrl-C.

    Runs may be real or rehearsed, under way, over or dead, one or a whole comparison. The page is served on this
    machine to this machine; its address holds a token that opens it once. Nothing that is done there touches a run.

    For example:

      orchestra watch
      orchestra watch runs/mine
      orchestra watch runs/comparison --no-browser --port 8123
      ssh -L 8123:127.0.0.1:8123 there        then open the address here
    """
    from orchestra.live.following import newest
    from orchestra.live.server import Server
    from orchestra.live.telling import Teller, Telling

    paths = runs or [found for found in [newest(Path("runs"))] if found is not None]
    if not paths:
        raise ConfigError([Problem("RUN", "runs", "holds no run: name a folder of one")])
    if (bulk := sum(file.stat().st_size for path in paths for file in path.rglob("events-*.jsonl"))) > _LARGE:
        summary.say(f"reading {size(bulk)} of events ...")
    telling = Telling(Teller(paths))
    try:
        server = Server(telling, port)
    except OSError as error:
        raise EnvironmentProblem(
            f"port {port} of 127.0.0.1 cannot be used: {error.strerror}. --port 0 takes any"
        ) from None
    print(server.url, flush=True)
    summary.say("open it in a browser; Ctrl-C ends it")
    if not no_browser:
        webbrowser.open(server.url)
    with contextlib.suppress(KeyboardInterrupt), server:
        server.serve_forever(poll_interval=0.2)
    telling.close()
