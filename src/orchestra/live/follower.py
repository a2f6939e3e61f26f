# SPDX-License-Identifier: Apache-2.0
"""A run followed from outside: its folder is looked at again and again, and each look reads only what is new.

Files may be cut short, damaged, replaced or not ours at all: what makes no sense is passed over. A run that is resumed
forgets what came after its checkpoint, and so does whoever follows it.
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
_NEWS = 50  # of what happened last
_TAIL = 1 << 18  # bytes at the end of a node's file that hold more steps than that
_FILE = re.compile(r"events-(\d{1,6})\.jsonl")
_TOLD = ("switched", "retired")  # what strategies log once, for people
_SET = ("momentum after the switch", "rate after the switch")  # likewise, and the value matters


@dataclass(frozen=True)
class NewEvent:
    """Something that happened once."""

    t: float
    node: int | None  # None: to the run as a whole
    text: str


@dataclass
class NodeState:
    """What is known of one node."""

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
    events: list[Event] = field(default_factory=list)  # all of them, where they are kept

    def take(self, event: Event) -> NewEvent | None:
        """Learn of one event; gives what people should hear of."""
        self.began = True
        match event:
            case Stepped():
                self.step, self.epoch, self.samples, self.t = event.step, event.epoch, event.samples, event.t
                self.loss = self.loss if event.loss is None else event.loss
                self.ended = None  # a run that was resumed
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
    """One run folder. With `keep`, all events are read and kept; without, only what shows where the run is now."""

    def __init__(self, folder: Path, *, keep: bool = False) -> None:
        self.folder = folder
        self.config: dict[str, Any] | None = None
        self.ending: dict[str, Any] | None = None
        self.word = LockState(alive=None)
        self.nodes: dict[int, NodeState] = {}
        self.scores: list[Scored] = []
        self.news: deque[NewEvent] = deque(maxlen=_NEWS)
        self.changed = 0.0  # seconds since the epoch, of the last change of any file
        self.seen: deque[tuple[float, float]] = deque(maxlen=60)  # when how much of the budget was spent
        self.keep = keep
        self._scores = TailedFile(folder / "scores.jsonl")
        self._config_changed = 0.0

    def look(self) -> bool:
        """Read what is new; whether there was anything."""
        before = (self.word, self.ending, self.config)
        self._about()
        if self.config is None:
            return False
        new = self._look_at_scores()
        for number in self._files():
            new |= self._look_at(number)
        return new or before != (self.word, self.ending, self.config)

    @property
    def events(self) -> list[Event]:
        """All events so far, by node, where they are kept."""
        return [event for _, node in sorted(self.nodes.items(), key=lambda n: str(n[0])) for event in node.events]

    @property
    def size(self) -> int:
        """Bytes of the files of events and scores: two changes may have the same time."""
        return self._scores.size + sum(node.file.size for node in self.nodes.values())

    def forget(self) -> None:
        """Keep no events from now on: the run is over, and told of."""
        self.keep = False
        for pulse in self.nodes.values():
            pulse.events.clear()

    def _about(self) -> None:
        self.word = run_lock.ask(self.folder)
        self.ending = reading.object_in(self.folder / "ending.json") or None
        try:
            changed = (self.folder / "config.json").stat().st_mtime
            if changed != self._config_changed:
                self.config, self._config_changed = reading.config_of(self.folder), changed
                self.changed = max(self.changed, changed)
        except (OSError, Unreadable):
            return

    def _files(self) -> list[int]:
        """The nodes that have written anything; of those, ours."""
        try:
            names = [path.name for path in self.folder.iterdir()]
        except OSError:
            return []
        assert self.config is not None
        ours = range(self.config["workers"] + self.config["servers"])
        return sorted(n for name in names if (m := _FILE.fullmatch(name)) and (n := int(m[1])) in ours)

    def _look_at(self, number: int) -> bool:
        if number not in self.nodes:
            path = self.folder / f"events-{number}.jsonl"
            self.nodes[number] = NodeState(TailedFile(path, tail=None if self.keep else _TAIL))
        pulse = self.nodes[number]
        if pulse.file.renewed():
            self.nodes[number] = pulse = NodeState(pulse.file)
            self.news = deque((n for n in self.news if n.node != number), maxlen=_NEWS)
        self.changed = max(self.changed, pulse.file.changed)
        new = False
        assert self.config is not None
        for lines in pulse.file.lines():
            for event in reading.sound_ones(decode(lines), self.config):
                new = True
                if self.keep:
                    pulse.events.append(event)
                if not isinstance(event, Scored) and event.node == number and (news := pulse.take(event)):
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
    """Whichever run at or below a folder was begun last: a comparison makes one after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._searched = 0.0
        self.run: Follower | None = None

    def look(self, now: float) -> Follower | None:
        """The run that goes on now, with what is new."""
        if self.run is None or now - self._searched > _SEARCH:
            self._searched = now
            found = newest(self._folder)
            if found is not None and (self.run is None or found != self.run.folder):
                self.run = Follower(found)
        if self.run is not None:
            self.run.look()
        return self.run


def newest(runs: Path) -> Path | None:
    """The run below a folder that was begun last."""
    return max(reading.find([runs]), key=_begun, default=None)


def _begun(run: Path) -> float:
    try:
        return (run / "config.json").stat().st_mtime
    except OSError:
        return 0.0


def shares(steps: Sequence[Stepped]) -> dict[str, float]:
    """What part of the time between the first and the last of some steps went where."""
    kinds = ("compute", "communicate", "wait")
    if len(steps) < 2 or steps[-1].t <= steps[0].t:
        return dict.fromkeys(kinds, 0.0)
    whole = steps[-1].t - steps[0].t
    return {kind: min(1.0, max(0.0, (getattr(steps[-1], kind) - getattr(steps[0], kind)) / whole)) for kind in kinds}
