# SPDX-License-Identifier: Apache-2.0
"""Evaluation off the clock: snapshots are scored before and after the run, or by a patient thread while it goes on."""

from __future__ import annotations

import copy
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from orchestra import snapshot
from orchestra.budget import Target
from orchestra.errors import ConfigError, Problem
from orchestra.events import Scored, encode
from orchestra.replica import persistent_buffers
from orchestra.report.facts import scores_of
from orchestra.strategy import Strategy

Evaluate = Callable[[nn.Module, Any], Any]


@dataclass
class Scorer:
    """Scores the snapshots of one run, each once, in order."""

    run: Path
    module: nn.Module
    evaluate: Evaluate | None
    data: Any
    strategy: Strategy[Any]
    workers: int
    targets: list[Target]
    keep: bool
    done: set[int] = field(default_factory=set)
    reached: bool = False

    def __post_init__(self) -> None:
        self.module = copy.deepcopy(self.module)
        self.done |= {s.number for s in scores_of(self.run)}
        self._halt = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def figures(self, module: nn.Module) -> dict[str, float]:
        """Call the user's function; a single number gets the function's name."""
        if self.evaluate is None:
            return {}
        module.eval()
        with torch.no_grad():
            value = self.evaluate(module, self.data)
        if isinstance(value, Mapping):
            return {str(name): float(v) for name, v in value.items()}
        name = getattr(self.evaluate, "__name__", "score")
        return {name if name.isidentifier() else "score": float(value)}

    def initial(self) -> dict[str, float]:
        """Score the initial model: a mistake in `evaluate` shows now, not after hours of training."""
        metrics = self.figures(self.module)
        missing = [t for t in self.targets if t.metric not in metrics]
        if missing:
            message = f"is not among what evaluate gives: {', '.join(metrics)}"
            raise ConfigError([Problem("budget.target", t.metric, message) for t in missing])
        return metrics

    def begin(self, metrics: dict[str, float]) -> None:
        """Record the scores of the initial model."""
        if self.evaluate is not None:
            self._record(Scored(0.0, 0, 0, 0, metrics))

    def ready(self) -> list[tuple[int, Path]]:
        """Snapshots not yet scored."""
        return [(n, p) for n, p in snapshot.numbered(self.run / "snapshots") if n not in self.done]

    def score(self, number: int, folder: Path) -> None:
        """Put a snapshot together and evaluate it."""
        self._record(self._scored(number, snapshot.parts(folder)))
        self.done.add(number)
        if not self.keep:
            shutil.rmtree(folder)

    def _scored(self, number: int, parts: list[snapshot.Part]) -> Scored:
        snapshot.load_into(self.module, parts)
        holders = [p for p in parts if p.x is not None]
        samples = {
            "everywhere": holders[0].samples,
            "copies": holders[0].samples,
            "shared": holders[0].samples,  # as if all were as far as worker 0
            "servers": max(p.samples for p in holders),
            "apart": sum(p.samples for p in holders),
        }[holders[0].where]
        t = max(p.t for p in holders)
        return Scored(t, max(p.step for p in parts), samples, number, self.figures(self.module))

    def last(self, number: int, parts: list[snapshot.Part]) -> Scored:
        """Score the final model, which every run has."""
        scored = self._scored(number, parts)
        if self.evaluate is not None:
            self._record(scored)
        return scored

    def rest(self) -> None:
        """Score what is left after the run; a snapshot whose parts are missing belongs to a run cut short."""
        for number, folder in self.ready():
            if self._whole(folder):
                self.score(number, folder)

    def _whole(self, folder: Path) -> bool:
        found = snapshot.parts_present(folder)
        buffers = bool(persistent_buffers(self.module))
        workers = set(range(self.workers))
        servers = set(range(self.workers, self.workers + self.strategy.servers))
        left = set(range(self.workers - len(servers))) if self.strategy.promotes else workers
        for where in self.strategy.places:
            wanted = {"servers": servers, "apart": workers}.get(where, {0})
            working = left if where == "servers" else workers
            if (wanted | (working if buffers else set())) <= found and snapshot.holds_x(folder, min(wanted)):
                return True
        return False

    def _record(self, scored: Scored) -> None:
        with (self.run / "scores.jsonl").open("a", encoding="utf-8") as file:
            file.write(encode(scored))
        self.reached = self.reached or any(t.reached(scored.metrics) for t in self.targets)

    # While the run goes on.

    def start(self) -> None:
        """Score snapshots as they appear, in a thread that yields to everybody else."""
        self._thread = threading.Thread(target=self._follow, name="scorer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Finish the snapshot under way and end the thread."""
        self._halt.set()
        if self._thread is not None:
            self._thread.join()

    def target_reached(self) -> bool:
        """Whether a target was reached so far; raises what went wrong in the thread."""
        if self._failure is not None:
            raise self._failure
        return self.reached

    def _follow(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        torch.set_num_threads(1)
        try:
            while not self._halt.wait(0.05):
                whole = next(((n, folder) for n, folder in self.ready() if self._whole(folder)), None)
                if whole is not None:
                    self.score(*whole)
        except Exception as error:  # of the user's own function; the main thread raises it
            self._failure = error
