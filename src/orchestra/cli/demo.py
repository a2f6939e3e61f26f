# SPDX-License-Identifier: Apache-2.0
"""`orchestra demo`: five strategies on real data, in one go."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from orchestra.cli import again, sources, summary
from orchestra.cli import options as o
from orchestra.cli.worlds import refuse_under_launcher
from orchestra.errors import ConfigError, Problem

_STRATEGIES = ["allreduce", "ps", "ps(consistency=asp())", "localsgd(tau=8)", "slowmo(tau=8)"]
_MARK = ".orchestra-demo"


def demo(
    context: typer.Context,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where; an earlier demo there is replaced.")] = Path(
        "runs/demo"
    ),
    json_: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Race five strategies with four workers on handwritten digits: about a minute, nothing to download.

    For example:

      orchestra demo
      orchestra demo --out elsewhere --json
    """
    from orchestra.cli import compare, concluding

    refuse_under_launcher("demo")
    if not quiet:
        summary.say(
            "Five ways for four workers to train one small network on 1,437 handwritten digits, two seeds each.\n"
        )
    _make_room(out)
    shared = o.Options(workers=4)
    race = compare.prepare(sources.find("digits"), _STRATEGIES, shared, 2, None, None)
    race = compare.Race(race.source, race.recipe, race.strategies, shared, race.seeds, race.target, out)
    out.mkdir(parents=True)
    (out / _MARK).write_text("made by `orchestra demo`, which replaces it when it is run again\n", encoding="utf-8")
    again.keep(context.obj, out)
    table = race.run(quiet=quiet)
    concluding.conclude(table, out, as_json=json_, quiet=True)
    if not quiet:
        summary.say(_next(summary.nearby(out.absolute())))


_NEXT = (
    ("orchestra explain slowmo", "how SlowMo works"),
    (
        'orchestra compare digits --lr 0.01 --workers 4 --seeds 3 -s "allreduce, ps(consistency=asp())"',
        "stale gradients bear smaller steps",
    ),
    (
        'orchestra compare digits --workers 4 --partition label-sorted -s "allreduce, localsgd(tau=8)"',
        "when every worker sees other digits",
    ),
    ("orchestra run char-gpt --strategy slowmo --workers 2", "a small transformer, some minutes"),
)


def _next(out: str) -> str:
    lines = [f"\nOpen {out}/report.html in a browser: all of it in pictures. What to try next:"]
    return "\n".join([*lines, *(f"  {command}\n      {why}" for command, why in _NEXT)])


def _make_room(out: Path) -> None:
    """Remove an earlier demo, and nothing else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / _MARK).is_file():
        raise ConfigError(
            [Problem("out", str(out), "is there and was not made by `orchestra demo`: choose another --out")]
        )
    shutil.rmtree(out)
