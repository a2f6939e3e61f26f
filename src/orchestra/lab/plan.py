# SPDX-License-Identifier: Apache-2.0
"""The plan of a lab, checked before anything is built, and the names of its parts."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestra.errors import ConfigError, Problem, nearest
from orchestra.worlds.simulated.networks import read_rate, read_time

DEFAULT = "orchestra"  # the name of a lab by default; every name on the machine begins with it
MOST_HOSTS = 250  # in a /24 network
_SLOWEST, _FASTEST = 8e3, 1e12  # bits per second
_LONGEST = 10.0  # seconds
_LEAST_CPU = 0.01  # cores


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One host: its link to the switch and its share of the processor."""

    up: float | None = None  # bits per second that it sends; None: as fast as the kernel
    down: float | None = None  # bits per second that it receives
    latency: float = 0.0  # seconds one way to a host with the same latency; between two others, the mean of both
    cpu: float | None = None  # cores; None: no limit


@dataclass(frozen=True, kw_only=True)
class LabPlan:
    """A lab that can be built."""

    name: str
    machines: tuple[Machine, ...]

    @property
    def delayed(self) -> bool:
        """Whether a delay line is needed."""
        return any(machine.latency for machine in self.machines)


# Names. Every one begins with "orchestra", so that the parts of a lab are found without a record of them.


def switch_of(lab: str) -> str:
    """Return the namespace of a lab's switch."""
    return f"{_prefix(lab)}-switch"


def host_of(lab: str, k: int) -> str:
    """Return the namespace of a lab's k-th host, which is also its cgroup; hosts count from 1.

    >>> host_of("orchestra", 1), host_of("slow", 2)
    ('orchestra-host-1', 'orchestra-slow-host-2')
    """
    return f"{_prefix(lab)}-host-{k}"


def _prefix(lab: str) -> str:
    return DEFAULT if lab == DEFAULT else f"{DEFAULT}-{lab}"


def owner_of(name: str) -> str | None:
    """Return the lab that a namespace or cgroup of this name belongs to, if any.

    >>> owner_of("orchestra-host-1"), owner_of("orchestra-slow-switch"), owner_of("router-host-1")
    ('orchestra', 'slow', None)
    """
    found = re.fullmatch(rf"{DEFAULT}(?:-(.+))?-(?:switch|host-\d+)", name)
    return None if found is None else found[1] or DEFAULT


def subnet_of(lab: str, taken: Collection[str]) -> str:
    """Return the first three bytes of a lab's addresses: always the same for a name, unless another lab has them.

    >>> subnet_of("a", []), subnet_of("a", ["10.77.67"])
    ('10.77.67', '10.77.68')
    """
    first = zlib.crc32(lab.encode())
    return next(net for i in range(256) if (net := f"10.77.{(first + i) % 256}") not in taken)


def host_environment(lab: str, rank: int, addresses: Sequence[str]) -> dict[str, str]:
    """Return the variables that tell a host its own address and rank, and the addresses of the others."""
    return {
        "ORCHESTRA_LAB": lab,
        "ORCHESTRA_LAB_RANK": str(rank),
        "ORCHESTRA_LAB_SIZE": str(len(addresses)),
        "ORCHESTRA_LAB_ADDRESS": addresses[rank],
        "ORCHESTRA_LAB_FIRST": addresses[0],
        "ORCHESTRA_LAB_ADDRESSES": ",".join(addresses),
        # For torch.distributed, with one process on each host. torchrun replaces RANK and WORLD_SIZE by its own.
        "RANK": str(rank),
        "WORLD_SIZE": str(len(addresses)),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": addresses[0],
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "eth0",
    }


# Reading a plan.


def make_plan(
    *,
    name: str = DEFAULT,
    hosts: int,
    rate: str | float | None = None,
    latency: str | float = 0.0,
    cpu: float | None = None,
    exceptions: Mapping[int, Mapping[str, str | float]] | None = None,
) -> LabPlan:
    """Return the plan of a lab; raise with all problems at once."""
    problems: list[Problem] = []
    if not re.fullmatch(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?", name):
        problems.append(Problem("name", name, "must be at most 32 small letters, digits and inner hyphens"))
    if isinstance(hosts, bool) or not isinstance(hosts, int) or not 1 <= hosts <= MOST_HOSTS:
        problems.append(Problem("hosts", hosts, f"must be a whole number from 1 to {MOST_HOSTS}"))
        hosts = MOST_HOSTS  # so that exceptions are still checked
    given = {"rate": rate, "latency": latency, "cpu": cpu}
    every = _change(Machine(), given, "", problems)
    machines = [every] * hosts
    for k, changes in (exceptions or {}).items():
        if not 1 <= k <= hosts:
            problems.append(Problem("host", k, f"there is no such host; they count from 1 to {hosts}"))
        else:
            machines[k - 1] = _change(machines[k - 1], changes, f"host {k}: ", problems)
    if problems:
        raise ConfigError(problems)
    return LabPlan(name=name, machines=tuple(machines))


def read_exception(text: str) -> tuple[int, dict[str, str]]:
    """Read the settings of one host, as the command line takes them.

    >>> read_exception("3:rate=10mbit,latency=5ms")
    (3, {'rate': '10mbit', 'latency': '5ms'})
    """
    number, colon, rest = text.partition(":")
    changes = dict(word.split("=", 1) for word in rest.split(",") if "=" in word)
    if not number.isdecimal() or not colon or len(changes) != rest.count(",") + 1:
        raise ConfigError([Problem("host", text, "write it like 3:rate=10mbit,latency=5ms,cpu=0.25")])
    return int(number), changes


def _change(machine: Machine, changes: Mapping[str, Any], where: str, problems: list[Problem]) -> Machine:
    for key, value in changes.items():
        if value is None:
            continue
        if key not in _READERS:
            problems.append(Problem(where + key, value, f"is not known; {nearest(key, _READERS)}"))
            continue
        try:
            number = _READERS[key](value)
        except ValueError as error:
            problems.append(Problem(where + key, value, str(error)))
        else:
            machine = replace(machine, **dict.fromkeys(("up", "down") if key == "rate" else (key,), number))
    return machine


def _read(value: Any, words: Callable[[object], float], least: float, most: float, range_: str) -> float:
    try:
        number = words(value) if isinstance(value, str) else float(value)
    except TypeError:
        raise ValueError(f"must be {range_}") from None
    if not (math.isfinite(number) and least <= number <= most):
        raise ValueError(f"must be {range_}")
    return number


def _rate(value: Any) -> float:
    return _read(value, read_rate, _SLOWEST, _FASTEST, "a rate from 8kbit to 1tbit, such as 100mbit")


def _latency(value: Any) -> float:
    return _read(value, read_time, 0.0, _LONGEST, "a time from 0s to 10s, such as 1ms")


def _cpu(value: Any) -> float:
    return _read(value, _number, _LEAST_CPU, math.inf, f"a number of cores from {_LEAST_CPU}, such as 0.5")


def _number(text: object) -> float:
    try:
        return float(str(text))
    except ValueError:
        raise ValueError("must be a number of cores, such as 0.5") from None


_READERS: dict[str, Callable[[Any], float]] = {
    "rate": _rate,
    "up": _rate,
    "down": _rate,
    "latency": _latency,
    "cpu": _cpu,
}


# Writing values as they are read.


def rate_words(bits: float) -> str:
    """Format a rate as it is given.

    >>> rate_words(1e8), rate_words(2.5e9), rate_words(8e3)
    ('100mbit', '2.5gbit', '8kbit')
    """
    for unit, factor in (("tbit", 1e12), ("gbit", 1e9), ("mbit", 1e6)):
        if bits >= factor:
            return f"{bits / factor:.4g}{unit}"
    return f"{bits / 1e3:.4g}kbit"


def time_words(seconds: float) -> str:
    """Format a latency as it is given.

    >>> time_words(0.001), time_words(5e-05), time_words(1.5)
    ('1ms', '50us', '1.5s')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.4g}{unit}"
    return f"{seconds * 1e6:.4g}us"
