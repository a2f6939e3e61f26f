# SPDX-License-Identifier: Apache-2.0
"""Strategies, optimizers and schedules as text: `slowmo(tau=12)`, `lars(lr=0.5)`, `warmup(epochs=2, factor=8)`.

Text is read with `ast` against a vocabulary and never evaluated. A bare name means its defaults.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_origin, get_type_hints

from orchestra.errors import ConfigError, Problem, nearest
from orchestra.inner import ELEMENTWISE, Factory
from orchestra.optimizers import LAMB, LARS
from orchestra.schedules import CURVES, Curve
from orchestra.strategies import PARTS, STRATEGIES
from orchestra.strategy import Strategy

_LONGEST = 1000  # characters of an expression


@dataclass(frozen=True)
class _Vocabulary:
    """What may stand in one kind of expression."""

    what: str
    example: str
    known: dict[str, Callable[..., Any]]
    make: Callable[[Callable[..., Any], dict[str, Any]], Any] = lambda cls, arguments: cls(**arguments)

    def options(self, name: str) -> list[str]:
        """The names of an entry's arguments, first the one to show."""
        return [option for option in inspect.signature(self.known[name]).parameters if option != "params"]

    def takes_words(self, name: str, option: str) -> bool:
        """Whether an option takes one of a few words."""
        entry = self.known[name]
        return dataclasses.is_dataclass(entry) and get_origin(get_type_hints(entry).get(option)) is Literal

    def refuse(self, text: str, message: str) -> ConfigError:
        """An error about a text."""
        return ConfigError([Problem(self.what, text, message)])


def names() -> dict[str, type[Any]]:
    """Every name that may stand in a strategy, short ones included; also of strategies defined elsewhere."""
    classes: list[type[Any]] = [cls for cls in Strategy.__subclasses__() if dataclasses.is_dataclass(cls)]
    classes += [*STRATEGIES, *PARTS]
    return _by_name(*classes) | {cls.short: cls for cls in STRATEGIES if cls.short}


def parse(text: str) -> Strategy[Any]:
    """Read a strategy.

    >>> parse("slowmo(tau=4)").tau
    4
    """
    words = _Vocabulary("strategy", "slowmo(tau=12, beta=0.6)", {**names()})
    value = _read(text, words)
    if not isinstance(value, Strategy):
        raise words.refuse(text, f"is not a strategy; {nearest(text, [c.__name__.lower() for c in STRATEGIES])}")
    return value


def parse_optimizer(text: str) -> Factory:
    """Read an optimizer, as what makes it from parameters.

    >>> parse_optimizer("sgd(lr=0.1)").keywords
    {'lr': 0.1}
    """
    words = _Vocabulary("optimizer", "lars(lr=0.5)", {**_by_name(*ELEMENTWISE, LARS, LAMB)}, _partial)
    value = _read(text, words)
    if not isinstance(value, partial):
        raise words.refuse(text, f"is not an optimizer; write it like {words.example}")
    return value


def parse_schedule(text: str) -> Curve:
    """Read a schedule.

    >>> parse_schedule("warmup(epochs=2, factor=8)")(1.0)
    4.5
    """
    words = _Vocabulary("schedule", "warmup(epochs=2, factor=8)", {**_by_name(*CURVES)})
    value = _read(text, words)
    if not isinstance(value, Curve):
        raise words.refuse(text, f"is not a schedule; write it like {words.example}")
    return value


def show(part: Any) -> str:
    """The shortest text that reads back as this strategy or schedule.

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


def _by_name(*classes: type[Any]) -> dict[str, type[Any]]:
    return {cls.__name__.lower(): cls for cls in classes}


def _partial(cls: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    return partial(cls, **arguments)


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _read(text: str, words: _Vocabulary) -> Any:
    if len(text) > _LONGEST:
        why = f"has {len(text)} characters, which is no {words.what}; write it like {words.example}"
        raise words.refuse(text, why)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python, on odd but valid syntax
            tree = ast.parse(text.strip(), mode="eval").body
        return _build(tree, text, words)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise words.refuse(text, f"cannot be read ({error}); write it like {words.example}") from None


def _build(tree: ast.expr, text: str, words: _Vocabulary) -> Any:
    match tree:
        case ast.Name(id=name):
            return _make(name, [], text, words)
        case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords):
            if any(k.arg is None for k in keywords):
                raise words.refuse(text, "** is not allowed")
            twice = {k.arg for i, k in enumerate(keywords) if k.arg in [other.arg for other in keywords[:i]]}
            if twice:
                raise words.refuse(text, f"gives {', '.join(sorted(map(str, twice)))} twice")
            return _make(name, keywords, text, words)
        case ast.Call(func=ast.Name(id=name)):
            raise words.refuse(text, f"arguments of {name} need their names, e.g. {_example(name, words)}")
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return tuple(_build(e, text, words) for e in elements)
    try:
        return ast.literal_eval(tree)
    except (ValueError, TypeError):
        raise words.refuse(text, f"{ast.unparse(tree)!r} is neither a number, a text nor a known part") from None


def _make(name: str, keywords: list[ast.keyword], text: str, words: _Vocabulary) -> Any:
    key = name.lower()
    if key not in words.known:
        kind = "strategy or part" if words.what == "strategy" else words.what
        raise words.refuse(text, f"no {kind} is called {name!r}; {nearest(name, words.known)}")
    arguments: dict[str, Any] = {}
    for option, value in ((str(k.arg), k.value) for k in keywords):
        # An option that takes one of a few words takes them without quotes, also where a part is called so.
        word = isinstance(value, ast.Name) and words.takes_words(key, option)
        arguments[option] = ast.unparse(value) if word else _build(value, text, words)
    options = words.options(key)
    if unknown := [option for option in arguments if option not in options]:
        raise ConfigError(
            [
                Problem(
                    f"{words.what} {name}.{option}",
                    arguments[option],
                    f"is not an option; {nearest(option, options)}" if options else "is not an option; there are none",
                )
                for option in unknown
            ]
        )
    return words.make(words.known[key], arguments)


def _example(name: str, words: _Vocabulary) -> str:
    options = words.options(name.lower()) if name.lower() in words.known else []
    return f"{name}({options[0]}=...)" if options else f"{name}()"
