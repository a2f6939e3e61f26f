# SPDX-License-Identifier: Apache-2.0
"""What works on this machine, what does not, and how to mend it. Everything is tried, not looked up.

Each check is a small function that gives a `Finding`: fine, limited or broken, what was found, what to do. It runs in a
process of its own, so one that hangs or crashes spoils nothing but its own line (`orchestra.doctor.trial`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from orchestra.doctor import disk, machine, network, packages, processes
from orchestra.doctor.trial import Check, Finding, State, answer, examine
from orchestra.errors import ConfigError, Problem, nearest

_REINSTALL = f"Install it anew: pip install --force-reinstall 'torch>={packages.NEEDED['torch']}'"

CHECKS: tuple[Check, ...] = (
    Check(
        name="python",
        about="the interpreter and its version",
        act=packages.python,
        mend="Install Python anew.",
        needed=True,
    ),
    Check(
        name="packages",
        about="import what the package cannot do without",
        act=packages.packages,
        mend="Install the package anew.",
        needed=True,
    ),
    Check(
        name="torch",
        about="import torch and take a gradient",
        act=processes.torch_itself,
        mend=_REINSTALL,
        needed=True,
        slow=True,
        seconds=10,
    ),
    Check(
        name="extras",
        about="import what only some uses need: greenlet, ZeroMQ, ...",
        act=packages.extras,
        mend="Remove the one that fails.",
    ),
    Check(
        name="processors",
        about="usable cores, and the quota of a container",
        act=machine.processors,
        mend="Look at /proc and /sys/fs/cgroup.",
    ),
    Check(
        name="memory",
        about="free memory, and the limit of a container; 64 MB are written",
        act=machine.memory,
        mend="Free some memory, or give the container more.",
        needed=True,
    ),
    Check(
        name="limits",
        about="open 256 files and start 16 processes at once",
        act=machine.limits,
        mend="Look at `ulimit -a`.",
    ),
    Check(
        name="shm",
        about="map shared memory without a name, and write to /dev/shm",
        act=processes.shared_memory,
        mend="Local runs need memfd_create: Linux itself, and a container that does not forbid it.",
        needed=True,
    ),
    Check(
        name="futex",
        about="two processes wake each other",
        act=processes.futex,
        mend="Local runs need futexes; rehearsals do not: orchestra sim digits",
        needed=True,
    ),
    Check(
        name="local",
        about="train with two processes",
        act=processes.local,
        mend="Mend what else is broken first.",
        needed=True,
        after="torch",
        slow=True,
        seconds=15,
    ),
    Check(
        name="gloo",
        about="a mean by Gloo between two processes on loopback",
        act=processes.gloo,
        mend="Only for runs between machines: see `ip address show lo`, and firewalls.",
        after="torch",
        slow=True,
        seconds=10,
    ),
    Check(
        name="cuda",
        about="compute something on every GPU",
        act=processes.cuda,
        mend="Look at nvidia-smi; without GPUs: export CUDA_VISIBLE_DEVICES=",
        after="torch",
        slow=True,
        seconds=10,
    ),
    Check(
        name="nccl",
        about="a mean by NCCL between two GPUs",
        act=processes.nccl,
        mend="Only for one GPU per worker: export NCCL_DEBUG=INFO shows why.",
        after="torch",
        slow=True,
        seconds=12,
    ),
    Check(
        name="ports",
        about="speak through loopback, find 16 free ports",
        act=network.ports,
        mend="Only for runs between machines: see `ip address show lo`, and firewalls.",
    ),
    Check(
        name="host",
        about="the address that others see, and the name of this machine",
        act=network.host,
        mend="Only for runs between machines: put the name of this machine into /etc/hosts.",
        seconds=4,
    ),
    Check(
        name="namespaces",
        about="a network namespace with a slow link, as root",
        act=network.namespaces,
        mend="Only for the laboratory: see `ip` and `tc`.",
    ),
    Check(
        name="clock",
        about="its steps, whether it drifts, whether somebody sets it",
        act=machine.clock,
        mend="See `timedatectl`.",
    ),
    Check(
        name="disk",
        about="write 16 MB where runs are kept, as checkpoints are written",
        act=disk.runs,
        mend="Go to another folder, or give one with --out.",
        needed=True,
        seconds=8,
    ),
    Check(
        name="cache",
        about="the same where fetched data sets are kept",
        act=disk.cache,
        mend="Only for data sets that are fetched: set ORCHESTRA_DATA to another folder.",
        seconds=8,
    ),
    Check(
        name="terminal",
        about="letters that pages and tables use",
        act=machine.terminal,
        mend="export LANG=C.UTF-8",
    ),
)


def find(names: Sequence[str]) -> list[Check]:
    """The checks of these names, in the order of the list; all without any."""
    known = [check.name for check in CHECKS]
    problems = [Problem("check", name, nearest(name, known)) for name in names if name not in known]
    if problems:
        raise ConfigError(problems)
    return [check for check in CHECKS if not names or check.name in names]


def main() -> None:
    """Carry out the check named on the command line, in a process started for it."""
    answer(*find(sys.argv[1:]))


__all__ = ["CHECKS", "Check", "Finding", "State", "examine", "find", "main"]
