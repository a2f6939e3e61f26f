# SPDX-License-Identifier: Apache-2.0
"""What was measured of a machine and a workload on it, in a file: `orchestra probe` writes it, simulations read it.

compute_time="probe.json"               computing times drawn from those measured, at the run's own batch
network="probe.json"                    hosts that exchange tensors as processes of this machine do
network="probe.json loopback"           the same, through the sockets of this machine
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

_FORMAT = "orchestra probe 1"


@dataclass(frozen=True)
class LinkMeasurement:
    """A link between two processes."""

    rate: float  # bytes per second
    latency: float  # seconds until the first byte of a message is there
    message: float  # seconds of the sender's own work for a message


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One machine, and one workload on it."""

    workload: str
    parameters: int
    machine: str
    threads: int  # of the process that computed
    batch: int  # the workload's own
    compute: Mapping[int, tuple[float, ...]]  # seconds of each step, by batch
    memory: float  # bytes per second copied by one process
    number: float  # seconds for every number that an optimizer updates
    memory_exchange: LinkMeasurement  # between two processes, through memory that both map
    loopback: LinkMeasurement  # between two processes, through a socket

    def dump(self) -> str:
        """As the text of a file, one figure a line."""
        parts = {"format": _FORMAT, **asdict(self)}
        return "{\n" + ",\n".join(f' "{name}": {json.dumps(value)}' for name, value in parts.items()) + "\n}\n"


def read(path: Path) -> Probe:
    """Parse what `dump` wrote; raises a ValueError that says what is wrong with the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}: `orchestra probe RECIPE` writes one") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}): run `orchestra probe` again") from None
    if not isinstance(found, Mapping) or found.get("format") != _FORMAT:
        raise ValueError(f"{path} was not written by this version of `orchestra probe`: run it again")
    try:
        probe = _made(found)
        plausible = all(_plausible(probe))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}): run `orchestra probe` again") from None
    if not plausible:
        raise ValueError(f"{path} holds figures that no machine has: run `orchestra probe` again")
    return probe


def _made(found: Mapping[str, Any]) -> Probe:
    given = {field.name: found[field.name] for field in fields(Probe)}
    given["batch"] = int(given["batch"])
    given["compute"] = {int(batch): tuple(map(float, times)) for batch, times in given["compute"].items()}
    for way in ("memory_exchange", "loopback"):
        given[way] = LinkMeasurement(**given[way])
    return Probe(**given)


def _plausible(probe: Probe) -> list[bool]:
    ways = (probe.memory_exchange, probe.loopback)
    return [
        bool(probe.compute) and all(probe.compute.values()),
        all(batch > 0 for batch in (probe.batch, *probe.compute)),
        all(math.isfinite(t) and t > 0 for times in probe.compute.values() for t in times),
        math.isfinite(probe.number) and probe.number >= 0,
        all(math.isfinite(w.rate) and w.rate > 0 for w in ways),
        all(math.isfinite(t) and t >= 0 for w in ways for t in (w.latency, w.message)),
    ]
