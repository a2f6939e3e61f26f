# SPDX-License-Identifier: Apache-2.0
"""Checks that the fields of a strategy, of a part of one, or of a schedule have the right types and ranges."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

from orchestra.errors import Problem
from orchestra.strategies.catalogue import PARTS


def check_fields(part: Any, where: str) -> Iterator[Problem]:
    """Yield every field whose type or range is wrong, nested parts included."""
    hints = get_type_hints(type(part))
    for field in dataclasses.fields(part):
        value, name = getattr(part, field.name), f"{where}.{field.name}"
        message = mismatch(value, hints[field.name])
        least, most = field.metadata.get("least"), field.metadata.get("most")
        if message:
            yield Problem(name, value, message)
        elif value is None:
            continue  # the type allows it, and no range applies
        elif isinstance(value, float) and not math.isfinite(value):
            yield Problem(name, value, "must be a finite number")
        elif least is not None and value < least:
            yield Problem(name, value, f"must be at least {least:g}")
        elif most is not None and value > most:
            yield Problem(name, value, f"must be at most {most:g}")
        elif dataclasses.is_dataclass(value):
            yield from check_fields(value, name)


def mismatch(value: Any, hint: Any) -> str | None:
    """Return why a value does not fit an annotation, or None."""
    if get_origin(hint) is Literal:
        allowed = get_args(hint)
        return None if value in allowed else f"must be one of {', '.join(map(str, allowed))}"
    if isinstance(hint, types.UnionType):  # of a value and None
        found = [mismatch(value, part) for part in get_args(hint) if part is not types.NoneType]
        return None if value is None or None in found else f"{found[0]}, or None"
    expected = get_origin(hint) or hint
    if expected is float:
        return None if isinstance(value, int | float) and not isinstance(value, bool) else "must be a number"
    if expected is int:
        return None if isinstance(value, int) and not isinstance(value, bool) else "must be a whole number"
    if isinstance(expected, type) and not isinstance(value, expected):
        article = "an" if expected.__name__[0] in "AEIOU" else "a"
        return f"must be {article} {expected.__name__}{_alternatives(expected, value)}"
    if expected is tuple:
        return next((f"has {v!r}, which {why}" for v in value if (why := mismatch(v, get_args(hint)[0]))), None)
    return None


def _alternatives(kind: type[Any], value: Any) -> str:
    """List the parts of a kind, for a value that is none of them."""
    found = sorted(part.__name__.lower() for part in PARTS if issubclass(part, kind))
    quoted = ", without quotes on the command line" if isinstance(value, str) else ""
    return f": {', '.join(found)}{quoted}" if found else ""
