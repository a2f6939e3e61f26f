# SPDX-License-Identifier: Apache-2.0
"""How many copies of the model does a worker of a synchronous run hold?"""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

import orchestra
from benchmarks.common import Outcome, Rounds, main, scratch
from benchmarks.workloads import WORKLOADS, loss, sgd

BATCH = 8  # small: activations are not what is counted here
STEPS = 12
WORKERS = 2


def measure(rounds: int) -> Outcome:
    """Resident memory of the workers, less that of a tiny model's, in flat copies."""
    outcome = Outcome(
        "Memory of a worker",
        f"AllReduce with SGD and momentum, {WORKERS} workers, batch {BATCH}. The most that /proc/PID/smaps_rollup "
        "shows of a worker while all of them train, less the same of a tiny model, in flat copies of the model "
        "(float32). Pss divides a shared page among those who map it; Rss counts it in full for each. *To the end* "
        f"includes the writing of the final model by one of them. {rounds} rounds of all three in turn: median (least "
        "to most) of the differences within a round.",
    )
    turns = Rounds()
    copies = {name: 4 * sum(p.numel() for p in WORKLOADS[name].module().parameters()) for name in ("mlp10m", "mlp50m")}
    for _ in range(rounds):
        floor = _peak("tiny")
        for name, copy in copies.items():
            for kind, bytes_ in _peak(name).items():
                turns.add(f"{name} {kind}", (bytes_ - floor[kind]) / copy)
    kinds = ("Pss", "Rss", "Rss to the end")
    rows = [
        [name, f"{copy / 1e6:.0f} MB", *(turns[f"{name} {kind}"].show(2) for kind in kinds)]
        for name, copy in copies.items()
    ]
    outcome.table(["model", "one copy", "Pss, copies", "Rss, copies", "Rss to the end, copies"], rows)
    worst = max(turns[f"{name} Pss"].median for name in copies)
    outcome.goal("at most 4 copies per worker beyond activations (Pss)", worst <= 4)
    return outcome


def _peak(name: str) -> dict[str, float]:
    """The most memory that any worker had, in bytes, by kind."""
    workload = WORKLOADS[name]
    most: dict[str, float] = defaultdict(float)
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(most, done))
    with scratch() as folder:
        watcher.start()
        try:
            orchestra.train(
                model=workload.module,
                data=functools.partial(_small, name),
                loss=loss,
                optimizer=sgd,
                cluster=orchestra.Local(workers=WORKERS, threads=1),
                batch=BATCH,
                budget=orchestra.Steps(STEPS),
                out=folder / "run",
            )
        finally:
            done.set()
            watcher.join()
    return dict(most)


def _small(name: str) -> tuple[torch.Tensor, ...]:
    return tuple(part[:64].clone() for part in WORKLOADS[name].data())


def _watch(most: dict[str, float], done: threading.Event) -> None:
    while not done.is_set():
        seen = [found for pid in _workers() if (found := _resident(pid))]
        for found in seen:
            most["Rss to the end"] = max(most["Rss to the end"], found["Rss"])
            if len(seen) == WORKERS:  # what one alone still maps would count as all its own
                most["Rss"] = max(most["Rss"], found["Rss"])
                most["Pss"] = max(most["Pss"], found["Pss"])
        time.sleep(0.01)


def _workers() -> list[int]:
    """The processes forked by this process's fork server."""
    return [worker for server in _children(None) for worker in _children(server)]


def _children(pid: int | None) -> list[int]:
    found: list[int] = []
    for path in Path("/proc", "self" if pid is None else str(pid), "task").glob("*/children"):
        try:
            found += map(int, path.read_text().split())
        except OSError:
            continue
    return found


def _resident(pid: int) -> dict[str, float]:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return {}
    fields: dict[str, Any] = dict(line.split(":") for line in lines)
    return {kind: float(fields[kind].split()[0]) * 1024 for kind in ("Rss", "Pss") if kind in fields}


if __name__ == "__main__":
    main(measure, rounds=5)
