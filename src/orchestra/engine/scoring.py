# SPDX-License-Identifier: Apache-2.0
"""Evaluation outside the training time: snapshots are scored and removed while the run goes on, with low priority.

    beside processes that train     a thread of the process that started them, at nice 19, with one thread for torch
    where the caller trains itself  a process of its own, `aside`, with the same priority
    in virtual time                 at once, which takes no virtual time
    afterwards                      the remaining ones, at the end; with `score_afterwards`, all of them

If snapshots are written faster than they are scored, every second waiting one is removed as soon as they take more
than ROOM bytes: the disk does not fill up, and training does not wait.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from orchestra.core.strategy import Strategy
from orchestra.engine import snapshot
from orchestra.engine.background import BackgroundProcess
from orchestra.engine.torch_settings import TorchSettings
from orchestra.errors import ConfigError, Problem
from orchestra.model.replica import persistent_buffers
from orchestra.runs.budget import Target
from orchestra.runs.events import Scored, decode, encode
from orchestra.runs.facts import scores_of
from orchestra.runs.score_file import ScoreFile

Evaluate = Callable[[nn.Module, Any], Any]
Show = Callable[[int, int], None]  # how many are scored, of how many

ROOM, FEWEST = 256 << 20, 4  # bytes of snapshots that may wait, and how many may in any case
_TIDY = 2.0  # seconds between two checks of how many wait
_PROMPT, _PATIENT = 0.05, 0.5  # seconds between two checks for a new snapshot, with and without a target
_UNWIND = 2.0  # seconds in which the thread ends after an interruption, unless one operation takes longer
_GRACE = 10.0  # seconds that a score may still take when the run is over, and three times the longest so far


def figures(evaluate: Evaluate, module: nn.Module, data: Any) -> dict[str, float]:
    """Call the user's function on a module in evaluation mode; a single number gets the function's name."""
    module.eval()
    with torch.no_grad():
        value = evaluate(module, data)
    if isinstance(value, Mapping):
        return _numbers({str(name): (f"evaluate(...)[{name!r}]", v) for name, v in value.items()})
    name = getattr(evaluate, "__name__", "score")
    return _numbers({name if name.isidentifier() else "score": ("evaluate(...)", value)})


class _ScoringStopped(SystemExit):
    """Ends the thread of a scorer, silently wherever it arrives."""


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
    afterwards: bool = False  # score nothing before the end, unless a score may end the run
    warnings: list[str] = field(default_factory=list)
    done: set[int] = field(default_factory=set)
    reached: bool = False

    def __post_init__(self) -> None:
        self.module = copy.deepcopy(self.module)
        self.done |= {s.number for s in scores_of(self.run)}
        self._file = ScoreFile(self.run, thin=not self.keep)  # a kept snapshot without a score would be scored again
        self._halt = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._aside: BackgroundProcess | None = None
        self._choosing, self._recording = threading.Lock(), threading.Lock()
        self._now: int | None = None  # the one that is being scored
        self._tidied = self._began = 0.0
        self._longest = 0.0  # seconds that a score took

    def figures(self, module: nn.Module) -> dict[str, float]:
        """Return the scores of a module by the user's function."""
        if self.evaluate is None:
            return {}
        return figures(self.evaluate, module, self.data)

    def initial(self) -> dict[str, float]:
        """Score the initial model, so that a mistake in `evaluate` shows before hours of training."""
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
        """Return the snapshots that are not scored yet."""
        return [(n, p) for n, p in snapshot.numbered(self.run / "snapshots") if n not in self.done]

    def score(self, number: int, folder: Path) -> None:
        """Assemble a snapshot and evaluate it."""
        if (scored := self._ask(number, folder)) is None:
            return
        with self._recording:
            self._record(scored)
            self.done.add(number)
            if not self.keep:
                shutil.rmtree(folder)

    def _ask(self, number: int, folder: Path) -> Scored | None:
        """Evaluate here or in the process aside; return None if the run ends long before the score."""
        if self._aside is None:
            return self._scored(number, snapshot.parts(folder))
        self._began = time.monotonic()
        answer = self._aside.ask(f"{number} {folder}", self._is_wanted)
        if answer is None:
            return None
        self._longest = max(self._longest, time.monotonic() - self._began)
        (scored,) = decode([answer])
        assert isinstance(scored, Scored)
        return scored

    def _answer(self, asked: str) -> str:
        """Score one snapshot, in the process aside."""
        number, _, folder = asked.partition(" ")
        return encode(self._scored(int(number), snapshot.parts(Path(folder))))

    def _is_wanted(self) -> bool:
        return not self._halt.is_set() or time.monotonic() - self._began < _GRACE + 3 * self._longest

    def _scored(self, number: int, parts: list[snapshot.SnapshotPart]) -> Scored:
        snapshot.load_into(self.module, parts)
        holders = [p for p in parts if p.x is not None]
        samples = {
            "everywhere": holders[0].samples,
            "copies": holders[0].samples,
            "shared": holders[0].samples,  # as if all workers had done as many steps as worker 0
            "servers": max(p.samples for p in holders),
            "apart": sum(p.samples for p in holders),
        }[holders[0].where]
        t = max(p.t for p in holders)
        return Scored(t, max(p.step for p in parts), samples, number, self.figures(self.module))

    def last(self, number: int, parts: list[snapshot.SnapshotPart]) -> Scored:
        """Score the final model, which every run has."""
        scored = self._scored(number, parts)
        if self.evaluate is not None:
            self._record(scored)
        return scored

    def rest(self, show: Show = lambda done, of: None) -> None:
        """Score the remaining snapshots; skip incomplete ones, which an interrupted run leaves."""
        waiting = [(number, folder) for number, folder in self.ready() if self._whole(folder)]
        for i, (number, folder) in enumerate(waiting):
            show(i, len(waiting))
            self.score(number, folder)

    def rest_now(self) -> None:
        """Score the remaining snapshots while the run goes on. Without a target an error in `evaluate` only warns."""
        if self.targets:
            self.rest()
        elif self._failure is None:
            try:
                self.rest()
            except Exception as error:  # of the user's own function
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Stop scoring until the end; the final model is scored after it is written."""
        self._failure = error
        if not self.targets:
            self._warn(f"snapshots are scored no more before the end: {type(error).__name__}: {error}")

    def _whole(self, folder: Path) -> bool:
        found = snapshot.parts_present(folder)
        buffers = bool(persistent_buffers(self.module))
        layout, workers = self.strategy.layout, set(range(self.workers))
        servers = set(range(self.workers, self.workers + layout.servers))
        left = set(range(self.workers - len(servers))) if layout.promotes else workers
        for where in (phase.model_location for phase in layout.phases()):
            wanted = {"servers": servers, "apart": workers}.get(where, {0})
            working = left if where == "servers" else workers
            if (wanted | (working if buffers else set())) <= found and snapshot.holds_x(folder, min(wanted)):
                return True
        return False

    def _record(self, scored: Scored) -> None:
        self._file.append(scored)
        self.reached = self.reached or any(t.reached(scored.metrics) for t in self.targets)

    # During the run.

    def start(self, *, apart: bool = False) -> None:
        """Score snapshots as they appear; `apart`, in another process, for a caller that trains in this one."""
        if self.evaluate is None or (self.afterwards and not self.targets):
            return
        if apart:
            self._aside = BackgroundProcess(self._answer)
        follow = partial(self._follow, TorchSettings.current())
        self._thread = threading.Thread(target=follow, name="scorer", daemon=True)
        self._thread.start()

    def stop(self, *, wait: bool = True) -> None:
        """End the thread and the process; `wait` until the snapshot under way is scored."""
        self._halt.set()
        if not wait and self._aside is not None:
            self._aside.kill()
        if self._thread is not None:
            if not wait and self._aside is None:
                self._interrupt(self._thread)
            self._thread.join(None if wait or self._aside is not None else _UNWIND)
            self._thread = None
            torch.set_num_threads(torch.get_num_threads())  # new threads then use as many again as this one
        if self._aside is not None:
            self._aside.close()
            self._aside = None

    def _interrupt(self, thread: threading.Thread) -> None:
        """Raise an exception in the thread, where it evaluates.

        A thread that still computes with torch when the interpreter ends would abort the whole process.
        """
        with self._recording:  # a score that is being written is written whole
            if not thread.is_alive():  # another thread may have its number by now
                return
            number, error = ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_ScoringStopped)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(number, error)

    def target_reached(self) -> bool:
        """Return whether a target was reached; raise the thread's error. The supervisor calls this periodically."""
        if self._failure is not None and self.targets:
            raise self._failure
        if self._thread is not None and time.monotonic() - self._tidied > _TIDY:
            self._tidied = time.monotonic()
            self._give_up_some()
        return self.reached

    def _follow(self, settings: TorchSettings) -> None:
        settings.apply()  # the default device, for one, holds in the caller's thread only
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        torch.set_num_threads(1)
        try:
            while not self._halt.wait(_PROMPT if self.targets else _PATIENT):
                while not self._halt.is_set() and (chosen := self._next()) is not None:
                    self.score(*chosen)
        except _ScoringStopped:
            pass
        except Exception as error:  # of the user's own function
            if not self._halt.is_set():
                self._give_up(error)
        finally:
            self._now = None

    def _next(self) -> tuple[int, Path] | None:
        """Return the first complete snapshot that waits."""
        with self._choosing:
            chosen = next(((n, folder) for n, folder in self.ready() if self._whole(folder)), None)
            self._now = None if chosen is None else chosen[0]
            return chosen

    def _give_up_some(self) -> None:
        """Remove every second waiting snapshot except the newest, if they take too much room."""
        with self._choosing:
            waiting = [(n, folder) for n, folder in self.ready() if n != self._now]
            if self.keep or len(waiting) <= FEWEST or _size(waiting[0][1]) * len(waiting) <= ROOM:
                return
            given_up = [(n, folder) for n, folder in waiting[-2::-2] if self._whole(folder)]
            for number, folder in given_up:
                self.done.add(number)
                shutil.rmtree(folder, ignore_errors=True)
        if given_up and not any(w.startswith("snapshots come") for w in self.warnings):
            self._warn(
                f"snapshots come faster than they are scored, and {len(waiting)} waited: every second one is removed "
                "without a score. Evaluate less often, or on fewer samples."
            )

    def _warn(self, message: str) -> None:
        self.warnings.append(message)
        print(f"warning: {message}", file=sys.stderr)


def _numbers(found: Mapping[str, tuple[str, Any]]) -> dict[str, float]:
    """Return the scores by name, from (place, value) pairs; raise `ConfigError` about all that are no numbers."""
    figures = {name: _number(value) for name, (_, value) in found.items()}
    if wrong := [found[name] for name, figure in figures.items() if figure is None]:
        raise ConfigError([Problem(where, _shown(value), _expected(where, value)) for where, value in wrong])
    return {name: figure for name, figure in figures.items() if figure is not None}


def _number(value: Any) -> float | None:
    """Return a value as a float; None for text, None, and several numbers."""
    if isinstance(value, str | bytes):
        return None
    try:
        return float(value.item() if isinstance(value, np.ndarray) else value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _shown(value: Any) -> Any:
    shape = getattr(value, "shape", None)
    return value if shape is None else f"{type(value).__name__.lower()} of shape {tuple(shape)}"


def _expected(where: str, value: Any) -> str:
    if where.endswith("]"):
        return "must be a number: evaluate gives a dict of numbers by name"
    missing = ": does evaluate end without `return`?" if value is None else ""
    return f"must be a number, or a dict of numbers such as {{'accuracy': 0.9}}{missing}"


def _size(folder: Path) -> int:
    """Return the bytes of the files in a folder; files that are removed meanwhile do not count."""
    total = 0
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                total += path.stat().st_size
    return total
