# SPDX-License-Identifier: Apache-2.0
"""Building a lab, and taking it down.

    without latency                                   with latency, for every host

    host-1  eth0 ── p1 ┐                              host-1  eth0 ── p1 ─ br1 ─ t1 ┐
    host-2  eth0 ── p2 ┼ br0                          host-2  eth0 ── p2 ─ br2 ─ t2 ┼ delay line
    host-3  eth0 ── p3 ┘                              host-3  eth0 ── p3 ─ br3 ─ t3 ┘
    each in its namespace ┊ all in the switch's       each in its namespace ┊ all in the switch's

A host's link is two token buckets: on eth0 for what it sends, on its port p for what it receives, after the delay, as
at the end of a cable. All devices are in namespaces of the lab: the machine's own network gets no device, no address
and no route.

There is no record of a lab: its parts are found by their names, so that a lab that was half built, or half taken down,
is taken down like any other.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from orchestra.errors import ConfigError, EnvironmentProblem, Problem
from orchestra.lab.cpu_shares import Cgroups, find_cgroups
from orchestra.lab.ip_commands import (
    NAMESPACES,
    IpCommands,
    building,
    identity,
    namespaces,
    processes_in,
    refuse_without,
)
from orchestra.lab.plan import LabPlan, Machine, host_of, owner_of, subnet_of, switch_of
from orchestra.launchers.marked_processes import kill_all

DELAY_LINE = Path(__file__).resolve().with_name("delay_line.py")
_NAMES = Path("/etc/netns")  # where `ip netns exec` looks for a namespace's own files of /etc
_BURST = 4096  # bytes: with 64 kB, messages of 64 kB took a ninth of their time at 100 Mbit/s
_SLOW = 1e8  # bits per second up to which that is enough
_BEYOND = 0.8e-3  # seconds' worth of the rate beyond that: 90 kB at 1 Gbit/s, so that segments of 64 kB pass whole
_QUEUE = 0.02  # seconds that a full queue takes to empty, beside the round trip that TCP needs to fill a link
_FRAMES = 16  # the least room in a queue, in frames of full size
_PATIENCE = 10.0  # seconds: for a delay line to begin, for killed processes to be gone

_IN_A_CONTAINER = "Inside a container this needs --privileged; or use orchestra lab compose outside of it."
_VETH = "The kernel must have veth and bridge devices (CONFIG_VETH, CONFIG_BRIDGE; try modprobe veth bridge)."
_TUN = "Latencies need TAP devices (CONFIG_TUN; try modprobe tun)."
_TBF = "The kernel must have token buckets (CONFIG_NET_SCH_TBF; try modprobe sch_tbf)."


def up(plan: LabPlan, *, instead: bool = True) -> None:
    """Build a lab. `instead`: first take down one of that name, with all that runs in it; otherwise, refuse."""
    refuse_without(delayed=plan.delayed)
    shares = find_cgroups()
    if shares is None and any(machine.cpu for machine in plan.machines):
        raise EnvironmentProblem("this machine has no cgroups to limit the processor with. Leave --cpu out.")
    with building() as k:
        if not instead and plan.name in names():
            remedy = f"take it down first (orchestra lab down --name {plan.name}), or give another --name"
            raise ConfigError([Problem("name", plan.name, f"a lab of this name is up, or half built: {remedy}")])
        _take_down(k, plan.name)
        try:
            _make_namespaces(k, plan)
            _connect(k, plan)
            for number, machine in enumerate(plan.machines, start=1):
                if machine.cpu and shares:
                    shares.limit(host_of(plan.name, number), machine.cpu)
            if plan.delayed:
                _start_delay_line(k, plan)
        except BaseException:
            _take_down(k, plan.name)
            raise


def _make_namespaces(k: IpCommands, plan: LabPlan) -> None:
    for name in (switch_of(plan.name), *(host_of(plan.name, i + 1) for i in range(len(plan.machines)))):
        k.ip("netns", "add", name, needs=_IN_A_CONTAINER)


def _connect(k: IpCommands, plan: LabPlan) -> None:
    switch = switch_of(plan.name)
    net = subnet_of(plan.name, _taken(k, plan.name))
    k.batch("ip", _ports(plan), inside=switch, needs=_VETH)
    for number, machine in enumerate(plan.machines, start=1):
        host = host_of(plan.name, number)
        lines = ["link set lo up", f"addr add {net}.{number}/24 dev eth0", *_up_without_ipv6("eth0")]
        k.batch("ip", lines, inside=host, needs=_VETH)
        _name_hosts(net, number, plan)
        if machine.up:
            k.batch("tc", [bucket("eth0", machine.up, machine)], inside=host, needs=_TBF)
    receiving = [bucket(f"p{i}", m.down, m) for i, m in enumerate(plan.machines, start=1) if m.down]
    if receiving:
        k.batch("tc", receiving, inside=switch, needs=_TBF)


def _name_hosts(net: str, number: int, plan: LabPlan) -> None:
    """Write the file that `ip netns exec` mounts over /etc/hosts. In it, this machine's own name means the host."""
    folder = _NAMES / host_of(plan.name, number)
    every = [f"{net}.{k} host-{k}" for k in range(1, len(plan.machines) + 1)]
    own = f"{net}.{number} host-{number} {socket.gethostname()}"
    with contextlib.suppress(OSError):  # /etc is read-only: there are still the addresses
        folder.mkdir(parents=True, exist_ok=True)
        text = "\n".join(["127.0.0.1 localhost", "::1 localhost", own, *every, ""])
        (folder / "hosts").write_text(text, encoding="utf-8")


def _ports(plan: LabPlan) -> Iterator[str]:
    """Yield the commands that make the switch's side of every cable."""
    for number in range(1, len(plan.machines) + 1):
        bridge = f"br{number if plan.delayed else 0}"
        if plan.delayed or number == 1:
            yield f"link add {bridge} type bridge"
            yield from _up_without_ipv6(bridge)
        yield f"link add p{number} type veth peer name eth0 netns {host_of(plan.name, number)}"
        yield f"link set p{number} master {bridge}"
        yield from _up_without_ipv6(f"p{number}")


def _up_without_ipv6(device: str) -> Iterator[str]:
    """Yield the commands that bring a device up without an IPv6 address, which would send packets of its own."""
    yield f"link set {device} addrgenmode none"
    yield f"link set {device} up"


def bucket(device: str, rate: float, machine: Machine) -> str:
    """Return the `tc` command for one direction of a link."""
    burst = round(max(_BURST, (rate - _SLOW) / 8 * _BEYOND))
    queue = round(max(_FRAMES * 1514, rate / 8 * (_QUEUE + 2 * machine.latency)))
    return f"qdisc add dev {device} root tbf rate {rate:.0f}bit burst {burst} limit {burst + queue}"


def _taken(k: IpCommands, but: str) -> set[str]:
    """Return the networks of other labs."""
    others = [name for name in namespaces() if owner_of(name) not in (None, but)]
    return {address.rpartition(".")[0] for name in others if (address := address_in(k, name))}


def address_in(k: IpCommands, namespace: str) -> str | None:
    """Return the address of a host, if it has one."""
    for entry in k.ask("ip", "-4", "addr", "show", "dev", "eth0", inside=namespace):
        for address in entry.get("addr_info", []):
            return str(address["local"])
    return None


def _start_delay_line(k: IpCommands, plan: LabPlan) -> None:
    switch = switch_of(plan.name)
    ports = [f"t{i}={m.latency / 2:.9f}" for i, m in enumerate(plan.machines, start=1)]
    assert k.lock is not None
    program = [sys.executable, "-I", "-S", str(DELAY_LINE)]
    line = subprocess.Popen(
        ["ip", "netns", "exec", switch, *program, switch, str(k.lock), *ports],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(k.lock,),
        cwd="/",
        start_new_session=True,
        text=True,
    )
    assert line.stdout is not None
    assert line.stderr is not None
    with line.stdout, line.stderr:
        try:
            if not select.select([line.stdout], [], [], _PATIENCE)[0]:
                raise EnvironmentProblem(
                    f"the delay line did not start within {_PATIENCE:.0f} s. Is this machine busy?"
                )
            if line.stdout.readline() != "ready\n":
                why = line.stderr.read().strip().splitlines()[-1:]
                raise EnvironmentProblem(f"the delay line did not start: {' '.join(why)}. {_TUN}")
        finally:
            line.kill()  # the delay line itself is a child of this process
            line.wait()
    for i in range(1, len(ports) + 1):
        k.batch("ip", [f"link set t{i} master br{i}", *_up_without_ipv6(f"t{i}")], inside=switch, needs=_TUN)


def down(name: str) -> bool:
    """Take a lab down, also one half built, and end all that runs in it. Return False if there was nothing."""
    refuse_without()
    with building() as k:
        return _take_down(k, name)


def names() -> list[str]:
    """Return the names of all labs of which any part exists."""
    found = {lab for name in [*namespaces(), *_named()] if (lab := owner_of(name))}
    shares = find_cgroups()
    return sorted(found | (shares.labs() if shares else set()))


def _named() -> list[str]:
    return sorted(os.listdir(_NAMES)) if _NAMES.is_dir() else []


def _take_down(k: IpCommands, lab: str) -> bool:
    spaces = [name for name in namespaces() if owner_of(name) == lab]
    if identity("/proc/self/ns/net") in {identity(NAMESPACES / name) for name in spaces}:
        raise EnvironmentProblem(f"this process runs in a host of the lab {lab}. Take it down from outside.")
    shares = find_cgroups()
    groups = shares.of(lab) if shares else []
    named = [name for name in _named() if owner_of(name) == lab]
    _kill_all(spaces, shares, groups)  # before the namespaces are deleted, by which they are found
    for name in spaces:
        k.ip("netns", "delete", name)
    for name in groups:
        assert shares is not None
        shares.remove(name)
    for name in named:
        shutil.rmtree(_NAMES / name)
    if named and not _named():
        _NAMES.rmdir()
    return bool(spaces or groups or named)


def _kill_all(spaces: Collection[str], shares: Cgroups | None, groups: Collection[str]) -> None:
    def members() -> set[int]:
        grouped = [pid for name in groups for pid in shares.members(name)] if shares else []
        return {*processes_in(spaces), *grouped} - {os.getpid()}

    if left := kill_all(members, _PATIENCE):
        raise EnvironmentProblem(f"processes {left} of the lab cannot be killed; try again.")
