# SPDX-License-Identifier: Apache-2.0
"""`orchestra watch`: running runs in a browser."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestra.cli import summary
from orchestra.cli.train_arguments import read_target
from orchestra.errors import ConfigError, EnvironmentProblem, Problem
from orchestra.formatting import size

if TYPE_CHECKING:
    from orchestra.live.server import Server

_LARGE = 20_000_000  # bytes that take a while to read

Runs = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="RUN", help="Run folders, or folders of runs. Default: the newest below runs/.", show_default=False
    ),
]
Goal = Annotated[
    str | None,
    typer.Option(metavar="SCORE=VALUE", help="The test score to measure times to. Default: that of the comparison."),
]
Port = Annotated[int, typer.Option(metavar="N", help="Port of 127.0.0.1; 0: any free one.", min=0, max=65535)]
NoBrowser = Annotated[bool, typer.Option("--no-browser", help="Only print the address.")]


def watch(runs: Runs = None, target: Goal = None, port: Port = 0, no_browser: NoBrowser = False) -> None:
    """Watch runs in a browser: the pages of the report, kept up to date until Ctrl-C.

    Runs may be real or simulated, running, complete or dead, one or a whole comparison. The page is served to this
    machine only; its address has a token that opens it once. Nothing on the page changes a run.

    For example:

      orchestra watch
      orchestra watch runs/mine
      orchestra watch runs/comparison --no-browser --port 8123
      orchestra watch runs/a runs/b --target accuracy=0.95
      ssh -L 8123:127.0.0.1:8123 there        then open the address here
    """
    from orchestra.live.follower import newest
    from orchestra.live.page_feed import PageFeed, PageWriter
    from orchestra.live.server import Server

    goal = read_target(target) if target is not None else None
    paths = runs or [found for found in [newest(Path("runs"))] if found is not None]
    if not paths:
        raise ConfigError([Problem("RUN", "runs", "holds no run: name a folder of one")])
    if (bulk := sum(file.stat().st_size for path in paths for file in path.rglob("events-*.jsonl"))) > _LARGE:
        summary.say(f"reading {size(bulk)} of events ...")
    telling = PageFeed(PageWriter(paths, goal))
    try:
        server = Server(telling, port)
    except OSError as error:
        raise EnvironmentProblem(
            f"port {port} of 127.0.0.1 cannot be used: {error.strerror}. --port 0 takes any"
        ) from None
    print(server.url, flush=True)
    summary.say("open it in a browser; Ctrl-C ends it")
    with server:
        threading.Thread(target=server.serve_forever, args=(0.2,), daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt):
            if not no_browser:
                with contextlib.suppress(OSError):  # without a writable home, the address is printed anyway
                    _open(server)
            threading.Event().wait()
        server.shutdown()
    telling.close()


def _open(server: Server) -> None:
    """Open a browser through a file of the user: other users could read the token in a command line.

    The file is in the home folder: browsers in a sandbox see neither /tmp nor hidden folders.
    """
    with tempfile.NamedTemporaryFile("w", dir=Path.home(), prefix="orchestra-", suffix=".html") as file:
        file.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={server.url}">\n')
        file.flush()
        # A browser of the terminal blocks the process that opened it.
        threading.Thread(target=webbrowser.open, args=(Path(file.name).as_uri(),), daemon=True).start()
        while server.token is not None:
            time.sleep(0.1)
