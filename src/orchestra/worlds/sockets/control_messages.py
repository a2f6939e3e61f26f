# SPDX-License-Identifier: Apache-2.0
"""The control messages of a run: their kinds and fields, which are checked when they are received.

    any process     a control value that has changed, or the end of the run; in a loop of the user's own, that it has
                    finished, and where its files are
    a participant   that it is ready, has saved, is done, has failed; its status; a file that it sends
    process 0       where the run folder is, when to begin, the outcome

All processes have the token, but a faulty one must not bring down the others: a message of another kind, with other
fields or of another size ends the connection to its sender.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from orchestra.engine.control import FIELDS
from orchestra.runs.status import NodeStatus
from orchestra.worlds.sockets.wire import BadFrame

COORDINATOR = 0  # the process that keeps the run folder
LONGEST = 1 << 14  # characters of a text
ENTRIES = 1 << 10  # of a list or a dict
FIGURES = 64  # of one score
_TUPLE = 16  # numbers that are one setting, such as Adam's β₁ and β₂

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
    return all(_truth(v) or _finite([v]) or (_finite(v) and len(v) <= _TUPLE) for v in value)


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
_ANY: dict[str, dict[str, Fits]] = {
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
_PARTICIPANT: dict[str, dict[str, Fits]] = {
    "not-shared": {},
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
_COORDINATOR: dict[str, dict[str, Fits]] = {
    "assignment": {
        "run": _text,
        "launch": _like(r"\w{1,64}"),
        "resume": lambda value: value is None or _like(_STEP)(value),
        "resumed_from": _whole,
    },
    "go": {"at": _number},
    "folder": {"path": _maybe, "mark": _text},
    "outcome": {"run": _text, "metrics": _table, "summary": _table, "bytes": _whole},
}


def check(source: int, message: Mapping[str, Any]) -> None:
    """Refuse a message that node `source` would not send."""
    kinds = _ANY | (_COORDINATOR if source == COORDINATOR else _PARTICIPANT)
    kind = message.get("kind")
    fields = kinds.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise BadFrame(f"node {source} sent a control message of unknown kind {_short(kind)}")
    if message.get("node", source) != source:
        raise BadFrame(f"node {source} sent a message in the name of node {_short(message['node'])}")
    if message.keys() - {"kind", "node"} != fields.keys():
        found = _short(sorted(message))
        raise BadFrame(f"node {source} sent a message {kind!r} with {found} instead of {sorted(fields)}")
    for name, fits in fields.items():
        if not fits(message[name]):
            raise BadFrame(f"node {source} sent a message {kind!r} with {name} = {_short(message[name])}")


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
