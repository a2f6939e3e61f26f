# SPDX-License-Identifier: Apache-2.0
"""The state of a lab, read from the kernel: addresses, buckets, quotas, and the delay line's arguments."""

from __future__ import annotations

from dataclasses import dataclass

from orchestra.errors import ConfigError, EnvironmentProblem, Problem
from orchestra.lab.build import DELAY_LINE, address_in, names
from orchestra.lab.cpu_shares import find_cgroups
from orchestra.lab.ip_commands import IpCommands, namespaces, processes_in, refuse_without
from orchestra.lab.plan import Machine, host_of, owner_of, switch_of
from orchestra.launchers.marked_processes import arguments_of


@dataclass(frozen=True, kw_only=True)
class LabState:
    """A lab that exists."""

    name: str
    addresses: tuple[str | None, ...]  # one per host; None if the host was not built completely
    machines: tuple[Machine, ...]
    broken: bool  # its hosts cannot reach each other: it was half built, or its delay line died
    processes: int  # that run in its hosts

    @property
    def size(self) -> int:
        """How many hosts."""
        return len(self.machines)

    def check(self) -> None:
        """Raise if the lab does not work."""
        if self.broken:
            raise EnvironmentProblem(
                f"the lab {self.name} is broken: it was half built, or its delay line died. "
                f"Take it down (orchestra lab down --name {self.name}), and build it again."
            )


def look(name: str) -> LabState:
    """Return the state of a lab, which must be up."""
    refuse_without()
    hosts = sum(owner_of(space) == name and not space.endswith("-switch") for space in namespaces())
    there = names()
    if name not in there:
        known = f"up: {', '.join(there)}" if there else "none is"
        raise ConfigError([Problem("name", name, f"no such lab is up ({known}); see orchestra lab up --help")])
    k, shares = IpCommands(), find_cgroups()
    spaces = [host_of(name, i + 1) for i in range(hosts)]
    ports = {entry["dev"]: entry for entry in k.ask("tc", "qdisc", "show", inside=switch_of(name))}
    latencies = _latencies(name)
    machines, addresses = [], []
    for number, space in enumerate(spaces, start=1):
        sends = {entry["dev"]: entry for entry in k.ask("tc", "qdisc", "show", inside=space)}
        machines.append(
            Machine(
                up=_rate(sends.get("eth0")),
                down=_rate(ports.get(f"p{number}")),
                latency=latencies.get(f"t{number}", 0.0),
                cpu=shares.share(space) if shares else None,
            )
        )
        addresses.append(address_in(k, space))
    return LabState(
        name=name,
        addresses=tuple(addresses),
        machines=tuple(machines),
        broken=not _is_complete(k, name, addresses, latencies),
        processes=len(processes_in(spaces)),
    )


def _latencies(name: str) -> dict[str, float]:
    """Return the latency of each TAP, from the command line of the delay line."""
    for pid in processes_in([switch_of(name)]):
        words = arguments_of(pid)
        if any(word.endswith(DELAY_LINE.name) for word in words):
            ports = [word.split("=") for word in words if word.startswith("t") and "=" in word]
            return {tap: 2 * float(seconds) for tap, seconds in ports}
    return {}


def _is_complete(k: IpCommands, name: str, addresses: list[str | None], latencies: dict[str, float]) -> bool:
    """Whether every host has an address and is connected to the others: through one bridge, or through its TAP."""
    masters = {e["ifname"]: e.get("master") for e in k.ask("ip", "link", "show", inside=switch_of(name))}
    every = range(1, len(addresses) + 1)
    if latencies:
        joined = all(masters.get(f"t{i}") == f"br{i}" for i in every)
    else:
        joined = all(masters.get(f"p{i}") == "br0" for i in every)
    return bool(addresses) and None not in addresses and joined


def _rate(bucket: dict[str, object] | None) -> float | None:
    """Return a bucket's rate in bits per second; tc reports bytes."""
    if bucket is None or bucket.get("kind") != "tbf":
        return None
    options = bucket["options"]
    assert isinstance(options, dict)
    return 8.0 * float(options["rate"])
