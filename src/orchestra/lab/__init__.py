# SPDX-License-Identifier: Apache-2.0
"""A network of hosts on one machine: namespaces, token buckets, a delay line, shares of the processor.

    with Lab(hosts=4, rate="100mbit", latency="1ms", cpu=0.5) as lab:
        lab.run(["python", "train.py"])

Lab(rate="100mbit", latency="1ms") is what --network 100mbit,1ms simulates, for any program that uses sockets. The hosts
share the machine's processors, memory and files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, Self

from orchestra.lab.build import down, up
from orchestra.lab.inspection import LabState, look
from orchestra.lab.plan import DEFAULT, LabPlan, Machine, make_plan
from orchestra.lab.running import command_in, environment_in, run

__all__ = ["Lab", "Machine"]


@dataclass(frozen=True, kw_only=True)
class Lab:
    """A lab that is up inside a `with` block, and taken down after it."""

    hosts: int
    rate: str | float | None = None  # up and down, such as "100mbit", or bits per second; None: as fast as the kernel
    latency: str | float = 0.0  # one way from host to host, such as "1ms", or seconds
    cpu: float | None = None  # cores of each host
    name: str = DEFAULT
    # Hosts that differ, counted from 1: {3: {"rate": "10mbit", "cpu": 0.25}}; also "up", "down" and "latency".
    exceptions: Mapping[int, Mapping[str, str | float]] = field(default_factory=dict)

    @property
    def plan(self) -> LabPlan:
        """The lab to build; raises `ConfigError` if it cannot be built."""
        return make_plan(
            name=self.name,
            hosts=self.hosts,
            rate=self.rate,
            latency=self.latency,
            cpu=self.cpu,
            exceptions=self.exceptions,
        )

    def __enter__(self) -> Self:
        up(self.plan)
        return self

    def __exit__(self, *_: object) -> None:
        down(self.name)

    def look(self) -> LabState:
        """Read the lab's state from the kernel: addresses, links, shares."""
        return look(self.name)

    def run(
        self,
        command: Sequence[str],
        *,
        host: int | None = None,
        out: BinaryIO | None = None,
        err: BinaryIO | None = None,
    ) -> int:
        """Run a command on one host (from 1) or on all at once; return the status of the first that failed.

        Lines go to `out` and `err`, by default those of this process, prefixed with their host. All processes that the
        command started end with it.
        """
        return run(look(self.name), command, host=host, out=out, err=err)

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """Return the command line that runs a command on a host (from 1), for `subprocess`."""
        return command_in(look(self.name), host, command)

    def environment(self, host: int) -> dict[str, str]:
        """Return the environment for `command`."""
        return environment_in(look(self.name), host)
