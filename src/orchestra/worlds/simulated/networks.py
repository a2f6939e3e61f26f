# SPDX-License-Identifier: Apache-2.0
"""Descriptions of simulated networks: hosts linked to one switch, or to one switch per rack below a core.

    100mbit,1ms               every host up and down at 100 Mbit/s, 1 ms from host to host
    10gbit,50us,5us           in addition, 5 µs of work for every message
    100mbit,1ms racks:4x8     hosts in racks of 4; a rack's link to the core is 8 times too small for them
    hosts.yaml                a list, one entry per host:  - {rate: 1gbit, latency: 0.2ms}
                                                           - {up: 20mbit, down: 100mbit, latency: 10ms, keeps: 128kB}
    probe.json [loopback]     hosts like the processes of a machine that `orchestra probe` measured: through shared
                              memory, or through its sockets

Further nodes use the listed hosts in turn.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from itertools import groupby
from pathlib import Path
from typing import Any

from orchestra.errors import Problem
from orchestra.runs import measurements
from orchestra.runs.measurements import LinkMeasurement

_LARGEST = 1 << 20  # bytes of a file of hosts
_FEW = 3  # kinds of hosts that are listed one by one
_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d{1,4})?"
_PREFIXES = {"": 0, "k": 3, "m": 6, "g": 9, "t": 12}  # powers of ten
_UNITS = {prefix + unit: power for unit in ("bit", "bps", "bit/s") for prefix, power in _PREFIXES.items()}
_SIZES = {"B": 0, "kB": 3, "MB": 6, "GB": 9}
_TIMES = {"s": 0, "ms": -3, "us": -6, "µs": -6, "ns": -9}


@dataclass(frozen=True, kw_only=True)
class Host:
    """One machine: its link, and the times of its work besides computing gradients."""

    up: float  # bits per second
    down: float  # bits per second
    latency: float = 0.0  # seconds from the host to the middle of the network
    message: float = 0.0  # seconds of work for every message sent
    number: float = 0.0  # seconds of work for every number that is averaged or updated
    keeps: float | None = None  # bytes of a connection's kernel buffer; None: unlimited

    def __str__(self) -> str:
        rates = dict.fromkeys(_shortest(rate, _UNITS) for rate in (self.up, self.down))
        times = [_shortest(seconds, _TIMES) for seconds in (2 * self.latency, self.message)]
        while times and times[-1] == "0s":
            times.pop()
        number = f" number:{_shortest(self.number, _TIMES)}" if self.number else ""
        keeps = f" keeps:{_shortest(self.keeps, _SIZES)}" if self.keeps is not None else ""
        return ",".join(["/".join(rates), *times]) + number + keeps


@dataclass(frozen=True, kw_only=True)
class Network:
    """Hosts and the links between them. Further nodes use the listed hosts in turn."""

    hosts: tuple[Host, ...]
    rack: int | None = None  # hosts in a rack; None: one switch for all
    oversubscription: float = 1.0  # how many times a rack's link to the core is too small for its hosts

    def host(self, node: int) -> Host:
        """Return the host of a node. Every machine has its own host, with the properties of a listed one."""
        return self.hosts[node % len(self.hosts)]

    @property
    def symmetric(self) -> bool:
        """Whether all hosts, and so all routes between them, are equal."""
        return len(set(self.hosts)) == 1 and self.rack is None

    def __str__(self) -> str:
        """Return text from which `parse` reads the same network, if there is one; else its hosts, in short."""
        if next(self.problems(), None) is not None:
            return repr(self)
        alike = [(str(host), len([*group])) for host, group in groupby(self.hosts)]
        text = "; ".join(host if n == 1 else f"{n} x {host}" for host, n in alike)
        if len(alike) > _FEW:  # a checksum distinguishes them from other hosts
            text = f"{len(self.hosts)} hosts, {alike[0][0]} and others ({zlib.crc32(repr(self.hosts).encode()):08x})"
        return text if self.rack is None else f"{text} racks:{self.rack}x{_shortest(self.oversubscription, {'': 0})}"

    def problems(self) -> Iterator[Problem]:
        """Yield the values with which no message could be sent."""
        if not self.hosts:
            yield Problem("cluster.network", self.hosts, "needs at least one host")
        for i, host in enumerate(self.hosts):
            for field in fields(Host):
                value, may_be_0 = getattr(host, field.name), field.default == 0
                if value is None and field.default is None:
                    continue
                if not (isinstance(value, int | float) and 0 <= value < math.inf and (value or may_be_0)):
                    kind = "at least 0" if may_be_0 else "above 0"
                    yield Problem(f"cluster.network.hosts[{i}].{field.name}", value, f"must be a finite number {kind}")
        if self.rack is not None and not (isinstance(self.rack, int) and self.rack >= 1):
            yield Problem("cluster.network.rack", self.rack, "must be a whole number of at least 1 host")
        times = self.oversubscription
        if not (isinstance(times, int | float) and times > 0 and math.isfinite(times)):
            yield Problem("cluster.network.oversubscription", self.oversubscription, "must be a number above 0")


def Ethernet(
    *, gbit: float, latency: float = 1e-4, message: float = 0.0, rack: int | None = None, oversubscription: float = 1.0
) -> Network:
    """Return a network of equal hosts, by their rate in Gbit/s and the seconds from one to another."""
    host = Host(up=gbit * 1e9, down=gbit * 1e9, latency=latency / 2, message=message)
    return Network(hosts=(host,), rack=rack, oversubscription=oversubscription)


def parse(text: str) -> Network:
    """Read a network as the command line takes it, or the name of a file of hosts or of a probe.

    >>> parse("100mbit,1ms").host(3)
    Host(up=100000000.0, down=100000000.0, latency=0.0005, message=0.0, number=0.0, keeps=None)
    """
    first, *more = re.sub(r",\s+", ",", text).split() or [""]
    if first.endswith((".yaml", ".yml")):
        hosts = _read(Path(first))
    elif first.endswith(".json"):
        hosts = (_probed(Path(first), "loopback" in more),)
        more = [word for word in more if word != "loopback"]
    else:
        rate, latency, message, *rest = [*first.split(","), "0s", "0s"][: max(3, first.count(",") + 1)]
        if rest:
            raise ValueError(f"{first!r} is not RATE,LATENCY,MESSAGE, e.g. 1gbit,0.5ms")
        bits = read_rate(rate)
        hosts = (Host(up=bits, down=bits, latency=read_time(latency) / 2, message=read_time(message)),)
    rack, times = None, 1.0
    for word in more:
        found = re.fullmatch(rf"racks:(\d+)x({_NUMBER})", word)
        if found is None:
            raise ValueError(f"{word!r} is not racks:HOSTSxOVERSUBSCRIPTION, e.g. racks:4x8")
        rack, times = int(found[1]), float(found[2])
    return Network(hosts=hosts, rack=rack, oversubscription=times)


def _read(path: Path) -> tuple[Host, ...]:
    import yaml

    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"{path} is larger than {_LARGEST} bytes: that is no list of hosts")
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {str(error)[:200]}") from None
    if isinstance(entries, Mapping):
        strange = [key for key in entries if key != "hosts"]
        if strange:
            raise ValueError(
                f"{path}: {str(strange[0])[:40]!r} is not known here; racks are given as racks:4x8 behind it"
            )
        entries = entries.get("hosts")
    if not isinstance(entries, Sequence) or not entries or not all(isinstance(e, Mapping) for e in entries):
        raise ValueError(f"{path} must hold a list of hosts, each like {{rate: 1gbit, latency: 0.2ms}}")
    return tuple(_entry(path, i, entry) for i, entry in enumerate(entries))


def _probed(path: Path, loopback: bool) -> Host:
    found = measurements.read(path)
    way = found.loopback if loopback else found.memory_exchange
    return like(way, found.number)


def like(way: LinkMeasurement, number: float) -> Host:
    """Return a host with the properties of a measured link."""
    return Host(up=8 * way.rate, down=8 * way.rate, latency=way.latency / 2, message=way.message, number=number)


def _entry(path: Path, i: int, entry: Mapping[str, Any]) -> Host:
    known = {"rate", *(f.name for f in fields(Host))}
    for key, value in entry.items():
        if key not in known:
            raise ValueError(f"{path}, host {i}: {str(key)[:40]!r} is none of {', '.join(sorted(known))}")
        if not isinstance(value, str | int | float):
            raise ValueError(f"{path}, host {i}: {key} must be text such as 100mbit or 1ms")
    up, down = entry.get("up", entry.get("rate")), entry.get("down", entry.get("rate"))
    if up is None or down is None:
        raise ValueError(f"{path}, host {i}: needs rate, or up and down")
    latency, message, number = (read_time(entry.get(name, "0s")) for name in ("latency", "message", "number"))
    keeps = read_size(entry["keeps"]) if "keeps" in entry else None
    return Host(
        up=read_rate(up), down=read_rate(down), latency=latency / 2, message=message, number=number, keeps=keeps
    )


def read_rate(text: object) -> float:
    """Parse a rate in bits per second.

    >>> read_rate("2.5gbit")
    2500000000.0
    """
    return _quantity(text, _UNITS, "a rate such as 100mbit or 10gbit")


def read_time(text: object) -> float:
    """Parse a time in seconds.

    >>> read_time("1ms")
    0.001
    """
    return _quantity(text, _TIMES, "a time such as 1ms or 50us")


def read_size(text: object) -> float:
    """Parse a size in bytes.

    >>> read_size("128kB")
    128000.0
    """
    return _quantity(text, {unit.lower(): power for unit, power in _SIZES.items()}, "a size such as 128kB")


def _quantity(text: object, units: Mapping[str, int], what: str) -> float:
    found = re.fullmatch(rf"\s*({_NUMBER})\s*([a-zµ/]+)\s*", str(text).lower())
    if found is None or found[2] not in units:
        raise ValueError(f"{text!r} is not {what}")
    return float(Decimal(found[1]).scaleb(units[found[2]]))  # rounded once: 50us is 0.05ms


def _shortest(value: float, units: Mapping[str, int]) -> str:
    """Return the shortest text that is read as this value.

    >>> _shortest(1e8, _UNITS), _shortest(5e-05, _TIMES), _shortest(1e-4, _TIMES)
    ('100mbit', '50us', '0.1ms')
    """
    exact = Decimal(repr(float(value)))
    return min((f"{exact.scaleb(-power).normalize():f}{unit}" for unit, power in units.items()), key=len)
