# SPDX-License-Identifier: Apache-2.0
"""The description of a strategy or a part of one, from its module's text and its fields."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from orchestra.core.strategy import Strategy
from orchestra.engine import expression
from orchestra.errors import ConfigError, Problem
from orchestra.strategies.catalogue import PARTS, row_of, rows


@dataclass(frozen=True)
class StrategyOption:
    """A hyper-parameter."""

    name: str
    default: str
    range: str
    about: str


def find(name: str) -> type[Any]:
    """Return the strategy or part of this name; of an expression such as `slowmo(tau=4)`, the outermost one."""
    known = expression.names()
    word = name.split("(")[0].strip().lower()
    if word not in known:
        raise ConfigError([Problem("name", name, expression.unknown(word, known))])
    return known[word]


def about_alias(name: str) -> str | None:
    """Return which strategy an alias names, and what differs; None if it is no alias."""
    word = name.split("(")[0].strip().lower()
    found = next((row for row in rows() if word in row.other_names), None)
    return None if found is None else f"{word} is another name for {found.name}. {found.other_names[word]}"


def aliases_of(cls: type[Any]) -> dict[str, str]:
    """Return the aliases of a strategy, with what differs."""
    return dict(row_of(cls).other_names)


def name_of(cls: type[Any]) -> str:
    """Return the long name on the command line."""
    return cls.__name__.lower()


def short_of(cls: type[Any]) -> str | None:
    """Return the short name, if there is one."""
    return row_of(cls).short


def page(cls: type[Any]) -> str:
    """Return the module's text: citation, pseudo-code, special cases, bytes."""
    return inspect.cleandoc(sys.modules[cls.__module__].__doc__ or "")


def one_line(cls: type[Any]) -> str:
    """Return in one line what it does."""
    return inspect.cleandoc(cls.__doc__ or "").split("\n")[0]


def citation(cls: type[Any]) -> str | None:
    """Return the first paper on the page: the lines after the title, up to the next paper's."""
    paragraphs = page(cls).split("\n\n")
    if len(paragraphs) < 2 or paragraphs[1].startswith(" ") or '"' not in paragraphs[1]:
        return None
    lines: list[str] = []
    for line in paragraphs[1].split("\n"):
        if lines and '"' in line and " ".join(lines).count('"') % 2 == 0:
            break
        lines.append(line.strip())
    return " ".join(lines)


def paper(cls: type[Any]) -> str:
    """Return the first paper in a few words: `Wang et al. 2020`."""
    cited = citation(cls)
    if cited is None:
        return "-"
    authors = cited.split('"')[0].replace(" et al.", "").strip(" .")
    year = re.search(r"\b(?:19|20)\d\d\b", cited.split('"')[-1])
    several = "," in authors or " et al." in cited.split('"')[0]
    return " ".join(filter(None, [authors.split(",")[0] + (" et al." if several else ""), year and year.group()]))


def bytes_formula(cls: type[Any]) -> str | None:
    """Return the paragraph of the page that counts bytes."""
    return next((" ".join(p.split()) for p in page(cls).split("\n\n") if p.startswith("Bytes")), None)


def options(cls: type[Any]) -> list[StrategyOption]:
    """Return the hyper-parameters, in order."""
    hints = get_type_hints(cls)
    return [
        StrategyOption(
            field.name, shown(_default(field)), _range(field, hints[field.name]), field.metadata.get("about", "")
        )
        for field in dataclasses.fields(cls)
    ]


def shown(value: Any) -> str:
    """Return a value as it is written in an expression."""
    if dataclasses.is_dataclass(value):
        text = expression.show(value)
        return text if text.endswith(")") else f"{text}()"
    return str(value)


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _range(field: dataclasses.Field[Any], hint: Any) -> str:
    if get_origin(hint) is Literal:
        return ", ".join(map(str, get_args(hint)))
    found = [name_of(part) + "()" for part in alternatives(hint)]
    if found:
        return ", ".join(found)
    if isinstance(expected := get_origin(hint) or hint, type) and issubclass(expected, Strategy):
        return "a strategy"
    least, most = field.metadata.get("least"), field.metadata.get("most")
    if least is not None and most is not None:
        return f"{least:g} to {most:g}"
    return f"at least {least:g}" if least is not None else f"at most {most:g}" if most is not None else ""


def alternatives(hint: Any) -> list[type[Any]]:
    """Return the parts that fit a field."""
    return [part for part in PARTS if isinstance(hint, type) and issubclass(part, hint)]


def synchronous(cls: type[Any]) -> str:
    """Return `yes`, `no`, or with which parts."""
    for name, hint in get_type_hints(cls).items():
        answers = {name_of(part): _is_synchronous(cls(**{name: part()})) for part in alternatives(hint)}
        if len(set(answers.values())) > 1:
            return "with " + ", ".join(part for part, yes in answers.items() if yes)
    return "yes" if _is_synchronous(cls()) else "no"


def _is_synchronous(strategy: Strategy[Any]) -> bool:
    return strategy.layout.updates.synchronous


def examples(cls: type[Any]) -> list[str]:
    """Return expressions to try."""
    if cls in PARTS:
        return [
            f"{short_of(host) or name_of(host)}({_needs(host, name, cls)}{name}={name_of(cls)}())"
            for host in (row.strategy for row in rows())
            for name, hint in get_type_hints(host).items()
            if cls in alternatives(hint)
        ]
    name, hints = short_of(cls) or name_of(cls), get_type_hints(cls)
    found: list[str] = [name]
    given: list[str] = []
    for field in dataclasses.fields(cls):
        other = _another(field, hints[field.name])
        if other is not None and len(given) < 2:
            given.append(f"{field.name}={other}")
            found.append(f"{name}({', '.join(given)})")
    return found


def _needs(host: type[Any], name: str, cls: type[Any]) -> str:
    """Return what it needs beside it: a correction of staleness needs asynchronous servers."""
    return "consistency=asp(), " if name == "correction" and [*host(**{name: cls()}).problems(4)] else ""


def _another(field: dataclasses.Field[Any], hint: Any) -> str | None:
    """Return an allowed value other than the default."""
    default, least, most = _default(field), field.metadata.get("least"), field.metadata.get("most")
    for part in alternatives(hint):
        if not isinstance(default, part):
            return f"{name_of(part)}()"
    if isinstance(default, bool) or not isinstance(default, int | float):
        return None
    candidates = (default / 2, default * 2) if isinstance(default, float) else (default * 2, default // 2)
    for value in candidates:
        if value != default and (least is None or value >= least) and (most is None or value <= most):
            return f"{value:g}"
    return None
