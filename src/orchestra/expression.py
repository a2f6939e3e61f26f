# SPDX-License-Identifier: Apache-2.0
"""Strategies as text: `slowmo(tau=12)`, `ps(consistency=asp(), servers=2)`.

Text is read with `ast` against the catalogue and never evaluated. A bare name means its defaults.
"""

from __future__ import annotations

import ast
import dataclasses
import warnings
from typing import Any

from orchestra.errors import ConfigError, Problem, nearest
from orchestra.strategies import PARTS, STRATEGIES
from orchestra.strategy import Strategy

_LONGEST = 1000  # characters of an expression


def names() -> dict[str, type[Any]]:
    """Every name that may stand in an expression, short ones included; also of strategies defined elsewhere."""
    classes: list[type[Any]] = [cls for cls in Strategy.__subclasses__() if dataclasses.is_dataclass(cls)]
    classes += [*STRATEGIES, *PARTS]
    return {cls.__name__.lower(): cls for cls in classes} | {cls.short: cls for cls in STRATEGIES if cls.short}


def parse(text: str) -> Strategy[Any]:
    """Read a strategy.

    >>> parse("slowmo(tau=4)").tau
    4
    """
    if len(text) > _LONGEST:
        raise _refuse(text, f"has {len(text)} characters, which is no strategy; write it like slowmo(tau=12, beta=0.6)")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python, on odd but valid syntax
            tree = ast.parse(text.strip(), mode="eval").body
        value = _build(tree, text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _refuse(text, f"cannot be read ({error}); write it like slowmo(tau=12, beta=0.6)") from None
    if not isinstance(value, Strategy):
        raise _refuse(text, f"is not a strategy; {nearest(text, [c.__name__.lower() for c in STRATEGIES])}")
    return value


def show(part: Any) -> str:
    """The shortest text that reads back as this strategy.

    >>> show(parse("slowmo( tau = 12, beta=0.6 )"))
    'slowmo(beta=0.6)'
    """
    given = []
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if value != _default(field):
            given.append(f"{field.name}={show(value) if dataclasses.is_dataclass(value) else repr(value)}")
    name = getattr(type(part), "short", None) or type(part).__name__.lower()
    return f"{name}({', '.join(given)})" if given else name


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _build(tree: ast.expr, text: str) -> Any:
    match tree:
        case ast.Name(id=name):
            return _make(name, {}, text)
        case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords):
            if any(k.arg is None for k in keywords):
                raise _refuse(text, "** is not allowed")
            twice = {k.arg for i, k in enumerate(keywords) if k.arg in [other.arg for other in keywords[:i]]}
            if twice:
                raise _refuse(text, f"gives {', '.join(sorted(map(str, twice)))} twice")
            return _make(name, {str(k.arg): _build(k.value, text) for k in keywords}, text)
        case ast.Call(func=ast.Name(id=name)):
            raise _refuse(text, f"arguments of {name} need their names, e.g. {_example(name)}")
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return tuple(_build(e, text) for e in elements)
    try:
        return ast.literal_eval(tree)
    except (ValueError, TypeError):
        raise _refuse(text, f"{ast.unparse(tree)!r} is neither a number, a text nor a known part") from None


def _make(name: str, arguments: dict[str, Any], text: str) -> Any:
    known = names()
    if name.lower() not in known:
        raise _refuse(text, f"no strategy or part is called {name!r}; {nearest(name, known)}")
    cls = known[name.lower()]
    fields = [f.name for f in dataclasses.fields(cls)]
    unknown = [a for a in arguments if a not in fields]
    if unknown:
        raise ConfigError(
            [
                Problem(
                    f"strategy {name}.{a}",
                    arguments[a],
                    f"is not an option; {nearest(a, fields)}" if fields else "is not an option; there are none",
                )
                for a in unknown
            ]
        )
    return cls(**arguments)


def _example(name: str) -> str:
    cls = names().get(name.lower())
    fields = [f.name for f in dataclasses.fields(cls)] if cls else []
    return f"{name}({fields[0]}=...)" if fields else f"{name}()"


def _refuse(text: str, message: str) -> ConfigError:
    return ConfigError([Problem("strategy", text, message)])
