# SPDX-License-Identifier: Apache-2.0
"""A run in a lab of its own: hosts on this machine, with given rates and latencies."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from orchestra.cli.options import Options
from orchestra.errors import ClusterError, ConfigError, Interrupted, Problem

_FORM = "must be RATE,LATENCY and perhaps cpu=CORES: 100mbit,1ms or 1gbit,0.2ms,cpu=0.5"


def read(text: str) -> dict[str, Any]:
    """Parse rate, latency and cores of the hosts of a lab, such as `100mbit,1ms,cpu=0.5`."""
    rate, comma, rest = text.partition(",")
    latency, _, cpu = rest.partition(",cpu=")
    try:
        cores = {"cpu": float(cpu)} if cpu else {}
    except ValueError:
        raise ConfigError([Problem("lab", text, _FORM)]) from None
    if not comma or not rate or not latency:
        raise ConfigError([Problem("lab", text, _FORM)])
    return {"rate": rate, "latency": latency, **cores}


def problems_of(text: str, nodes: int) -> Iterator[Problem]:
    """Yield the reasons for which this lab cannot be built on this machine."""
    from orchestra.errors import EnvironmentProblem
    from orchestra.lab import Lab, ip_commands

    try:
        plan = Lab(name=_name(), hosts=nodes, **read(text)).plan
        ip_commands.refuse_without(delayed=any(host.latency for host in plan.machines))
    except ConfigError as error:
        yield from error.problems
    except EnvironmentProblem as error:
        yield Problem("lab", text, str(error))


def run(recipe: str, chosen: Options, nodes: int, lab: str, args: Sequence[str] = ()) -> None:
    """Run the same command on every host of a lab. Raise with the last line of the first host if it fails."""
    from orchestra.lab import Lab

    command = [sys.executable, "-m", "orchestra", "run", recipe, *flags(chosen), "--quiet"]
    command += ["--", *args] if args else []
    said = io.BytesIO()
    with with_token(), Lab(name=_name(), hosts=nodes, **read(lab)) as hosts:
        try:
            code = hosts.run(command, out=io.BytesIO(), err=said)
        except KeyboardInterrupt:
            raise Interrupted("stopped by SIGINT while a strategy ran in the lab.") from None
    if code:
        lines = said.getvalue().decode(errors="replace").strip().splitlines()
        raise ClusterError(lines[-1].partition(" | ")[2] if lines else f"exit status {code}")


@contextmanager
def with_token() -> Iterator[None]:
    """Provide a token for the commands inside, unless there is one."""
    from orchestra.worlds.sockets import auth

    if "ORCHESTRA_TOKEN" in os.environ or "ORCHESTRA_TOKEN_FILE" in os.environ:
        yield
        return
    os.environ["ORCHESTRA_TOKEN"] = auth.new()  # not in a file, which could be left behind
    try:
        yield
    finally:
        del os.environ["ORCHESTRA_TOKEN"]


def flags(chosen: Options, without: Sequence[str] = ("workers",)) -> Iterator[str]:
    """Yield the given options as arguments, without `--workers`: the launcher sets the number of processes."""
    for name, value in chosen.given().items():
        if name not in without:
            yield f"--{name.replace('_', '-')}"
            yield from () if value is True else (str(value),)


def _name() -> str:
    return f"run{os.getpid()}"
