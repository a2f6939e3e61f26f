# SPDX-License-Identifier: Apache-2.0
"""Results of tries, kept in the folder of the race: a command that was stopped continues with them.

The key of a try has all that its result depends on: the script's text and that of the modules beside it, its arguments,
the options, the target, and this package's version.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestra._version import __version__
from orchestra.cli import repeat, summary
from orchestra.cli.sources import Source
from orchestra.runs.reading import object_in

if TYPE_CHECKING:
    from orchestra.cli.race import Race
    from orchestra.cli.tuning_plan import TuningPlan

NAME = "tuning.json"


def key(race: Race, strategy: str, seed: int) -> str:
    """Return the key of a try."""
    target = [race.target.metric, race.target.value]
    options = race.options_of(strategy, seed).given()
    source = race.source
    return json.dumps([__version__, source.name, _digest(source), source.args, race.lab, target, options])


def _digest(source: Source) -> str:
    """Return a digest of a script and of the modules beside it that it imports, directly or not."""
    if source.path is None:
        return ""
    files = [source.path]
    for path in files:  # the list grows
        files += [other for other in _imported(path, source.path.parent) if other not in files]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:16]


def _imported(path: Path, folder: Path) -> Iterator[Path]:
    """Yield the files of modules in a folder that a file imports by name."""
    names: set[str] = set()
    for part in ast.walk(ast.parse(path.read_bytes())):
        match part:
            case ast.Import(names=aliases):
                names |= {alias.name for alias in aliases}
            case ast.ImportFrom(module=module, names=aliases, level=level):
                here = [*path.parent.relative_to(folder).parts][: None if level < 2 else 1 - level] if level else []
                base = ".".join([*here, *([module] if module else [])])
                names |= {base, *(f"{base}.{alias.name}".lstrip(".") for alias in aliases)}
    for name in sorted(names):
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            stem = folder.joinpath(*parts[:i])
            yield from (found for found in (stem.with_suffix(".py"), stem / "__init__.py") if found.is_file())


def read(out: Path) -> dict[str, dict[str, Any]]:
    """Return the tries that an earlier call kept in this folder."""
    found = object_in(out / NAME).get("tries")
    return {key: value for key, value in found.items() if _is_record(value)} if isinstance(found, dict) else {}


def _is_record(value: Any) -> bool:
    known = {"seconds", "curve", "failed", "steps", "collapsed"}
    return isinstance(value, dict) and known == {*value} and isinstance(value["curve"], list)


def read_plan(race: Race, *known_by: Any) -> dict[str, Any]:
    """Return the number and length of tries of an earlier call of the same command; empty if there was none."""
    found = object_in(race.out / NAME).get("plan")
    if not isinstance(found, dict) or found.pop("of", None) != _plan_of(race, known_by):
        return {}
    return found if {*found} == {"first", "real", "widenings"} else {}


def plan_record(race: Race, plan: TuningPlan, *known_by: Any) -> dict[str, Any]:
    """Return the record that `read_plan` reads."""
    found = {"first": plan.first, "real": plan.real, "widenings": plan.widenings}
    return {"of": _plan_of(race, known_by), **found}


def _plan_of(race: Race, known_by: tuple[Any, ...]) -> str:
    return json.dumps([key(race, race.strategies[0], race.seeds), race.strategies, race.epochs, known_by])


def write(out: Path, record: dict[str, Any]) -> None:
    """Write tries and what belongs to them."""
    from orchestra.engine import checkpoint

    out.mkdir(parents=True, exist_ok=True)
    checkpoint.write_text(out / NAME, json.dumps(summary.finite(record), indent=1) + "\n")


def how_to_go_on(race: Race, tries: int) -> str:
    """Return the message after tuning was stopped, with the command that continues."""
    goes_on = repeat.going_on(race.out, target=f"{race.target.metric}={race.target.value:g}")
    if not tries or goes_on is None:
        return "stopped while strategies were tuned."
    return f"stopped while strategies were tuned. The {tries} tries so far are kept; to go on: {goes_on}"
