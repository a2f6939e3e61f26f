# SPDX-License-Identifier: Apache-2.0
"""Run folders made by hand: what a run would have written until some step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orchestra
from orchestra.runs.events import Event, Logged, NodeEnded, NodeStarted, Scored, Stepped, encode

CONFIG = {
    "strategy": "ps(consistency=asp)", "workers": 2, "servers": 1, "seed": 0, "batch": 8, "parameters": 100,
    "budget": ["steps=40"], "cluster": {"kind": "local"}, "note": {"recipe": "digits", "options": {}},
}  # fmt: skip

ENVIRON = {**os.environ, "PYTHONPATH": str(Path(orchestra.__file__).parents[1])}  # other processes: this very source


def make(folder: Path, **changes: Any) -> Path:
    """A folder with a configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder


def append(folder: Path, node: int, events: Iterable[Event]) -> None:
    """More events of a node."""
    with (folder / f"events-{node}.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(encode(event) for event in events)


def began(node: int) -> Event:
    return NodeStarted(0.0, node, "worker" if node < 2 else "server", 0.5)


def steps(node: int, start: int, stop: int) -> list[Event]:
    """A worker's steps: each takes 0.1 s, of which it computes 0.06, communicates 0.01 and waits 0.03."""
    return [
        Stepped(k * 0.1, node, k, k / 10, 8 * k, 2.0 / k, 0.1, 0.06 * k, 0.01 * k, 0.03 * k, 400 * k, 400 * k)
        for k in range(start, stop)
    ]


def stale(start: int, stop: int) -> list[Event]:
    """What a server logs."""
    return [Logged(k * 0.05, 2, k, "staleness", float(k % 2)) for k in range(start, stop)]


def ended(node: int, step: int) -> Event:
    return NodeEnded(step * 0.1, node, step, 8 * step, 0.06 * step, 0.01 * step, 0.03 * step, 400 * step, 400 * step)


def scored(folder: Path, number: int, accuracy: float) -> None:
    """One more evaluation."""
    with (folder / "scores.jsonl").open("a", encoding="utf-8") as file:
        file.write(encode(Scored(float(number), 10 * number, 160 * number, number, {"accuracy": accuracy})))


def whole(folder: Path, **changes: Any) -> Path:
    """A run of 40 steps that came to its end."""
    make(folder, **changes)
    for node in (0, 1):
        append(folder, node, [began(node), *steps(node, 1, 41), ended(node, 40)])
    append(folder, 2, [began(2), *stale(1, 81), ended(2, 80)])
    for number in range(5):
        scored(folder, number, 0.2 * number)
    (folder / "ending.json").write_text('{"stopped_by": "budget", "warnings": []}')
    return folder
