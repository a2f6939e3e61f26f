# SPDX-License-Identifier: Apache-2.0
"""What a live page is told: where its runs are now, and the report's story of them, told anew as they go on.

    every look      read what is new; where each run is: milliseconds
    now and then    the whole story, of runs that are over from memory: the longer that takes, the more seldom

Both happen in a thread of their own while somebody asks.
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
_RESTS = 4  # times as long as a story took to tell, until the next one
_ALONE = 15.0  # seconds without a question after which nobody is there
_MOST_NODES = 256  # in a table
_SEARCH = 2.0  # seconds between two looks for new runs

Ending = tuple[str, float, int]  # how, when, and after how many bytes of events


class PageWriter:
    """Some runs, and what there is to say of them."""

    def __init__(self, paths: Sequence[Path], target: Target | None = None) -> None:
        self._paths = [*paths]
        self._target = target
        self._runs: dict[Path, Follower] = {}
        self._over: dict[Path, _Over] = {}
        self._searched = -math.inf
        self.version = 0
        self.tell()

    def look(self, now: float) -> bool:
        """See what is new, at `now`, in seconds since the epoch; whether there was anything."""
        before = len(self._runs)
        if now - self._searched > _SEARCH:
            self._searched = now
            for folder in reading.find(self._paths):
                self._follow(folder)
        looks = [run.look() for run in self._runs.values()]  # all of them, not until the first with news
        return any(looks) or len(self._runs) > before

    def tell(self) -> None:
        """The story anew."""
        self.told = model.tell(self._paths, target=self._target, load=self._load, describe=self._describe)
        self.version += 1

    def moments(self, now: float) -> list[dict[str, Any]]:
        """Where the runs are; nodes only of those that go on."""
        found = ((run, moment(run, now)) for run in self._runs.values())
        return [_brief(at) | {"changed": run.changed} for run, at in found if at is not None]

    # Of a run that goes on, events are kept as they come; one that is over is read once.

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
        if blocks is not None:  # the more runs there are, the less room has each
            known.told["lanes"] = curves.coarser(known.told["lanes"], blocks)
        return {**known.told}


@dataclass(frozen=True)
class _Over:
    """What is told of a run that is over, and was read for the last time."""

    ended: Ending
    asked: tuple[Target | None, bool]  # to which target, and whether without a timeline
    run: RunRecord  # without its events
    told: dict[str, Any]


def _ended(run: Follower) -> Ending | None:
    """Which ending a run has, or which end it found: one that is resumed gets another."""
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
    """Looks and tells in a thread of its own for as long as somebody asks, so that nobody who asks has to wait."""

    def __init__(self, teller: PageWriter) -> None:
        self._teller = teller
        self._asked = time.monotonic()
        self._due, self._news, self._trouble = 0.0, False, ""
        self._wanted = threading.Event()
        self._stopped = threading.Event()
        self._answers = self._now(), page.packed(teller.told), 1
        self._thread = threading.Thread(target=self._go, name="telling", daemon=True)
        self._thread.start()

    def since(self) -> tuple[bytes, bytes, int]:
        """Where the runs are, their story compressed, and its version."""
        self._asked = time.monotonic()
        self._wanted.set()
        return self._answers

    def page(self) -> str:
        """The page as it begins."""
        self._asked = time.monotonic()
        return page.write(self._teller.told, live=True)

    def close(self) -> None:
        """Tell no more."""
        self._stopped.set()
        self._wanted.set()
        self._thread.join(10)

    def _now(self) -> bytes:
        teller = self._teller
        answer = {"runs": teller.moments(time.time()), "version": teller.version, "trouble": self._trouble}
        return json.dumps(reading.harmless(answer), allow_nan=False).encode()

    def _go(self) -> None:
        while not self._stopped.wait(_EVERY):
            if time.monotonic() - self._asked > _ALONE:
                self._wanted.clear()
                self._wanted.wait()
            gc.disable()  # none of so many events is garbage, and looking for some takes as long as reading them
            try:
                self._look()
                self._trouble = ""
            except Exception as error:  # a folder that is gone, or files that nobody foresaw: what was told stays
                self._trouble = f"{type(error).__name__}: {error}"
            finally:
                gc.enable()
            self._answers = self._now(), *self._answers[1:]

    def _look(self) -> None:
        self._news |= self._teller.look(time.time())
        if not self._news or time.monotonic() < self._due:
            return
        began, self._news = time.thread_time(), False  # not what others had of the processor meanwhile
        self._teller.tell()
        self._answers = self._answers[0], page.packed(self._teller.told), self._teller.version
        self._due = time.monotonic() + max(1.0, _RESTS * (time.thread_time() - began))
