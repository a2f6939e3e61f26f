# SPDX-License-Identifier: Apache-2.0
"""The outcome of a run: for people, and for programs."""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestra.formatting import percents, plural, size
from orchestra.runs import files

if TYPE_CHECKING:
    from rich.console import Console

    from orchestra.runs.facts import Facts, TimeShare

_MOST_ROWS = 16  # of the table of nodes; nodes with equal shares are one row
# the same time for every step, as a run folder records it, and how many workers are how much slower
_CONSTANT = re.compile(r"(?:Slow\(base=)?ConstantTime\(time=([^)]+)\)(?:, count=(\d+), factor=([^)]+)\))?")


def print_json(value: Any) -> None:
    """Print one line of JSON. Numbers that are not finite become null."""
    print(json.dumps(finite(value), ensure_ascii=False), flush=True)


def finite(value: Any) -> Any:
    """Return a value that JSON can hold: null for numbers that are not finite."""
    match value:
        case dict():
            return {key: finite(v) for key, v in value.items()}
        case list() | tuple():
            return [finite(v) for v in value]
        case float() if not math.isfinite(value):
            return None
    return value


def as_record(run: Path, facts: Facts) -> dict[str, Any]:
    """Return the figures of a run and where its files are."""
    note = files.read_json(run / "config.json").get("note") or {}
    return {"recipe": note.get("recipe"), **facts.as_dict(), "run": str(run), "model": str(run / "model.safetensors")}


def describe(run: Path, facts: Facts) -> str:
    """Return the figures of a run, in a few lines."""
    servers = f" + {plural(facts.servers, 'server')}" if facts.servers else ""
    metrics = "".join(f" · test {name} {value:.4g}" for name, value in facts.metrics.items())
    loss = "unknown" if facts.loss is None else f"{facts.loss:.4g}"
    ended = {"budget": "", "target": "; the target was reached", "seconds": "; the time was up"}
    lines = [
        f"{facts.strategy} · {plural(facts.workers, 'worker')}{servers} · {plural(facts.parameters, 'parameter')}",
        f"  {_steps(facts)} of each worker in {facts.seconds:.2f} {'virtual ' if facts.virtual else ''}s"
        f" ({facts.samples_per_second:,.0f} samples/s on average"
        + ("" if facts.virtual else f"; set up in {facts.setup:.1f} s")
        + f"){ended.get(facts.stopped_by, '')}",
        f"  training loss {loss}{metrics}{_unlearned(facts)}"
        if facts.trained
        else "  timing only: nothing was trained",
        f"  each worker sent {size(facts.sent_per_worker)} and received {size(facts.received_per_worker)}",
    ]
    lines += [*_happened(facts), *(_simulated(run) if facts.virtual else [])]
    if (run / "topology.json").exists():
        lines.append(f"  {files.read_json(run / 'topology.json')['words']}")
    if facts.skipped:
        lines.append(f"  {plural(facts.skipped, 'gradient')} not finite, not used")
    lines += ["", *_nodes(facts), "", f"  run    {nearby(run)}", f"  model  {nearby(run / 'model.safetensors')}"]
    return "\n".join(lines)


def _unlearned(facts: Facts) -> str:
    return "" if facts.unlearned is None else f" · {facts.unlearned}"


def _happened(facts: Facts) -> Iterator[str]:
    """Yield lines on staleness, a switch, and gradients that the model did not use."""
    if facts.staleness_mean is not None:
        yield f"  gradients were {facts.staleness_mean:.1f} updates old on average, {facts.staleness_max} at most"
    if facts.happened is not None:
        step, t = facts.happened
        then = " and ".join(f"{name} {value:.4g}" for name, value in facts.afterwards.items() if facts.trained)
        yield (
            f"  {facts.must_log} after step {step:,}, at {t:.2f} {'virtual ' if facts.virtual else ''}s"
            + (f", to {then}" if then else "")
        )
    if facts.missing is not None:
        yield f"  {facts.missing}"
    if facts.used is not None and facts.used < facts.samples:
        yield (
            f"  {facts.used:,} of {facts.samples:,} samples went into the model; the others' gradients came too late"
        )
    if facts.dropped:
        yield f"  {plural(facts.dropped, 'gradient')} dropped: too few workers were left for another update"
    if facts.retired:
        names = ", ".join(map(str, facts.retired))
        yield (f"  worker {names} became {plural(facts.servers, 'server')}; figures of a worker are means over all")


def _simulated(run: Path) -> Iterator[str]:
    """Yield the network and the compute times of a simulated run, as options spell them."""
    config = files.read_json(run / "config.json")
    cluster, given = config.get("cluster") or {}, (config.get("note") or {}).get("options") or {}
    constant = _CONSTANT.fullmatch(str(cluster.get("compute_time")))
    usual = cluster.get("compute_time") if constant is None else f"constant:{constant[1]}"
    straggler = f"{constant[2]}x{float(constant[3]):g}" if constant and constant[2] else given.get("straggler")
    slow = f", straggler {straggler}" if straggler else ""
    network, time = given.get("network") or cluster.get("network"), given.get("compute_time") or usual
    yield f"  simulated: network {network}, compute time {time}{slow}"


def _steps(facts: Facts) -> str:
    if facts.most_steps is None or facts.most_steps == facts.steps:
        return plural(facts.steps, "step")
    return f"{facts.steps:,} to {facts.most_steps:,} steps"


def _nodes(facts: Facts) -> list[str]:
    def alike(indexed: tuple[int, TimeShare]) -> tuple[str, list[int], int]:
        index, share = indexed
        return share.role, percents([share.compute, share.communicate, share.wait]), share.node - index

    rows: list[tuple[str, list[int], int]] = []  # name, shares of time, number of nodes
    for (role, times, _), group in itertools.groupby(enumerate(facts.shares), alike):
        numbers = [share.node if role == "worker" else share.node - facts.workers for _, share in group]
        name = f"{role} {numbers[0]}" if len(numbers) == 1 else f"{role}s {numbers[0]}-{numbers[-1]}"
        rows.append((name, times, len(numbers)))
    width = max([10, *(len(name) for name, _, _ in rows)])
    lines = [f"  {'time of':<{width}}  compute  communicate  wait  other"]
    for name, (compute, communicate, wait, other), _ in rows[:_MOST_ROWS]:
        lines.append(f"  {name:<{width}} {compute:7}% {communicate:11}% {wait:4}% {other:5}%")
    if left := sum(count for _, _, count in rows[_MOST_ROWS:]):
        lines.append(f"  … and {plural(left, 'more node')}")
    return lines


def nearby(path: Path) -> str:
    """Return a path relative to the working directory if it is below that."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def warnings_of(run: Path) -> list[str]:
    """Return the warnings of a run."""
    path = run / "ending.json"
    return list(files.read_json(path).get("warnings", [])) if path.exists() else []


def console_for(columns: int) -> Console:
    """Return standard output with at least so many columns: a narrow terminal breaks lines instead of cutting them."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    return Console(highlight=False, markup=False, emoji=False, width=max(columns, console.width))


def say(message: str) -> None:
    """Print a message to standard error: standard output is for results."""
    print(message, file=sys.stderr, flush=True)
