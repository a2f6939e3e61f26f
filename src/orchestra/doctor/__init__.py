# SPDX-License-Identifier: Apache-2.0
"""Checks of what works on this machine, and how to fix what does not. Each check tries the thing itself.

A check is a small function that returns a `Finding`: fine, limited or broken, what was found, what to do. It runs in a
process of its own, so a check that hangs or crashes affects only its own finding (`orchestra.doctor.trial`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from orchestra.doctor import disk, machine, network, packages, processes
from orchestra.doctor.trial import Check, Finding, State, answer, examine
from orchestra.errors import ConfigError, Problem, nearest

_REINSTALL = f"Reinstall it: pip install --force-reinstall 'torch>={packages.NEEDED['torch']}'"

CHECKS: tuple[Check, ...] = (
    Check(
        name="python",
        about="ask the interpreter for its version",
        act=packages.python,
        remedy="Reinstall Python.",
        needed=True,
    ),
    Check(
        name="packages",
        about="import the packages that training requires",
        act=packages.packages,
        remedy="Reinstall the package.",
        needed=True,
    ),
    Check(
        name="torch",
        about="import torch and take a gradient",
        act=processes.torch_itself,
        remedy=_REINSTALL,
        needed=True,
        slow=True,
        seconds=10,
    ),
    Check(
        name="extras",
        about="import the optional packages: greenlet, cryptography",
        act=packages.extras,
        remedy="Remove the package that fails.",
    ),
    Check(
        name="processors",
        about="count the usable cores, and read the quota of a container",
        act=machine.processors,
        remedy="Look at /proc and /sys/fs/cgroup.",
    ),
    Check(
        name="memory",
        about="write 64 MB of memory, and read how much is free and the limit of a container",
        act=machine.memory,
        remedy="Free some memory, or give the container more.",
        needed=True,
    ),
    Check(
        name="limits",
        about="open 256 files and start 16 processes at once",
        act=machine.limits,
        remedy="Look at `ulimit -a`.",
    ),
    Check(
        name="shm",
        about="map anonymous shared memory, and write to /dev/shm",
        act=processes.shared_memory,
        remedy="Local runs need memfd_create: Linux, and a container that allows the call.",
        needed=True,
    ),
    Check(
        name="futex",
        about="let two processes wake each other",
        act=processes.futex,
        remedy="Local runs need futexes; simulated runs do not: orchestra sim digits",
        needed=True,
    ),
    Check(
        name="local",
        about="train with two processes",
        act=processes.local,
        remedy="Fix the other broken checks first.",
        needed=True,
        after="torch",
        slow=True,
        seconds=15,
    ),
    Check(
        name="gloo",
        about="average a tensor with Gloo between two processes on loopback",
        act=processes.gloo,
        remedy="Only for runs between machines: see `ip address show lo`, and firewalls.",
        after="torch",
        slow=True,
        seconds=10,
    ),
    Check(
        name="cuda",
        about="compute a sum on every GPU",
        act=processes.cuda,
        remedy="Look at nvidia-smi; without GPUs: export CUDA_VISIBLE_DEVICES=",
        after="torch",
        slow=True,
        seconds=10,
    ),
    Check(
        name="nccl",
        about="average a tensor with NCCL between two GPUs",
        act=processes.nccl,
        remedy="Only for one GPU per worker: `export NCCL_DEBUG=INFO` shows the cause.",
        after="torch",
        slow=True,
        seconds=12,
    ),
    Check(
        name="ports",
        about="send a byte through loopback, find 16 free ports",
        act=network.ports,
        remedy="Only for runs between machines: see `ip address show lo`, and firewalls.",
    ),
    Check(
        name="host",
        about="find the address that other machines see, and resolve the name of this machine",
        act=network.host,
        remedy="Only for runs between machines: put the name of this machine into /etc/hosts.",
        seconds=4,
    ),
    Check(
        name="namespaces",
        about="make a network namespace with a slow link, as root",
        act=network.namespaces,
        remedy="Only for the laboratory: see `ip` and `tc`.",
    ),
    Check(
        name="clock",
        about="measure its resolution and drift, and ask whether it is synchronised",
        act=machine.clock,
        remedy="See `timedatectl`.",
    ),
    Check(
        name="disk",
        about="write 16 MB to the folder for runs, the way checkpoints are written",
        act=disk.runs,
        remedy="Change to another folder, or give one with --out.",
        needed=True,
        seconds=8,
    ),
    Check(
        name="cache",
        about="write 16 MB to the folder for downloaded data sets",
        act=disk.cache,
        remedy="Only for downloaded data sets: set ORCHESTRA_DATA to another folder.",
        seconds=8,
    ),
    Check(
        name="terminal",
        about="encode the characters that pages and tables use",
        act=machine.terminal,
        remedy="export LANG=C.UTF-8",
    ),
)


def find(names: Sequence[str]) -> list[Check]:
    """Return the checks of these names, in the order of `CHECKS`; all checks if `names` is empty."""
    known = [check.name for check in CHECKS]
    problems = [Problem("check", name, nearest(name, known)) for name in names if name not in known]
    if problems:
        raise ConfigError(problems)
    return [check for check in CHECKS if not names or check.name in names]


def main() -> None:
    """Carry out the check named on the command line, in a process started for it."""
    answer(*find(sys.argv[1:]))


__all__ = ["CHECKS", "Check", "Finding", "State", "examine", "find", "main"]
