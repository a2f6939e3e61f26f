# SPDX-License-Identifier: Apache-2.0
"""Labs of the tests have names of their own, are gone after each, and need a machine on which they can be."""

from __future__ import annotations

import functools
import io
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestra.errors import EnvironmentProblem
from orchestra.lab import Lab, build, ip_commands
from orchestra.lab.cpu_shares import find_cgroups
from orchestra.lab.plan import owner_of, switch_of
from orchestra.launchers import marked_processes

PYTHON = [sys.executable, "-I", "-S"]  # starts in a fifth of the time
NAME = f"test{os.getpid()}"  # several runs of these tests may go on at once


@functools.cache
def impossible() -> str | None:
    """Why there can be no lab here, if so."""
    try:
        ip_commands.refuse_without(delayed=True)
        with Lab(hosts=1, rate="1mbit", latency="1ms", cpu=0.5, name=NAME):
            return None
    except EnvironmentProblem as error:
        return str(error)


@pytest.fixture
def name() -> Iterator[str]:
    """The name of a lab that may be built."""
    if why := impossible():
        pytest.skip(f"no lab can be built here: {why}")
    yield NAME
    for lab in (NAME, f"{NAME}-b"):
        build.down(lab)
        assert not left_of(lab)


def left_of(lab: str) -> list[str]:
    """All that there is of a lab."""
    shares = find_cgroups()
    left = [space for space in ip_commands.namespaces() if owner_of(space) == lab]
    left += shares.of(lab) if shares else []
    left += [path.name for path in Path("/etc/netns").glob("*") if owner_of(path.name) == lab]
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        words = marked_processes.arguments_of(int(pid))
        if switch_of(lab) in words or f"ORCHESTRA_LAB={lab}" in marked_processes.environment_of(int(pid)):
            left.append(" ".join([pid, *words]))
    return left


def said(lab: Lab, program: str, *, host: int | None = None) -> list[str]:
    """The lines that hosts print when each runs a Python program, without the names of the hosts."""
    out = io.BytesIO()
    assert lab.run([*PYTHON, "-c", program], host=host, out=out) == 0
    return [line.partition(" | ")[2] for line in out.getvalue().decode().splitlines()]


def soon(true: Callable[[], object], seconds: float = 20.0) -> bool:
    """Whether something comes true in time."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def routes() -> str:
    """What the machine's own network has."""
    shown = [subprocess.run(["ip", *what], capture_output=True, text=True, check=True).stdout for what in SHOWN]
    return "".join(shown)


SHOWN = (["-br", "link"], ["-br", "address"], ["route", "show", "table", "all"])
