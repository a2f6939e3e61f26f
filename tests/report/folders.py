# SPDX-License-Identifier: Apache-2.0
"""Run folders as a run would leave them, made up: quick, and with figures that are known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestra.runs.events import Event, Logged, NodeEnded, NodeStarted, Scored, Stepped, encode

PARAMETERS = 100
SIZE = 4 * PARAMETERS  # bytes of the model
HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>'


def make_run(
    path: Path, strategy: str = "allreduce", *, workers: int = 2, servers: int = 0, seed: int = 0, steps: int = 20,
    second: float = 0.1, accuracy: float = 0.9, over: bool = True, **config: Any,
) -> Path:  # fmt: skip
    """A run whose steps take `second` each: half computing, a third sending, the rest waiting."""
    path.mkdir(parents=True, exist_ok=True)
    note = config.pop("note", {"recipe": "digits", "args": [], "options": {"strategy": strategy, "seed": seed}})
    about = {
        "strategy": strategy, "workers": workers, "servers": servers, "seed": seed, "parameters": PARAMETERS,
        "batch": 8, "budget": ["epochs=1"], "cluster": {"kind": "simulated", "numerics": "real"}, "note": note,
        "versions": {"torch": "2"},
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(about | config), encoding="utf-8")
    for node in range(workers + servers):
        events = _worker(node, steps, second) if node < workers else _server(node, workers, steps, second)
        text = "".join(encode(event) for event in events)
        (path / f"events-{node}.jsonl").write_text(text, encoding="utf-8")
    scores = [_score(i, steps, second, accuracy) for i in range(11)]
    (path / "scores.jsonl").write_text("".join(encode(score) for score in scores), encoding="utf-8")
    if over:
        (path / "ending.json").write_text(json.dumps({"stopped_by": "budget", "warnings": []}), encoding="utf-8")
    return path


def _worker(node: int, steps: int, second: float) -> Iterator[Event]:
    yield NodeStarted(0.0, node, "worker", 0.0)
    for k in range(1, steps + 1):
        t = k * second
        yield Stepped(t, node, k, k / steps, 8 * k, 2.0 / k, 0.1, t / 2, t / 3, t / 6, k * SIZE, k * SIZE)
    t = steps * second
    yield NodeEnded(t, node, steps, 8 * steps, t / 2, t / 3, t / 6, steps * SIZE, steps * SIZE)


def _server(node: int, workers: int, steps: int, second: float) -> Iterator[Event]:
    yield NodeStarted(0.0, node, "server", 0.0)
    for k in range(steps * workers):
        yield Logged(k * second / workers, node, k, "staleness", float(k % 3))
    t, sent = steps * second, steps * workers * SIZE
    yield NodeEnded(t, node, steps * workers, 8 * steps * workers, 0.1 * t, 0.2 * t, 0.7 * t, sent, sent)


def _score(i: int, steps: int, second: float, accuracy: float) -> Scored:
    share = i / 10
    return Scored(
        share * steps * second, int(share * steps), int(16 * share * steps), i,
        {"accuracy": accuracy * share, "loss": 2.0 - share},
    )  # fmt: skip


def make_race(out: Path, times: dict[str, list[float]], **record: Any) -> Path:
    """A comparison: seconds of a step by strategy and seed; all reach 0.5 in the sixth of ten snapshots."""
    for strategy, seconds in times.items():
        servers = int(strategy.startswith("ps"))
        for seed, second in enumerate(seconds):
            slug = "".join(c if c.isalnum() else "-" for c in strategy)
            options = {"strategy": strategy, "workers": 2, "seed": seed, "out": "elsewhere", "sim": True}
            note = {"recipe": "digits", "args": [], "options": options}
            make_run(out / slug / f"seed{seed}", strategy, servers=servers, seed=seed, second=second, note=note)
    record = {"target": {"metric": "accuracy", "value": 0.5}} | record
    (out / "table.json").write_text(json.dumps(record), encoding="utf-8")
    return out


def moved(node: int, kind: str, began: float, seconds: float, peer: int | None = None, size: int = 0) -> str:
    """A line of a trace."""
    what = {"node": node, "kind": kind, "began": began, "peer": peer, "bytes": size}
    return json.dumps({"event": "op_traced", "t": began + seconds} | what) + "\n"
