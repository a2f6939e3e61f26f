# SPDX-License-Identifier: Apache-2.0
"""What the processes of a run may say to each other about it, beside the messages of its strategy.

    anybody    a control value that has changed, that the run ends here; in a loop of one's own, that it is finished,
               and where its files are
    a member   that it is ready, has saved, is done, has failed; where it is; which file it sends
    home       where the run folder is, when to begin, how it went

Whoever has the token may speak, but a process gone astray must not take the others with it: a note of another kind,
with other fields or of another size ends the connection to whoever sent it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from orchestra.engine.control import FIELDS
from orchestra.runs.status import NodeStatus
from orchestra.worlds.sockets.wire import BadFrame

HOME = 0  # the process that keeps the run folder
LONGEST = 1 << 14  # characters of a text
ENTRIES = 1 << 10  # of a list or a dict
FIGURES = 64  # of one score
_TOGETHER = 16  # numbers that are one setting, such as Adam's β₁ and β₂

Fits = Callable[[Any], bool]


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _number(value: Any) -> bool:
    return type(value) in (int, float)


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= ENTRIES and all(map(_number, value))


def _truth(value: Any) -> bool:
    return isinstance(value, bool)


def _settings(value: Any) -> bool:
    if not isinstance(value, list) or len(value) > ENTRIES:
        return False
    return all(_truth(v) or _finite([v]) or (_finite(v) and len(v) <= _TOGETHER) for v in value)


def _finite(value: Any) -> bool:
    return _numbers(value) and all(math.isfinite(v) for v in value)


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST


def _maybe(value: Any) -> bool:
    return value is None or _text(value)


def _table(value: Any) -> bool:
    return isinstance(value, dict) and len(value) <= ENTRIES


def _status(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {*NodeStatus._fields} and all(map(_number, value.values()))


def _figures(value: Any) -> bool:
    fits = isinstance(value, dict) and 0 < len(value) <= FIGURES
    return fits and all(_text(name) and _number(figure) for name, figure in value.items())


def _like(pattern: str) -> Fits:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value, re.ASCII) is not None


_STEP = r"step-\d{8,12}"  # `checkpoint.name_of`
_FILE: dict[str, Fits] = {"path": _text, "bytes": _whole}
_ANYBODY: dict[str, dict[str, Fits]] = {
    "control": {"field": FIELDS.__contains__, "of": _whole, "value": _whole},
    "stopped": {"message": _text, "code": _whole},
    "finished": {"steps": _whole, "how": _text, "left": _maybe},
    "looked": {},
    "written": {},
    "send-state": {},
    "load-state": {},
    "state-loaded": {},
    "settings": {"name": _like(r"\w{1,64}"), "first_group": _whole, "by_group": _settings},
    "gradient": {"checksum": _whole},
    "rates": {"step": _whole, "by_group": _numbers, "clip": _number},
    "score": {"number": _whole, "t": _number, "step": _whole, "samples": _whole, "figures": _figures},
    "file": _FILE,
}
_MEMBER: dict[str, dict[str, Fits]] = {
    "far-off": {},
    "ready": {},
    "begun": {"step": _whole},
    "report": {"status": _status},
    "snapped": {"number": _whole},
    "snapshot-failed": {"step": _whole, "error": _text},
    "saved": {"step": _whole},
    "save-failed": {"step": _whole, "error": _text},
    "log-failed": {"error": _text},
    "signal": {"name": _like("SIGINT|SIGTERM")},
    "done": {"interrupted": _truth},
    "failed": {"traceback": _text},
    "refused": {"error": _like(r"\w{1,64}"), "message": _text},
}
_HOME: dict[str, dict[str, Fits]] = {
    "order": {
        "run": _text,
        "launch": _like(r"\w{1,64}"),
        "resume": lambda value: value is None or _like(_STEP)(value),
        "resumed_from": _whole,
    },
    "go": {"at": _number},
    "folder": {"path": _maybe, "mark": _text},
    "over": {"run": _text, "metrics": _table, "summary": _table, "bytes": _whole},
}


def check(source: int, said: Mapping[str, Any]) -> None:
    """Refuse what a node would not say."""
    kinds = _ANYBODY | (_HOME if source == HOME else _MEMBER)
    kind = said.get("kind")
    fields = kinds.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise BadFrame(f"node {source} sent a note of kind {_short(kind)}, which none of ours would")
    if said.get("node", source) != source:
        raise BadFrame(f"node {source} spoke in the name of node {_short(said['node'])}")
    if said.keys() - {"kind", "node"} != fields.keys():
        raise BadFrame(f"node {source} sent a note {kind!r} with {_short(sorted(said))} instead of {sorted(fields)}")
    for name, fits in fields.items():
        if not fits(said[name]):
            raise BadFrame(f"node {source} sent a note {kind!r} with {name} = {_short(said[name])}")


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
