# SPDX-License-Identifier: Apache-2.0
"""`orchestra probe`: measure this machine for simulations."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from orchestra.cli import options as o
from orchestra.cli import summary
from orchestra.cli.options import Options
from orchestra.cli.run import carry_out, find
from orchestra.cli.sources import Source
from orchestra.errors import ConfigError, Problem
from orchestra.formatting import size

if TYPE_CHECKING:
    from orchestra.runs.measurements import Probe

_FACTORS = (0.25, 0.5, 1, 2, 4)  # of the workload's own batch
_WARM_UP = 3  # steps that are not counted
_STEPS = 203
_SECONDS = 3.0

Batches = Annotated[
    str | None,
    o.training(metavar="B,B,...", help="Batches to measure. Default: a quarter to four times the recipe's own."),
]
To = Annotated[Path, o.output(metavar="FILE", help="File for the results.")]
Threads = Annotated[int, o.cluster(metavar="T", help="Threads of the process that computes.")]


def probe(
    recipe: o.What, args: o.Args = None, batches: Batches = None, threads: Threads = 1, device: o.Device = None,
    out: To = Path("probe.json"), json_: o.Json = False, quiet: o.Quiet = False,
) -> None:  # fmt: skip
    """Measure this machine for simulations: steps at several batches, memory, loopback, the cost of a message.

    The file is for simulations: --compute-time FILE draws from the times measured, and --network FILE exchanges tensors
    as processes of this machine do ("FILE loopback": as its sockets do). Run it while nothing else runs.

    For example:

      orchestra probe digits
      orchestra sim digits -n 4 --compute-time probe.json --network probe.json
      orchestra sim digits -n 64 --compute-time probe.json --straggler 4x3
    """
    wanted = _sizes(batches)
    if out.suffix != ".json":
        raise ConfigError(
            [Problem("out", str(out), "must end in .json, by which --compute-time and --network know it")]
        )
    if threads < 1:
        raise ConfigError([Problem("threads", threads, "must be at least 1")])
    source = find(recipe, Options(device=device))
    found = _measure(source, args or [], wanted, threads, device, quiet=quiet)
    from orchestra.engine.checkpoint import write_text

    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, found.dump())
    if json_:
        summary.print_json(json.loads(found.dump()) | {"file": str(out)})
        return
    print("\n".join(_describe(found)), flush=True)
    if not quiet:
        what = source.name if source.path is None else summary.nearby(source.path)
        summary.say(f"\nwritten to {out}\nnext: orchestra sim {what} -n 4 --compute-time {out} --network {out}")


def _sizes(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        sizes = sorted({int(word) for word in text.split(",")})
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < 1:
        raise ConfigError([Problem("batches", text, "must be whole numbers of at least 1, e.g. 8,16,32")])
    return sizes


def _measure(
    source: Source, args: list[str], wanted: list[int] | None, threads: int, device: str | None, *, quiet: bool
) -> Probe:
    from orchestra.probe import measure
    from orchestra.runs.measurements import Probe

    def tell(what: str) -> None:
        if not quiet:
            summary.say(what)

    with tempfile.TemporaryDirectory(prefix="orchestra-probe-") as folder:
        tell(f"a step of {source.label}, up to {_SECONDS:g} s each, at batch")
        about, times = _steps_of(source, args, None, threads, device, Path(folder) / "own")
        own = int(about["batch"])
        compute = {own: times}
        for batch in sorted({own, *(wanted or (max(1, round(own * factor)) for factor in _FACTORS))}):
            if batch not in compute:
                _, compute[batch] = _steps_of(source, args, batch, threads, device, Path(folder) / str(batch))
            tell(f"  {batch:>5}: {statistics.median(compute[batch]) * 1e3:.3g} ms")
    tell("memory, and messages between two processes")
    return Probe(
        workload=source.label,
        parameters=int(about["parameters"]),
        machine=measure.machine(),
        threads=threads,
        batch=own,
        compute=dict(sorted(compute.items())),
        memory=measure.memory(),
        number=measure.number(),
        memory_exchange=measure.memory_exchange(),
        loopback=measure.loopback(),
    )


def _steps_of(
    source: Source, args: list[str], batch: int | None, threads: int, device: str | None, out: Path
) -> tuple[dict[str, Any], tuple[float, ...]]:
    """Run one worker for a short time; return its configuration and the seconds of each of its steps."""
    from orchestra.clusters.local import Local
    from orchestra.clusters.simulated import recorded

    chosen = Options(
        strategy="solo", workers=1, batch=batch, steps=_STEPS, seconds=_SECONDS, out=str(out), device=device
    )
    cluster = Local(workers=1, threads=threads, device=device or "cpu")  # type: ignore[arg-type]
    more = {"cluster": lambda old: cluster, "evaluate": lambda old: None}
    carry_out(source, chosen, args, quiet=True, more=more)
    about: dict[str, Any] = json.loads((out / "config.json").read_text(encoding="utf-8"))
    (times,) = recorded(out).times
    return about, tuple(round(t, 7) for t in times[_WARM_UP:] or times)


def _describe(found: Probe) -> Iterator[str]:
    yield (
        f"{found.workload}, {found.parameters:,} parameters · {found.machine} · computing with {found.threads} thread"
        + ("s" if found.threads > 1 else "")
    )
    yield f"  {'batch':>6}  {'a step':>10}  {'middle nine tenths of them':>26}"
    for batch, times in found.compute.items():
        own = "  (the recipe's)" if batch == found.batch else ""
        low, high = _middle(times)
        spread = f"{_time(low)} to {_time(high)}"
        yield f"  {batch:>6}  {_time(statistics.median(times)):>10}  {spread:>26}{own}"
    yield f"  memory       {size(found.memory)}/s copied by one process"
    yield f"  optimizer    {_time(found.number * 1e6)} for a million numbers"
    for name, way in (("shared", found.memory_exchange), ("loopback", found.loopback)):
        yield (
            f"  {name:<12} {size(way.rate)}/s, {_time(way.latency)} under way, "
            f"{_time(way.message)} of the sender's for a message"
        )


def _middle(times: tuple[float, ...]) -> tuple[float, float]:
    ordered = sorted(times)
    cut = len(ordered) // 20
    return ordered[cut], ordered[-1 - cut]


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
