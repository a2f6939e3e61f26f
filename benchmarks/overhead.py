# SPDX-License-Identifier: Apache-2.0
"""What do counting and recording cost, as a share of a small model's step?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TypeVar, cast

import torch

from benchmarks.common import Outcome, interleave, main, scratch
from benchmarks.groups import Ours
from orchestra.core.ops import Compute, Done, Handle, Op, Traffic
from orchestra.engine.middleware import Metered
from orchestra.runs.events import EventLog, Stepped
from orchestra.runs.status import NodeStatus
from orchestra.worlds.shared_memory.layout import Arena, ArenaLayout, create

STEPS, WARMUP = 80, 10
REPEAT = 2000

T = TypeVar("T")


def measure(rounds: int) -> Outcome:
    """A run as it is against one that counts and writes nothing; then the pieces by themselves."""
    outcome = Outcome(
        "Metering and events",
        f"LeNet-5, batch 64, all-reduce with 2 workers; {rounds} rounds of {STEPS} steps ({WARMUP} dropped), with "
        "everything, and with `Metered.start`, `EventLog.write`, `record` and `report` replaced by nothing.",
    )
    with Ours("lenet", "allreduce", 2, STEPS) as normal, Ours("lenet", "allreduce", 2, STEPS, "--unmetered") as bare:
        turns = interleave({"as it is": lambda: normal.steps(WARMUP), "unmetered": lambda: bare.steps(WARMUP)}, rounds)
    result = turns.by(statistics.median)
    outcome.table(["run", "step, ms"], [[name, f.show(2, 1e3)] for name, f in result.figures.items()])
    outcome.say(turns.disturbance())
    extra = result.minus("as it is", "unmetered")
    step = result["as it is"].median
    outcome.say(f"Difference by turns: {extra.show(3, 1e3)} ms, {extra.median / step:.2%} of a step.")
    pieces = _pieces()
    outcome.table(["piece, by itself", "µs a step"], [[name, f"{value * 1e6:.1f}"] for name, value in pieces.items()])
    total = sum(pieces.values())
    outcome.say(f"Together {total * 1e6:.0f} µs, {total / step:.2%} of a step.")
    outcome.goal("less than 2 % of a LeNet-5 step, by the sum of the pieces", total / step < 0.02)
    return outcome


def _pieces() -> dict[str, float]:
    """Seconds per step of each piece."""
    plan = ArenaLayout(workers=2, servers=0, numel=1000, dtype=torch.float32, shared_x=True)
    arena = Arena(create(plan), plan)
    event = Stepped(1.234567, 0, 123, 1.2345, 7872, 2.302585, 0.001, 1.234567, 0.123456, 0.012345, 123456789, 987654321)
    row = NodeStatus(123, 7872, 2.3, 1.2, 0.1, 0.01, 1e8, 1e8, 1.2, 123)
    op, inner = Compute(lambda: None, 64), _Immediate()
    metered = Metered(inner)
    with scratch() as folder, EventLog(folder / "events.jsonl") as log:

        def events() -> None:
            log.write(event)

        def flushed() -> None:
            for _ in range(REPEAT):
                events()
            log.flush()

        direct, through = _each(lambda: inner.start(op)), _each(lambda: metered.start(op))
        return {
            "metering, 2 ops": 2 * (through - direct),
            "event, written and encoded": min(_once(flushed) for _ in range(7)) / REPEAT,
            "row on the board": _each(lambda: arena.report(0, row)),
        }


class _Immediate:
    """A transport whose ops take no time."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.traffic = Traffic()
        self._done = Done(None)

    def now(self) -> float:
        return time.perf_counter()

    def proceed(self, step: int, *, lockstep: bool) -> bool:
        return True

    def start(self, op: Op[T]) -> Handle[T]:
        return cast("Handle[T]", self._done)


def _once(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _each(action: Callable[[], object]) -> float:
    """Seconds of one call, the quickest of several series."""

    def series() -> None:
        for _ in range(REPEAT):
            action()

    return min(_once(series) for _ in range(7)) / REPEAT


if __name__ == "__main__":
    main(measure, rounds=12)
