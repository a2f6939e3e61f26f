# SPDX-License-Identifier: Apache-2.0
"""The data of a live page: the state of its runs now, and their report, remade as they go on.

    every look      read what is new, and find the state of each run: milliseconds
    now and then    remake the whole report, runs that are over from memory: the longer it takes, the less often

Both happen in a thread of their own while a page asks for data.
"""

from __future__ import annotations

import gc
import json
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestra.live.follower import Follower
from orchestra.live.moment import RunNow, moment
from orchestra.report import curves, model, page
from orchestra.runs import reading, run_lock
from orchestra.runs.budget import Target
from orchestra.runs.reading import RunRecord

_EVERY = 0.5  # seconds between two looks
_RESTS = 4  # times as long as the last report took, until the next one
_ALONE = 15.0  # seconds without a request after which the thread pauses
_MOST_NODES = 256  # in the table of nodes
_SEARCH = 2.0  # seconds between two looks for new runs

Ending = tuple[str, float, int]  # how it ended, when, and after how many bytes of events


class PageWriter:
    """Follows the runs of some folders, and makes their report."""

    def __init__(self, paths: Sequence[Path], target: Target | None = None) -> None:
        self._paths = [*paths]
        self._target = target
        self._runs: dict[Path, Follower] = {}
        self._over: dict[Path, _Over] = {}
        self._searched = -math.inf
        self.version = 0
        self.update()

    def look(self, now: float) -> bool:
        """Read what is new at `now`, in seconds since the epoch; return whether there was anything."""
        before = len(self._runs)
        if now - self._searched > _SEARCH:
            self._searched = now
            for folder in reading.find(self._paths):
                self._follow(folder)
        looks = [run.look() for run in self._runs.values()]  # all of them, not until the first with news
        return any(looks) or len(self._runs) > before

    def update(self) -> None:
        """Remake the report."""
        self.report = model.build(self._paths, target=self._target, load=self._load, describe=self._describe)
        self.version += 1

    def moments(self, now: float) -> list[dict[str, Any]]:
        """Return the state of each run; nodes are listed only for runs that go on."""
        found = ((run, moment(run, now)) for run in self._runs.values())
        return [_brief(at) | {"changed": run.changed} for run, at in found if at is not None]

    # The events of a run that goes on are kept as they come; a run that is over is read once.

    def _follow(self, folder: Path) -> Follower:
        run = self._runs.get(folder, Follower(folder))
        is_over = _ended(run) is not None
        if folder not in self._runs or not (is_over or run.keep):  # new, or resumed
            run = self._runs[folder] = Follower(folder, keep=not is_over)
            run.look()
        return run

    def _load(self, folder: Path) -> RunRecord:
        run = self._follow(folder)
        if (ended := _ended(run)) is None and run.keep:
            return reading.load(folder, run.events)
        known = self._over.get(folder)
        return known.run if known is not None and known.ended == ended else reading.load(folder)

    def _describe(self, run: RunRecord, target: Target | None, blocks: int | None) -> dict[str, Any]:
        ended = _ended(self._runs[run.path])
        if ended is None or not (run.over or run.fate):
            return model.describe_run(run, target, blocks)
        known, asked = self._over.get(run.path), (target, blocks is None)
        if known is None or (known.ended, known.asked) != (ended, asked):
            whole = run if run.events else reading.load(run.path)
            known = _Over(ended, asked, model.without_events(whole), model.describe_run(whole, target, blocks))
            self._over[run.path] = known
            self._runs[run.path].forget()
        if blocks is not None:  # the more runs there are, the less room each has
            known.description["lanes"] = curves.coarser(known.description["lanes"], blocks)
        return {**known.description}


@dataclass(frozen=True)
class _Over:
    """The description of a run that is over; its events are not read again."""

    ended: Ending
    asked: tuple[Target | None, bool]  # for which target, and whether without a timeline
    run: RunRecord  # without its events
    description: dict[str, Any]


def _ended(run: Follower) -> Ending | None:
    """Identify the ending of a run, None while it goes on; a resumed run gets another ending."""
    try:
        return "ended", (run.folder / "ending.json").stat().st_mtime_ns, 0
    except OSError:
        fate = run_lock.ask(run.folder).fate
    return (fate, run.changed, run.size) if fate else None


def _brief(at: RunNow) -> dict[str, Any]:
    whole = at.as_dict()
    nodes = [] if at.over else whole["nodes"][:_MOST_NODES]
    shown = [{name: value for name, value in node.items() if name not in ("times", "losses")} for node in nodes]
    return {**whole, "news": whole["news"][-10:], "nodes": shown, "of": len(at.nodes)}


class PageFeed:
    """Looks and remakes the report in a thread of its own while a page asks, so that no request has to wait."""

    def __init__(self, writer: PageWriter) -> None:
        self._writer = writer
        self._asked = time.monotonic()
        self._due, self._changed, self._trouble = 0.0, False, ""
        self._wanted = threading.Event()
        self._stopped = threading.Event()
        self._answers = self._now(), page.packed(writer.report), 1
        self._thread = threading.Thread(target=self._go, name="page-feed", daemon=True)
        self._thread.start()

    def since(self) -> tuple[bytes, bytes, int]:
        """Return the state of the runs as JSON, their report compressed, and its version."""
        self._asked = time.monotonic()
        self._wanted.set()
        return self._answers

    def page(self) -> str:
        """Return the page with the report as it is now."""
        self._asked = time.monotonic()
        return page.write(self._writer.report, live=True)

    def close(self) -> None:
        """Stop the thread."""
        self._stopped.set()
        self._wanted.set()
        self._thread.join(10)

    def _now(self) -> bytes:
        writer = self._writer
        answer = {"runs": writer.moments(time.time()), "version": writer.version, "trouble": self._trouble}
        return json.dumps(reading.harmless(answer), allow_nan=False).encode()

    def _go(self) -> None:
        while not self._stopped.wait(_EVERY):
            if time.monotonic() - self._asked > _ALONE:
                self._wanted.clear()
                self._wanted.wait()
            gc.disable()  # no event is garbage, and a collection takes as long as reading them
            try:
                self._look()
                self._trouble = ""
            except Exception as error:  # a folder that is gone, or damaged files: the last report stays
                self._trouble = f"{type(error).__name__}: {error}"
            finally:
                gc.enable()
            self._answers = self._now(), *self._answers[1:]

    def _look(self) -> None:
        self._changed |= self._writer.look(time.time())
        if not self._changed or time.monotonic() < self._due:
            return
        began, self._changed = time.thread_time(), False  # processor time: other threads do not count
        self._writer.update()
        self._answers = self._answers[0], page.packed(self._writer.report), self._writer.version
        self._due = time.monotonic() + max(1.0, _RESTS * (time.thread_time() - began))
