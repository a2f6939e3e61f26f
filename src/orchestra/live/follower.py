# SPDX-License-Identifier: Apache-2.0
"""Follow a run from another process: read its folder again and again, each time only what is new.

Files may be cut short, damaged, replaced or unrelated to the run: lines that make no sense are skipped. A resumed run
discards its events after the checkpoint, and so does its follower.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestra.live.tail import TailedFile
from orchestra.runs import reading, run_lock
from orchestra.runs.events import Event, Logged, NodeEnded, NodeStarted, Saved, Scored, Skipped, Stepped, decode
from orchestra.runs.reading import Unreadable
from orchestra.runs.run_lock import LockState

RECENT = 32  # steps over which shares and rates are taken
HISTORY = 120  # steps of a sparkline
_SEARCH = 2.0  # seconds between two looks for newer runs
_NEWS = 50  # events that are remembered for display
_TAIL = 1 << 18  # bytes at the end of a node's file; they hold more steps than HISTORY
_FILE = re.compile(r"events-(\d{1,6})\.jsonl")
_TOLD = ("switched", "retired")  # logged once by strategies; shown with the step
_SET = ("momentum after the switch", "rate after the switch")  # logged once; shown with the value


@dataclass(frozen=True)
class NewEvent:
    """An event of the run that is shown to the user."""

    t: float
    node: int | None  # None: of the run as a whole
    text: str


@dataclass
class NodeState:
    """What the events of one node say about it."""

    file: TailedFile
    began: bool = False
    ended: NodeEnded | None = None
    step: int = 0
    epoch: float = 0.0
    samples: int = 0
    t: float = 0.0
    loss: float | None = None
    steps: deque[Stepped] = field(default_factory=lambda: deque(maxlen=HISTORY))
    stale: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))  # ages of gradients, in updates
    events: list[Event] = field(default_factory=list)  # all of them, if the follower keeps events

    def take(self, event: Event) -> NewEvent | None:
        """Update the state by one event; return what to show the user about it, if anything."""
        self.began = True
        match event:
            case Stepped():
                self.step, self.epoch, self.samples, self.t = event.step, event.epoch, event.samples, event.t
                self.loss = self.loss if event.loss is None else event.loss
                self.ended = None  # the run was resumed
                self.steps.append(event)
            case Logged():
                self.step, self.t = max(self.step, event.step), event.t
                if event.name == "staleness":
                    self.stale.append(event.value)
                elif event.name in _TOLD:
                    return NewEvent(event.t, event.node, f"{event.name} at step {event.step:,}")
                elif event.name in _SET:
                    return NewEvent(event.t, event.node, f"{event.name} {event.value:.4g}")
            case NodeEnded():
                self.ended, self.step, self.samples, self.t = event, event.step, event.samples, event.t
                return NewEvent(event.t, event.node, f"done after {event.step:,} steps")
            case Skipped():
                return NewEvent(event.t, event.node, f"gradient of step {event.step:,} not finite, not used")
            case Saved():
                return NewEvent(event.t, event.node, f"saved at step {event.step:,}")
            case NodeStarted():
                return NewEvent(event.t, event.node, f"ready after {event.setup:.1f} s")
        return None


class Follower:
    """Follows one run folder. With `keep`, it reads and keeps all events; else only what the present state needs."""

    def __init__(self, folder: Path, *, keep: bool = False) -> None:
        self.folder = folder
        self.config: dict[str, Any] | None = None
        self.ending: dict[str, Any] | None = None
        self.lock = LockState(alive=None)
        self.nodes: dict[int, NodeState] = {}
        self.scores: list[Scored] = []
        self.news: deque[NewEvent] = deque(maxlen=_NEWS)
        self.changed = 0.0  # seconds since the epoch, of the last change of any file
        self.seen: deque[tuple[float, float]] = deque(maxlen=60)  # (time, share of the budget spent)
        self.keep = keep
        self._scores = TailedFile(folder / "scores.jsonl")
        self._config_changed = 0.0

    def look(self) -> bool:
        """Read what is new; return whether there was anything."""
        before = (self.lock, self.ending, self.config)
        self._look_at_run()
        if self.config is None:
            return False
        new = self._look_at_scores()
        for number in self._node_numbers():
            new |= self._look_at_node(number)
        return new or before != (self.lock, self.ending, self.config)

    @property
    def events(self) -> list[Event]:
        """All events so far, by node; empty without `keep`."""
        return [event for _, node in sorted(self.nodes.items(), key=lambda n: str(n[0])) for event in node.events]

    @property
    def size(self) -> int:
        """Bytes of the files of events and scores; tells two changes apart that have the same time."""
        return self._scores.size + sum(node.file.size for node in self.nodes.values())

    def forget(self) -> None:
        """Drop the events and keep none from now on: the run is over, and described."""
        self.keep = False
        for node in self.nodes.values():
            node.events.clear()

    def _look_at_run(self) -> None:
        self.lock = run_lock.ask(self.folder)
        self.ending = reading.object_in(self.folder / "ending.json") or None
        try:
            changed = (self.folder / "config.json").stat().st_mtime
            if changed != self._config_changed:
                self.config, self._config_changed = reading.config_of(self.folder), changed
                self.changed = max(self.changed, changed)
        except (OSError, Unreadable):
            return

    def _node_numbers(self) -> list[int]:
        """Return the nodes that have a file of events; skip numbers that the run does not have."""
        try:
            names = [path.name for path in self.folder.iterdir()]
        except OSError:
            return []
        assert self.config is not None
        ours = range(self.config["workers"] + self.config["servers"])
        return sorted(n for name in names if (m := _FILE.fullmatch(name)) and (n := int(m[1])) in ours)

    def _look_at_node(self, number: int) -> bool:
        if number not in self.nodes:
            path = self.folder / f"events-{number}.jsonl"
            self.nodes[number] = NodeState(TailedFile(path, tail=None if self.keep else _TAIL))
        node = self.nodes[number]
        if node.file.renewed():
            self.nodes[number] = node = NodeState(node.file)
            self.news = deque((n for n in self.news if n.node != number), maxlen=_NEWS)
        self.changed = max(self.changed, node.file.changed)
        new = False
        assert self.config is not None
        for lines in node.file.lines():
            for event in reading.sound_ones(decode(lines), self.config):
                new = True
                if self.keep:
                    node.events.append(event)
                if not isinstance(event, Scored) and event.node == number and (news := node.take(event)):
                    self.news.append(news)
        return new

    def _look_at_scores(self) -> bool:
        if self._scores.renewed():
            self.scores.clear()
        new = False
        for lines in self._scores.lines():
            for event in decode(lines):
                if isinstance(event, Scored) and reading.sound(event):
                    self.scores.append(score := reading.cleaned(event))
                    figures = ", ".join(f"{reading.visible(name)} {value:.4g}" for name, value in score.metrics.items())
                    self.news.append(NewEvent(event.t, None, f"scored after {event.samples:,} samples: {figures}"))
                    new = True
        return new


class Latest:
    """Follows the run at or below a folder that began last: a comparison makes one run after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._searched = 0.0
        self.run: Follower | None = None

    def look(self, now: float) -> Follower | None:
        """Read what is new; return the follower of the latest run, None if there is no run yet."""
        if self.run is None or now - self._searched > _SEARCH:
            self._searched = now
            found = newest(self._folder)
            if found is not None and (self.run is None or found != self.run.folder):
                self.run = Follower(found)
        if self.run is not None:
            self.run.look()
        return self.run


def newest(runs: Path) -> Path | None:
    """Return the run at or below a folder that began last."""
    return max(reading.find([runs]), key=_begun, default=None)


def _begun(run: Path) -> float:
    try:
        return (run / "config.json").stat().st_mtime
    except OSError:
        return 0.0


def shares(steps: Sequence[Stepped]) -> dict[str, float]:
    """Return what share of the time between the first and the last of some steps each kind of work took."""
    kinds = ("compute", "communicate", "wait")
    if len(steps) < 2 or steps[-1].t <= steps[0].t:
        return dict.fromkeys(kinds, 0.0)
    whole = steps[-1].t - steps[0].t
    return {kind: min(1.0, max(0.0, (getattr(steps[-1], kind) - getattr(steps[0], kind)) / whole)) for kind in kinds}
