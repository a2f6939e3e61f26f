# SPDX-License-Identifier: Apache-2.0
"""Runs of one condition after the other on the hosts of a laboratory, and the same runs simulated.

    python -m benchmarks.lab_cells ORDERS.json      on every host of a lab: what `play` has each of them do

Processes start once for all the runs of a lab, since that takes longer than most of the runs.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import orchestra
from benchmarks.common import busy_seconds, scratch
from benchmarks.prediction import per_step, train
from orchestra.engine import compute_times, expression
from orchestra.engine.compute_times import ComputeTime
from orchestra.lab import Lab
from orchestra.runs.events import Event, Logged, NodeEnded, OpTraced, Stepped, read
from orchestra.worlds.simulated.networks import Host, Network

LATENCY = 1e-3  # seconds from host to host
CALIBRATED = 2  # hosts in a lab from which the others are predicted
_TRIES = 3  # of a lab, if a run in it fails


@dataclass(frozen=True)
class Cell:
    """One thing to predict."""

    hosts: int  # workers and servers
    megabits: int  # a second, up and down
    parameters: int
    delay: str
    strategy: str
    steps: int

    @property
    def condition(self) -> tuple[Any, ...]:
        """All that the strategies compared with each other have in common."""
        return self.hosts, self.megabits, self.parameters, self.delay

    @property
    def workers(self) -> int:
        """All hosts but those with servers."""
        return self.hosts - expression.parse(self.strategy).layout.servers


@dataclass(frozen=True)
class Seen:
    """What a run or a simulation left."""

    seconds: float  # of a step of worker 0
    sent: int  # bytes, by all nodes
    staleness: dict[int, int]  # how many pushes were how stale
    compute: float  # seconds a step, the mean of the workers
    held: float | None = None  # seconds until a send of a server's vector returns; None: it was not looked at
    share: float = 0.0  # of the cores that were busy meanwhile, by any program


def look(run: Path) -> Seen:
    """What is in a run folder."""
    events = [event for name in ("events", "trace") for path in run.glob(f"{name}-*.jsonl") for event in read(path)]
    sent = sum(event.sent for event in events if isinstance(event, NodeEnded))
    stale = Counter(int(e.value) for e in events if isinstance(e, Logged) and e.name == "staleness")
    return Seen(per_step(run), sent, dict(stale), _computing(events), _holding(events))


def _computing(events: Sequence[Event]) -> float:
    steps: dict[int, list[float]] = {}
    for event in events:
        if isinstance(event, Stepped):
            steps.setdefault(event.node, []).append(event.compute)
    return statistics.fmean((mine[-1] - mine[0]) / (len(mine) - 1) for mine in steps.values())


def _holding(events: Sequence[Event]) -> float | None:
    """Answers of a server are sent one after the other, so that for as long it does nothing else."""
    workers = {event.node for event in events if isinstance(event, Stepped)}
    answers = [e for e in events if isinstance(e, OpTraced) and e.kind == "send" and e.node not in workers and e.bytes]
    return statistics.median(e.t - e.began for e in answers) if answers else None


# Real.


def play(cells: Sequence[Cell]) -> dict[Cell, Seen]:
    """Run cells of the same hosts and rates in this order; those that failed several times are missing."""
    found: dict[Cell, Seen] = {}
    for _ in range(_TRIES):
        left = [cell for cell in cells if cell not in found]
        if left:
            found |= _play(left)
    return found


def _play(cells: Sequence[Cell]) -> dict[Cell, Seen]:
    first, name = cells[0], f"cells{os.getpid()}"
    with (
        scratch() as folder,
        Lab(name=name, hosts=first.hosts, rate=f"{first.megabits}mbit", latency=LATENCY) as lab,
    ):
        orders = folder / "orders.json"
        orders.write_text(json.dumps([asdict(cell) for cell in cells]), encoding="utf-8")
        lab.run([sys.executable, "-m", "benchmarks.lab_cells", str(orders)], out=sys.stderr.buffer)
        done = [(cell, folder / str(i)) for i, cell in enumerate(cells) if (folder / str(i) / "share").exists()]
        return {cell: replace(look(run), share=float((run / "share").read_text())) for cell, run in done}


def _obey(orders: Path) -> None:
    """As one host: take part in all runs."""
    for i, order in enumerate(json.loads(orders.read_text(encoding="utf-8"))):
        cell, run = Cell(**order), orders.with_name(str(i))
        cluster = orchestra.Attached(order="given", threads=1, compute_time=cell.delay, patience=60)
        began, busy = time.monotonic(), busy_seconds()
        train(cell.parameters, cell.strategy, cluster, run, cell.steps, trace=cell.hosts == CALIBRATED)
        share = (busy_seconds() - busy) / (time.monotonic() - began) / (os.cpu_count() or 1)
        if cluster.is_coordinator:
            (run / "share").write_text(str(share), encoding="utf-8")


# Simulated.


@dataclass(frozen=True)
class Model:
    """What a laboratory is like beyond its rate and latency; all zero, it is just that."""

    headers: float = 0.0  # bytes that pass a link beside each of ours
    latency: float = 0.0  # seconds that a message takes beside those of the link
    message: float = 0.0  # seconds of work for each
    number: float = 0.0  # seconds of work for every number averaged or updated
    late: float = 0.0  # seconds that a worker oversleeps in the mean
    keeps: Mapping[int, float] = field(default_factory=dict)  # bytes that kernels hold of a connection, by Mbit/s

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Model:
        """As JSON has it, whose keys are text."""
        return cls(**{**told, "keeps": {int(rate): size for rate, size in told["keeps"].items()}})

    def network(self, megabits: int) -> Network:
        """Hosts like those of such a laboratory."""
        bits = megabits * 1e6 / (1 + self.headers)
        latency, keeps = (LATENCY + self.latency) / 2, self.keeps.get(megabits)
        host = Host(up=bits, down=bits, latency=latency, message=self.message, number=self.number, keeps=keeps)
        return Network(hosts=(host,))


@dataclass(frozen=True)
class Oversleeping(ComputeTime):
    """Workers wake up late, now more, now less.

    That they are not all late alike matters: asynchronous workers with constant delays that wake up at the same moment
    would for ever push at the same moment and share the server's link, which real ones soon cease to do.
    """

    base: ComputeTime
    by: float  # seconds in the mean

    def seconds(self, seed: int, worker: int, step: int) -> float:
        dice = random.Random(f"{seed} {worker} {step}")
        return self.base.seconds(seed, worker, step) + self.by * dice.expovariate(1.0)

    def mean(self) -> float:
        return self.base.mean() + self.by


def simulate(cell: Cell, model: Model | None) -> Seen:
    """The same in virtual time; no model: nothing takes time but computing."""
    free = Network(hosts=(Host(up=1e18, down=1e18),))
    network, late = (free, 0.0) if model is None else (model.network(cell.megabits), model.late)
    delay = Oversleeping(compute_times.parse(cell.delay), late)
    cluster = orchestra.Simulated(workers=cell.workers, network=network, compute_time=delay, numerics="off")
    with scratch() as folder:
        return look(train(cell.parameters, cell.strategy, cluster, folder / "run", cell.steps).run)


if __name__ == "__main__":
    _obey(Path(sys.argv[1]))
