# SPDX-License-Identifier: Apache-2.0
"""How well does a simulation predict the duration of real steps?

    calibrate    on 2 processes: what a message costs, and by how much a worker oversleeps
    predict      every strategy with 2, 3 and 4 workers; written to a file before anything else is measured
    measure      the same cells for real, in an order drawn by lot, each of them several times

Workers take the gradient of a module with next to nothing to compute, then sleep until their delay is over, so two
cores suffice; run and simulation draw the same delays. The file with the predictions stays beside the results.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

import orchestra
from benchmarks.common import Outcome, main, own_seconds, scratch
from benchmarks.workloads import sgd
from orchestra.engine import compute_times
from orchestra.engine.compute_times import ComputeTime
from orchestra.runs.events import Stepped, read
from orchestra.worlds.simulated.networks import Host, Network

PREDICTIONS = Path(__file__).with_name("predictions.json")
STRATEGIES = (
    "allreduce",
    "ps",
    "ps(consistency=asp())",
    "ps(consistency=asp(), servers=2)",
    "localsgd(tau=4)",
    "slowmo(tau=4)",
)
SIZES = (62_000, 250_000)  # parameters
DELAYS = ("constant:0.02", "exponential:0.015,0.01", "lognormal:0.02,0.5 slow:1x2")
STEPS, WARM_UP = 44, 4
DECIDED = 0.02  # by how much two steps must differ to be put in order: repeated runs differ by about as much


@dataclass(frozen=True)
class Cell:
    """One thing to predict."""

    parameters: int
    workers: int
    delay: str
    strategy: str

    @property
    def condition(self) -> tuple[Any, ...]:
        return self.parameters, self.workers, self.delay


ALL = [Cell(*each) for each in itertools.product(SIZES, (2, 3, 4), DELAYS, STRATEGIES)]
CALIBRATION = [cell for cell in ALL if cell.workers == 2 and cell.delay == DELAYS[0]]
CELLS = [cell for cell in ALL if cell not in CALIBRATION]  # to be predicted


@dataclass(frozen=True)
class Late(ComputeTime):
    """Workers oversleep."""

    base: ComputeTime
    by: float  # seconds

    def seconds(self, seed: int, worker: int, step: int) -> float:
        return self.base.seconds(seed, worker, step) + self.by

    def mean(self) -> float:
        return self.base.mean() + self.by


def measure(rounds: int) -> Outcome:
    """Predictions first, then the truth."""
    network, late = calibrate()
    predicted = simulate_all(CELLS, network, late)
    naive = simulate_all(CELLS, _network([0.0, 0.0, 0.0]), 0.0)
    digest = _write(predicted, network, late)
    real: dict[Cell, list[float]] = {cell: [] for cell in CELLS}
    busy: dict[Cell, float] = {}
    for number in range(rounds):
        for cell in random.Random(number).sample(CELLS, len(CELLS)):
            seconds, busy[cell] = run(cell)
            real[cell].append(seconds)
    return _report(predicted, naive, real, busy, network, late, digest)


# Before.


def calibrate() -> tuple[Network, float]:
    """What messages and vectors cost, and how late workers are, from runs of 2 processes with constant delays.

    A step is linear in the four of them, so the simulator itself gives the coefficients, and least squares the rest.
    """
    cells = CALIBRATION
    free = simulate_all(cells, _network([0.0, 0.0, 0.0]), 0.0)
    columns = [simulate_all(cells, _network(unit), 0.0) for unit in torch.diag(torch.tensor(UNITS)).tolist()]
    slopes = [[column[cell] - free[cell] for column in columns] + [UNITS[0]] for cell in cells]
    truth = [statistics.median(run(cell)[0] for _ in range(3)) - free[cell] for cell in cells]
    least = not_negative(torch.tensor(slopes, dtype=torch.float64), torch.tensor(truth, dtype=torch.float64))
    costs = [float(each) * unit for each, unit in zip(least, [*UNITS, UNITS[0]], strict=True)]
    return _network(costs[:3]), costs[3]


UNITS = (1e-4, 1e-10, 1e-9)  # seconds for a message, a byte, a number


def _network(costs: Sequence[float]) -> Network:
    message, byte, number = costs
    bits = min(8 / byte, 1e18) if byte else 1e18
    return Network(hosts=(Host(up=bits, down=bits, message=message, number=number),))


def not_negative(a: Tensor, b: Tensor) -> Tensor:
    """The least squares solution, with zero for what would be below it."""
    kept = list(range(a.shape[1]))
    while True:
        found = torch.linalg.lstsq(a[:, kept], b).solution
        if bool((found >= 0).all()):
            solution = torch.zeros(a.shape[1], dtype=a.dtype)
            solution[kept] = found
            return solution
        del kept[int(found.argmin())]


def simulate_all(cells: Sequence[Cell], network: Network, late: float) -> dict[Cell, float]:
    """The seconds of a step of each."""
    return {cell: simulate(cell, network, late) for cell in cells}


def simulate(cell: Cell, network: Network, late: float) -> float:
    """The seconds of a step, in virtual time."""
    cluster = orchestra.Simulated(
        workers=cell.workers, network=network, compute_time=Late(compute_times.parse(cell.delay), late), numerics="off"
    )
    with scratch() as folder:
        return per_step(train(cell.parameters, cell.strategy, cluster, folder / "run").run)


def _write(predicted: dict[Cell, float], network: Network, late: float) -> str:
    text = json.dumps(
        {
            "written": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "host": asdict(network.hosts[0]),
            "late": late,
            "seconds of a step": [{**asdict(cell), "seconds": seconds} for cell, seconds in predicted.items()],
        },
        indent=1,
    )
    PREDICTIONS.write_text(text + "\n", encoding="utf-8")
    return hashlib.sha256(PREDICTIONS.read_bytes()).hexdigest()


# The truth.


def run(cell: Cell) -> tuple[float, float]:
    """The seconds of a real step, and the share of the cores that the run used."""
    cluster = orchestra.Local(workers=cell.workers, threads=1, compute_time=cell.delay)
    with scratch() as folder:
        began, before = time.monotonic(), own_seconds()
        result = train(cell.parameters, cell.strategy, cluster, folder / "run")
        share = (own_seconds() - before) / (time.monotonic() - began) / (os.cpu_count() or 1)
        return per_step(result.run), share


def _data() -> tuple[Tensor, Tensor]:
    return torch.zeros(4096, 1), torch.zeros(4096, 1)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def train(
    parameters: int,
    strategy: str | orchestra.Strategy[Any],
    cluster: Any,
    out: Path,
    steps: int = STEPS,
    *,
    trace: bool = False,
) -> Any:
    """A few steps of a module that has parameters and next to nothing to compute."""
    return orchestra.train(
        model=functools.partial(nn.Linear, 1, parameters // 2),
        data=_data,
        loss=_loss,
        optimizer=sgd,
        strategy=strategy,
        cluster=cluster,
        batch=1,
        budget=orchestra.Steps(steps),
        out=out,
        progress=False,
        trace=trace,
    )


def per_step(folder: Path) -> float:
    """Seconds of a step once everything is warm: from one step of the first worker to its last."""
    times = [event.t for event in read(folder / "events-0.jsonl") if isinstance(event, Stepped)]
    return (times[-1] - times[WARM_UP - 1]) / (len(times) - WARM_UP)


# After.


def _report(
    predicted: dict[Cell, float], naive: dict[Cell, float], real: dict[Cell, list[float]], busy: dict[Cell, float],
    network: Network, late: float, digest: str,
) -> Outcome:  # fmt: skip
    host = network.hosts[0]
    byte = f"{host.up / 8e9:.1f} GB/s" if host.up < 1e18 else "bytes cost nothing"
    outcome = Outcome(
        "Prediction",
        "Seconds of a step on real processes, predicted by simulations. Calibrated by least squares on runs of 2 "
        f"processes with constant delays: a message takes {host.message * 1e6:.0f} µs ({byte}), a million numbers "
        f"averaged or updated {host.number * 1e9:.2f} ms, and a worker is {late * 1e3:.2f} ms late. {len(CELLS)} other "
        f"cells: {len(STRATEGIES)} strategies, 2 to 4 workers, {SIZES[0]:,} and {SIZES[1]:,} parameters, {len(DELAYS)} "
        f"kinds of delays; {STEPS} steps each. The predictions were written before the cells were measured "
        f"(predictions.json, sha256 {digest[:16]}…).",
    )
    truth = {cell: statistics.median(values) for cell, values in real.items()}
    again = {cell: values[0] for cell, values in real.items()}
    others = {cell: statistics.median(values[1:]) for cell, values in real.items()}
    errors, ranks = errors_of(predicted, truth), taus(predicted, truth)
    outcome.table(
        HEAD,
        [
            row("the simulation", predicted, truth),
            row("the delays alone, nothing else takes time", naive, truth),
            row("a real run, of the others of its kind", again, others),
        ],
    )
    outcome.say(
        "Errors are relative to the median of the real runs. τ compares the order of the strategies within each "
        f"condition (parameters, workers, delays) and is the mean over the {len(ranks)} of them; decided pairs are "
        f"those whose real steps differ by more than {DECIDED:.0%}. With constant delays most do not."
    )
    rows = []
    for strategy in STRATEGIES:
        mine = [cell for cell in CELLS if cell.strategy == strategy]
        own = [errors[cell] for cell in mine]
        ratios = [predicted[cell] / truth[cell] for cell in mine]
        rows.append(
            [strategy, f"{statistics.median(own):.1%}", f"{max(own):.1%}", f"{min(ratios):.2f} to {max(ratios):.2f}"]
        )
    outcome.table(["strategy", "median error", "most", "predicted by real"], rows)
    used = sorted(busy.values())
    outcome.say(f"The runs used {statistics.median(used):.0%} of the cores in the middle, {used[-1]:.0%} at most.")
    outcome.goal("median error of at most 10 %", statistics.median(errors.values()) <= 0.1)
    outcome.goal("Kendall's τ of at least 0.8, all pairs", statistics.fmean(ranks) >= 0.8)
    outcome.goal("Kendall's τ of at least 0.8, decided pairs", statistics.fmean(taus(predicted, truth, DECIDED)) >= 0.8)
    return outcome


HEAD = ["step time predicted by", "median error", "90 % below", "bias", "Kendall's τ", "τ, decided pairs"]


class Predicted(Protocol):
    """A cell of any kind."""

    @property
    def strategy(self) -> str: ...

    @property
    def condition(self) -> tuple[Any, ...]:
        """All that strategies to be put in order have in common."""


C = TypeVar("C", bound=Predicted)


def row(name: str, predicted: dict[C, float], truth: dict[C, float]) -> list[str]:
    """Of a table with this head: how far from the truth one way to predict was."""
    errors, ranks = sorted(errors_of(predicted, truth).values()), taus(predicted, truth)
    bias = statistics.fmean(predicted[cell] / truth[cell] - 1 for cell in truth)
    return [
        name, f"{statistics.median(errors):.1%}", f"{errors[int(0.9 * len(errors))]:.1%}", f"{bias:+.1%}",
        f"{statistics.fmean(ranks):.2f}", f"{statistics.fmean(taus(predicted, truth, DECIDED)):.2f}",
    ]  # fmt: skip


def errors_of(predicted: dict[C, float], truth: dict[C, float]) -> dict[C, float]:
    """Relative to the truth."""
    return {cell: abs(predicted[cell] - truth[cell]) / truth[cell] for cell in truth}


def taus(predicted: dict[C, float], truth: dict[C, float], apart: float = 0.0) -> list[float]:
    """τ of every condition in which there is anything to put in order."""
    conditions: dict[tuple[Any, ...], list[C]] = {}
    for cell in truth:
        conditions.setdefault(cell.condition, []).append(cell)
    found = [kendall([predicted[c] for c in cells], [truth[c] for c in cells], apart) for cells in conditions.values()]
    return [tau for tau in found if tau is not None]


def kendall(a: Sequence[float], b: Sequence[float], apart: float = 0.0) -> float | None:
    """τ: pairs in the same order less pairs in the other, by all pairs of which the two of b are far enough apart."""
    pairs = [(i, j) for i, j in itertools.combinations(range(len(a)), 2) if abs(b[i] / b[j] - 1) > apart]
    agree = sum(((a[i] > a[j]) - (a[i] < a[j])) * ((b[i] > b[j]) - (b[i] < b[j])) for i, j in pairs)
    return agree / len(pairs) if pairs else None


if __name__ == "__main__":
    torch.manual_seed(0)
    main(measure, rounds=3)
