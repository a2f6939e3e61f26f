# SPDX-License-Identifier: Apache-2.0
"""Reading run folders in any state: still running, cut short, damaged, or not written by orchestra at all.

Valid parts are used; for invalid ones the reason is reported. No value in a file is trusted to have the right type.
"""

from __future__ import annotations

import math
import operator
import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from orchestra.formatting import plural
from orchestra.runs import dropped_events, files, run_lock
from orchestra.runs.events import (
    Event,
    Logged,
    NodeEnded,
    NodeStarted,
    Reconnected,
    Sampled,
    Saved,
    Scored,
    Skipped,
    SnapshotTaken,
    Stepped,
    Thinned,
    read,
)
from orchestra.runs.facts import Facts, events_of, facts_from
from orchestra.runs.status import name_of

LARGEST = 1e60  # of any number: larger than every loss, and small enough that its square is still finite
NONSENSE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)  # raised by invalid figures
_MOST_NODES = 100_000
_RANGES = {
    "workers": (1, _MOST_NODES),
    "servers": (0, _MOST_NODES),
    "seed": (-(2**64), 2**64),
    "parameters": (0, 2**64),
}
_LONGEST = 500  # characters of a text
_MARK = re.compile(r"config\.json|events-.*\.jsonl", re.DOTALL)  # files that mark a run folder


@dataclass(frozen=True)
class RunRecord:
    """The content of a run folder."""

    path: Path
    name: str
    config: dict[str, Any]
    facts: Facts
    events: Sequence[Event]
    scores: Sequence[Scored]
    over: bool  # it ran to its end
    fate: str  # how it ended, if it will never reach its end: stopped, failed or died
    warnings: tuple[str, ...]

    @property
    def note(self) -> dict[str, Any]:
        """Arguments of the command line that started the run."""
        return _mapping(self.config.get("note"))

    @property
    def options(self) -> dict[str, Any]:
        """Options as they were given."""
        return _mapping(self.note.get("options"))


class Unreadable(Exception):
    """The folder is not a run, or its files are too damaged to use."""


def find(paths: Iterable[Path]) -> list[Path]:
    """Return the run folders at and below these paths, in order, each once."""
    found: dict[Path, Path] = {}
    for path in paths:
        folders = (Path(folder) for folder, _, files in os.walk(path) if any(map(_MARK.fullmatch, files)))
        for folder in sorted(folders):
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def load(path: Path, events: Sequence[Event] | None = None) -> RunRecord:
    """Read a run folder; raises `Unreadable` with the reason. Events that are given must be valid, and are not read."""
    config = config_of(path)
    ending = object_in(path / "ending.json") if (path / "ending.json").exists() else {}
    if events is None:
        events = [*sound_ones(events_of(path), config)]
    scores = _scores(path)
    try:
        facts = facts_from(config, ending, events, scores)
    except NONSENSE as error:
        raise Unreadable(f"its figures make no sense: {error}") from error
    warnings = ending.get("warnings")
    said = map(str, warnings) if isinstance(warnings, list) else ()
    return RunRecord(
        path=path,
        name=str(path),
        config=config,
        facts=facts,
        events=events,
        scores=scores,
        over=bool(ending),
        fate="" if ending else run_lock.ask(path).fate,
        warnings=(*said, *_reunions(events, facts.workers)),
    )


def _reunions(events: Iterable[Event], workers: int) -> Iterator[str]:
    """Yield a sentence for each connection that broke and was replaced, as reported by one of its two ends."""
    breaks = defaultdict[tuple[int, int], list[float]](list)
    for e in events:
        if isinstance(e, Reconnected):
            breaks[e.node, e.peer].append(e.seconds)
    for (node, peer), seconds in breaks.items():
        if node < peer or (peer, node) not in breaks:
            yield (
                f"the connection between {name_of(node, workers)} and {name_of(peer, workers)} broke "
                f"{plural(len(seconds), 'time')} and was replaced within {max(seconds):.1f} s; no message lost."
            )


def config_of(path: Path) -> dict[str, Any]:
    """Return the configuration of a run; raises `Unreadable` with the reason."""
    if not (path / "config.json").exists():
        raise Unreadable("it has no config.json")
    config = object_in(path / "config.json")
    if not config:
        raise Unreadable("its config.json is damaged")
    if not isinstance(config.get("strategy"), str):
        raise Unreadable("its config.json names no strategy")
    for name, (least, most) in _RANGES.items():
        if type(number := config.get(name)) is not int or not least <= number <= most:
            raise Unreadable(f"its config.json has no sensible whole number of {name}")
    return config | {"cluster": _mapping(config.get("cluster")), "note": _mapping(config.get("note"))}


def own_budget(config: Mapping[str, Any]) -> list[str] | None:
    """Return the budget without the time limit of a comparison, which follows from the speed of the other runs."""
    budget = config.get("budget")
    if not isinstance(budget, list):
        return None
    limited = _mapping(config.get("note")).get("patience") is not None
    return [text for text in map(str, budget) if not (limited and text.startswith("seconds="))]


def object_in(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if the file does not hold one."""
    try:
        return _mapping(files.read_json(path, errors="replace"))
    except (OSError, ValueError):
        return {}


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


# An event of a known kind may still hold values of any type.

_KINDS = (NodeStarted, Stepped, Sampled, Logged, Skipped, Reconnected, SnapshotTaken, Scored, Saved, NodeEnded, Thinned)
_NUMBERS: dict[type[Any], Callable[[Any], tuple[float, ...]]] = {
    cls: operator.attrgetter(*(f.name for f in fields(cls) if f.type in ("int", "float"))) for cls in _KINDS
}


def sound(event: Event) -> bool:
    """Return whether all numbers of an event are numbers in a sensible range, and all names are text."""
    try:
        if not (event.t >= 0 and sum(map(abs, _NUMBERS[type(event)](event))) < LARGEST):
            return False
        if isinstance(event, Stepped):
            return event.loss is None or abs(event.loss) < LARGEST
        if isinstance(event, Logged):
            return isinstance(event.name, str)
        if isinstance(event, Thinned):
            return dropped_events.sound(event)
        return not isinstance(event, NodeEnded) or all(
            int(to) >= 0 and 0 <= n < LARGEST for to, n in event.sent_to.items()
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        return False


def sound_ones(events: Iterable[Event], config: dict[str, Any]) -> Iterator[Event]:
    """Keep the valid events of nodes of this run."""
    nodes = range(config["workers"] + config["servers"])
    return (e for e in events if sound(e) and _node(e) in nodes)


def _node(event: Event) -> int:
    return -1 if isinstance(event, Scored) else event.node


def _scores(path: Path) -> list[Scored]:
    found = (cleaned(e) for e in read(path / "scores.jsonl") if isinstance(e, Scored) and sound(e))
    return sorted(found, key=lambda s: s.number)


def cleaned(score: Scored) -> Scored:
    """Return a score without values that are not numbers."""
    return Scored(score.t, score.step, score.samples, score.number, _figures(score.metrics))


def _figures(metrics: Any) -> dict[str, float]:
    return {str(n): v for n, v in _mapping(metrics).items() if isinstance(v, int | float) and abs(v) < LARGEST}


# Text is not trusted either.


def harmless(value: Any) -> Any:
    r"""Replace text that could mislead a reader, and replace by null what JSON cannot hold.

    >>> harmless({"a": "x\u202ey", "b": float("inf")})
    {'a': 'x\\u202ey', 'b': None}
    """
    match value:
        case dict():
            return {harmless(str(key)): harmless(v) for key, v in value.items()}
        case list() | tuple():
            return [harmless(v) for v in value]
        case float() if not math.isfinite(value):
            return None
        case str():
            return visible(value)
    return value


def visible(text: str) -> str:
    """Write out direction marks, control characters and lone surrogates; cut text that is too long."""
    cut = text if len(text) <= _LONGEST else text[:_LONGEST] + "…"
    return cut if cut.isascii() and cut.isprintable() else "".join(map(_visible, cut))


def _visible(character: str) -> str:
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    return f"\\u{ord(character):04x}" if hidden else character
