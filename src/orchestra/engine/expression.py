# SPDX-License-Identifier: Apache-2.0
"""Strategies, optimizers and schedules as text: `slowmo(tau=12)`, `lars(lr=0.5)`, `warmup(epochs=2, factor=8)`.

Text is read with `ast` against a vocabulary and never evaluated. A bare name means its defaults.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any, Literal, get_origin, get_type_hints

from orchestra.core.strategy import Strategy
from orchestra.engine import script_names
from orchestra.engine.fields import check_fields, mismatch
from orchestra.errors import ConfigError, Problem, nearest
from orchestra.model.flat_optimizer import ELEMENTWISE, Factory
from orchestra.model.optimizers import LAMB, LARS
from orchestra.model.schedules import CURVES, Curve
from orchestra.strategies.catalogue import ABSENT, PARTS, row_of, rows
from orchestra.strategies.parameter_server.consistency import Consistency

_LONGEST = 1000  # characters of an expression


@dataclass(frozen=True)
class _Vocabulary:
    """The names that one kind of expression may use."""

    what: str
    example: str
    known: dict[str, Callable[..., Any]]
    make: Callable[[Callable[..., Any], dict[str, Any]], Any] = lambda cls, arguments: cls(**arguments)

    def options(self, name: str) -> list[str]:
        """Return the names of an entry's arguments; the first one serves as an example."""
        return [option for option in inspect.signature(self.known[name]).parameters if option != "params"]

    def takes_words(self, name: str, option: str) -> bool:
        """Return whether an option takes one of a few words."""
        entry = self.known[name]
        return dataclasses.is_dataclass(entry) and get_origin(get_type_hints(entry).get(option)) is Literal

    def demand(self, name: str, option: str) -> str | None:
        """Return what an option must be, if it is a number or a boolean."""
        entry = self.known[name]
        if not dataclasses.is_dataclass(entry):
            return _demand_by_default(inspect.signature(entry).parameters[option].default)
        (field,) = (f for f in dataclasses.fields(entry) if f.name == option)
        hint, least, most = get_type_hints(entry)[option], field.metadata.get("least"), field.metadata.get("most")
        message = mismatch("a word", hint)
        if message is None or "number" not in message:
            return None if hint is not bool else "must be True or False"
        limits = {(True, True): f", {least} to {most}", (True, False): f", at least {least}"}
        example = f", such as {option}={default}" if (default := _default(field)) is not None else ""
        return message + limits.get((least is not None, most is not None), "") + example

    def refuse(self, text: str, message: str) -> ConfigError:
        """Return an error about a text."""
        return ConfigError([Problem(self.what, text, message)])


def names() -> dict[str, type[Any]]:
    """Return every name that a strategy's text may use, including classes of the running script."""
    found = {name: row.strategy for row in rows() for name in row.names}
    return _in_script() | found | _by_name(*PARTS)


def _in_script() -> dict[str, type[Any]]:
    """Return the strategies defined in the running program and in the files given on the command line."""
    found = [value for names in (vars(sys.modules["__main__"]), *script_names.current()) for value in [*names.values()]]
    return _by_name(*(v for v in found if isinstance(v, type) and issubclass(v, Strategy) and is_dataclass(v)))


def unknown(name: str, known: Iterable[str]) -> str:
    """Return the message for a name that no strategy or part has."""
    return ABSENT.get(name.lower()) or f"no strategy or part is called {name!r}; {nearest(name, known)}"


def parse(text: str) -> Strategy[Any]:
    """Read a strategy.

    >>> parse("slowmo(tau=4)").tau
    4
    """
    words = _Vocabulary("strategy", "slowmo(tau=12, beta=0.6)", {**names()})
    value = _read(text, words)
    if isinstance(value, Consistency):
        raise words.refuse(text, f"is not a strategy but a consistency of parameter servers: ps(consistency={text})")
    if not isinstance(value, Strategy):
        raise words.refuse(text, f"is not a strategy; {nearest(text, [row.name for row in rows()])}")
    if unfit := [*check_fields(value, "strategy")]:
        raise ConfigError(unfit)
    return value


def parse_optimizer(text: str) -> Factory:
    """Read an optimizer; return a function that makes it from parameters.

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
    """Return the shortest text that reads back as this strategy or schedule.

    >>> show(parse("slowmo( tau = 12, beta=0.6 )"))
    'slowmo(beta=0.6)'
    """
    given = []
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if value != _default(field):
            given.append(f"{field.name}={show(value) if dataclasses.is_dataclass(value) else repr(value)}")
    name = (row_of(part).short if isinstance(part, Strategy) else None) or type(part).__name__.lower()
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
        no_such = f"no {words.what} is called {name!r}; {nearest(name, words.known)}"
        raise words.refuse(text, unknown(name, words.known) if words.what == "strategy" else no_such)
    options, given = words.options(key), [(str(k.arg), k.value) for k in keywords]
    where = f"{words.what} {name}"
    problems = [
        Problem(f"{where}.{o}", _plain(v), f"is not an option; {nearest(o, options) if options else 'there are none'}")
        for o, v in given
        if o not in options
    ]
    if problems:
        raise ConfigError(problems)
    arguments: dict[str, Any] = {}
    for option, value in given:
        try:
            arguments[option] = _argument(name, option, value, text, words)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return words.make(words.known[key], arguments)


def _argument(name: str, option: str, value: ast.expr, text: str, words: _Vocabulary) -> Any:
    # An option that takes one of a few words takes them without quotes, even if a part has the same name.
    if isinstance(value, ast.Name) and words.takes_words(name.lower(), option):
        return value.id
    try:
        return _build(value, text, words)
    except ConfigError as error:
        demand, where = words.demand(name.lower(), option), f"{words.what} {name}.{option}"
        if demand is not None:
            raise ConfigError([Problem(where, ast.unparse(value), demand)]) from None
        # A problem of the whole text becomes one of this option; a part's own options already have their place.
        own = [p if p.where != words.what else Problem(where, ast.unparse(value), p.message) for p in error.problems]
        raise ConfigError(own) from None


def _plain(tree: ast.expr) -> Any:
    """Return the value of a literal; of anything else its text."""
    try:
        return ast.literal_eval(tree)
    except (ValueError, TypeError):
        return ast.unparse(tree)


def _demand_by_default(default: Any) -> str | None:
    """Return what an option with this default must be."""
    match default:
        case bool():
            return "must be True or False"
        case int() | float():
            return f"must be a number, such as {default}"
        case tuple():
            return f"must be numbers, such as {default}"
    return None


def _example(name: str, words: _Vocabulary) -> str:
    options = words.options(name.lower()) if name.lower() in words.known else []
    return f"{name}({options[0]}=...)" if options else f"{name}()"
