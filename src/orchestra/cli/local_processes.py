# SPDX-License-Identifier: Apache-2.0
"""`orchestra run` of a script with its own training loop: the processes that torchrun would start, on this machine.

    orchestra run loop.py -s ps -n 2     →     3 times   RANK=… WORLD_SIZE=3 …  orchestra run loop.py -s ps

Each of them runs the script, whose `orchestra.prepare(...)` takes the given strategy in place of its own.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from orchestra.cli.in_lab import flags
from orchestra.cli.on_ray import nodes_of
from orchestra.cli.options import Options
from orchestra.cli.sources import Source
from orchestra.engine.environment import WORKERS, half_set
from orchestra.errors import Problem

if TYPE_CHECKING:
    from orchestra.launchers.process_group import News, ProcessLink

_HOST = "localhost"
_TAKES = ("strategy", "workers", "servers", "seed", "lr_factor", "out", "token_file", "trusted", "grace")


def problems_of(chosen: Options, *, as_json: bool) -> Iterator[Problem]:
    """Yield the options that cannot be given for a script with its own loop."""
    known = ", ".join(f"--{name.replace('_', '-')}" for name in _TAKES[:6])
    message = f"is decided by the script, which has its own loop: change it there; options here are {known}"
    for name, value in chosen.given().items():
        if name not in _TAKES:
            yield Problem(name.replace("_", "-"), value, message)
    if as_json:
        yield Problem("json", True, "a script with its own loop decides what it prints: leave it out")
    yield from half_set()
    if chosen.workers is not None and chosen.workers < 1:
        yield Problem("workers", chosen.workers, "must be at least 1")


def start(source: Source, chosen: Options, args: Sequence[str], *, quiet: bool = False) -> int:
    """Start the processes, pass on what they print, wait for their end, and return the exit code."""
    return _play(source, chosen, args, silent=False, quiet=quiet)[0]


def start_silently(source: Source, chosen: Options, args: Sequence[str]) -> tuple[int, str]:
    """Do the same without passing on what they print; return the exit code and the last line of what failed."""
    return _play(source, chosen, args, silent=True, quiet=True)


def _play(source: Source, chosen: Options, args: Sequence[str], *, silent: bool, quiet: bool) -> tuple[int, str]:
    from orchestra.launchers.process_group import News, ProcessGroup

    nodes, news = nodes_of(chosen), News()
    command = ["run", source.name, *flags(chosen), *(["--quiet"] if quiet else []), *(["--", *args] if args else [])]
    workers = {} if chosen.workers is None else {WORKERS: str(chosen.workers)}
    group = ProcessGroup([_HOST] * nodes, news, asking="stop", silent=silent)
    return group.run(_links(command, nodes, workers, news)), group.last_error


def _links(command: Sequence[str], nodes: int, more: dict[str, str], news: News) -> dict[int, ProcessLink]:
    """Return the link to one process for each node."""
    from orchestra.launchers.hosts import argv, place
    from orchestra.launchers.process_group import GRACE, SILENCE, AgentProcess
    from orchestra.worlds.sockets import auth

    mark, port = secrets.token_hex(8), _free_port()
    threads = max(1, len(os.sched_getaffinity(0)) // nodes)  # all cores for each would oversubscribe them
    ours = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)), "ORCHESTRA_TOKEN": auth.new()}
    links: dict[int, ProcessLink] = {}
    for rank in range(nodes):
        orders = {
            "do": "run",
            "argv": argv(command, sys.executable),
            "cwd": os.getcwd(),
            "environment": place(rank, nodes, rank, nodes, "127.0.0.1", port) | ours | more,
            "mark": f"{mark}:{rank}.",
            "silence": SILENCE,
            "grace": GRACE,
        }
        far_end = [sys.executable, "-P", "-m", "orchestra.launchers.agent"]
        links[rank] = AgentProcess(rank, far_end, json.dumps(orders), news)
    return links


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as door:
        return int(door.getsockname()[1])
