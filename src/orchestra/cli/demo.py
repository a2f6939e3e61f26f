# SPDX-License-Identifier: Apache-2.0
"""`orchestra demo`: real processes, then five strategies on a slow cluster and two on a fast one, in virtual time."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestra.cli import options as o
from orchestra.cli import repeat, sources, summary
from orchestra.cli.candidates import Setting
from orchestra.cli.cluster_options import refuse_under_launcher
from orchestra.errors import ConfigError, Problem

if TYPE_CHECKING:
    from orchestra.cli.race import Race
    from orchestra.cli.table import Table

_SECONDS = 10.0  # of real processes
_SLOW: dict[str, Any] = {"network": "10mbit,1ms", "compute_time": "lognormal:0.02,0.3", "straggler": "1x4"}
_FAST: dict[str, Any] = {"network": "10gbit,0.1ms", "compute_time": "lognormal:0.02,0.3"}
# Learning rates as tuned by: orchestra compare digits --sim --workers 4 --network 10mbit,1ms
#   --compute-time lognormal:0.02,0.3 --straggler 1x4 --seeds 3
#   --strategies "allreduce, ps, ps(consistency=asp), localsgd, slowmo"
# `python -m scripts.demo runs` runs it and writes docs/figures/demo.json, which a test compares with these.
_TUNED = {
    "allreduce": 0.16875,
    "ps": 0.16875,
    "ps(consistency=asp)": 0.008,
    "localsgd(tau=4)": 0.2,
    "slowmo(tau=4)": 0.2,
}
_TRIES = 18  # of each strategy, in that command
_SEEDS = 3
_MARK = ".orchestra-demo"


def demo(
    context: typer.Context,
    out: Annotated[Path, o.output(metavar="DIR", help="Folder; replaces an earlier demo in it.")] = Path("runs/demo"),
    json_: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Train on handwritten digits with four workers: real processes, then a slow cluster and a fast one, simulated.

    Two minutes at most, nothing to download. The simulated part gives the same figures on every machine.

    For example:

      orchestra demo
      orchestra demo --out elsewhere --json
    """
    from orchestra.cli import concluding

    refuse_under_launcher("demo")
    _make_room(out)
    out.mkdir(parents=True)
    (out / _MARK).write_text("made by `orchestra demo`, which replaces it when it is run again\n", encoding="utf-8")
    _say(f"1. Four real processes train one small network with all-reduce, for {_SECONDS:g} seconds.\n", quiet)
    _real(out / "real", quiet=quiet)
    _say(
        "\n2. Five strategies on four simulated machines: a network of 10 Mbit/s, one machine 4 times slower than the "
        "others.\n   Each has the learning rate that was best for it in 18 tries on other seeds.\n",
        quiet,
    )
    slow = _race(_SLOW, [*_TUNED], out / "slow")
    repeat.keep(context.obj, slow.out)
    table = slow.run(quiet=quiet)
    first = next(row.strategy for row in table.ranked)
    fast = _race(_FAST, [*dict.fromkeys((first, "allreduce"))], out / "fast").run(quiet=True)
    concluding.conclude(table, slow.out, as_json=json_, quiet=True, fair=slow.fairness(table))
    if not json_:
        print(f"\n3. {_contrast(table, fast)}", flush=True)  # before what follows on standard error
    _say(_next(summary.nearby(slow.out.absolute())), quiet)


def _say(text: str, quiet: bool) -> None:
    if not quiet:
        summary.say(text)


def _real(out: Path, *, quiet: bool) -> None:
    """Train in real processes, with the live display."""
    from orchestra.runs import progress

    chosen = o.Options(strategy="allreduce", workers=4, seconds=_SECONDS, out=str(out))
    with progress.choose(quiet=quiet, title="allreduce, 4 processes") as display:
        result = sources.train_recipe(sources.load(sources.find("digits")), chosen.changes(), progress=display)
    steps, score = result.summary.steps, result.metrics.get("accuracy")
    _say(f"{steps:,} steps of each process, test accuracy {score:.3g}", quiet)


def _race(world: dict[str, Any], names: list[str], out: Path) -> Race:
    from orchestra.cli import compare

    shared = o.Options(workers=4, sim=True, **world)
    race = compare.prepare(sources.find("digits"), names, shared, _SEEDS, None, out)
    settings = {name: Setting(name, given=_TUNED[name]) for name in names}
    return dataclasses.replace(race, strategies=tuple(names), settings=settings, tries=_TRIES, tuning="in simulation")


def _contrast(slow: Table, fast: Table) -> str:
    """Return a line on the same strategies with a fast network and no slow machine."""
    first = slow.ranked[0].strategy
    lead, there = slow.speed(first), fast.speed(first)
    times = " and ".join(f"{row.strategy} {row.time:.3g} virtual s" for row in fast.ranked)
    if lead is None or there is None:
        ratio = ""
    else:
        ratio = f": {there.value:.2f} times as fast in pairs of equal seeds, not {lead.value:.2f} times"
    return (
        f"On a fast network, without a slow machine, {times} (medians of the seeds){ratio}. Which to use depends on "
        "the cluster."
    )


_NEXT = (
    ("orchestra explain slowmo", "how SlowMo works"),
    ("orchestra recommend digits --network 50mbit -n 8 --straggler 1x5", "which strategy for a cluster you describe"),
    (
        'orchestra compare digits --workers 4 --partition label-sorted -s "allreduce, localsgd(tau=8)"',
        "when every worker sees other digits",
    ),
    ("orchestra run char-gpt --strategy slowmo --workers 2", "a small transformer, some minutes"),
)


def _next(out: str) -> str:
    lines = [f"\nOpen {out}/report.html in a browser: the five strategies in pictures. What to try next:"]
    return "\n".join([*lines, *(f"  {command}\n      {why}" for command, why in _NEXT)])


def _make_room(out: Path) -> None:
    """Remove an earlier demo, and no other folder."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / _MARK).is_file():
        raise ConfigError(
            [Problem("out", str(out), "exists and was not made by `orchestra demo`: choose another --out")]
        )
    shutil.rmtree(out)
