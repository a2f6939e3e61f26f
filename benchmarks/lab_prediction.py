# SPDX-License-Identifier: Apache-2.0
"""How well does a simulation predict the duration of real steps on hosts with links of their own?

    calibrate    on 2 hosts: what headers, messages and numbers cost, and by how much a worker oversleeps
    predict      every strategy on 3 and 4 hosts; written to a file before anything else is measured
    measure      the same cells for real, in an order drawn by lot, each of them several times

Needs root: the hosts are namespaces of this machine (`orchestra lab`). Workers take the gradient of a module with next
to nothing to compute, then sleep until their delay is over, so two cores suffice; run and simulation draw the same
delays. The files with the predictions and with all that was measured stay beside the results.

    python -m benchmarks.lab_prediction --only predict      so that the predictions can be committed before
    python -m benchmarks.lab_prediction --only verify        anything is measured
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Outcome, busy_seconds, machine, quiet_parent
from benchmarks.lab_cells import CALIBRATED, LATENCY, Cell, Model, Seen, play, simulate
from benchmarks.lab_flows import HEADERS
from benchmarks.prediction import DECIDED, HEAD, errors_of, not_negative, row, taus
from orchestra.cli.in_lab import with_token
from orchestra.engine import compute_times

PREDICTIONS = Path(__file__).with_name("lab_predictions.json")
SEEN = Path(__file__).with_name("lab_seen.jsonl")
STRATEGIES = (
    "allreduce",
    "allreduce(algorithm='ring')",
    "allreduce(algorithm='halving_doubling')",
    "ps",
    "ps(consistency=asp())",
    "ps(consistency=ssp(staleness=2))",
    "localsgd(tau=4)",
    "slowmo(tau=4)",
)
ASYNCHRONOUS = "ps(consistency=asp())"
CALIBRATION = ("allreduce", "allreduce(algorithm='ring')", "ps", "ps(pieces=4)", ASYNCHRONOUS, "localsgd(tau=4)")
SMALL, LARGE = 25_000, 250_000  # parameters
CONSTANT, VARYING = "constant:0.1", "lognormal:0.1,0.3"
QUIET = 0.15  # share of the cores that strangers may use when a lab begins
BUSY = 0.6  # share of the cores that all programs together may use in the middle of the runs
PATIENCE = 20  # looks at that, of a second each
MOST = 14 * 60.0  # seconds in which cells are measured again


def cells_of(hosts: int, strategies: Sequence[str], kinds: Sequence[str]) -> Iterator[Cell]:
    """All conditions. Where a step takes seconds there are few of them, with one kind of delays."""
    for megabits, parameters in itertools.product((10, 100), (SMALL, LARGE)):
        seconds = 32 * parameters / megabits / 1e6  # of one vector on one link
        steps = 8 if seconds > 0.5 else 12 if seconds > 0.05 else 20
        for delay in kinds[-1:] if seconds > 0.5 else kinds:
            for strategy in strategies:
                yield Cell(hosts, megabits, parameters, delay, strategy, steps)


CELLS = [cell for hosts in (3, 4) for cell in cells_of(hosts, STRATEGIES, (CONSTANT, VARYING))]  # to be predicted


def measure(rounds: int) -> Outcome:
    """Predictions first, then the truth."""
    with with_token():
        predict()
        return verify(rounds)


def predict() -> None:
    """Calibrate, and write down what every cell will take."""
    known = list(cells_of(CALIBRATED, CALIBRATION, (CONSTANT,)))
    begun = time.monotonic()
    model = fit(known, play_all(known, 1))
    say(f"calibrated after {time.monotonic() - begun:.0f} s: {model}")
    write({cell: simulate(cell, model) for cell in CELLS}, model)


def verify(rounds: int) -> Outcome:
    """Measure what was predicted. Simulations are the same every time, so only the model needs to be read again."""
    written = PREDICTIONS.read_bytes()
    model = Model.read(json.loads(written)["model"])
    predicted = {name: {cell: simulate(cell, each) for cell in CELLS} for name, each in ladder(model).items()}
    if [seen.seconds for seen in predicted[SIMULATION].values()] != [
        s["seconds"] for s in json.loads(written)["steps"]
    ]:
        raise SystemExit(f"{PREDICTIONS.name} was written by another simulator: predict again.")
    real = play_all(CELLS, rounds)
    lines = (json.dumps({**asdict(cell), "seen": [asdict(one) for one in seen]}) for cell, seen in real.items())
    SEEN.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return Report(model, predicted, real, hashlib.sha256(written).hexdigest()).told()


def say(text: str) -> None:
    """Print progress."""
    print(text, file=sys.stderr, flush=True)


# Before.

SIMULATION = "the simulation: and costs of messages and numbers, lateness, senders that wait for their kernels"


def ladder(model: Model) -> dict[str, Model | None]:
    """From knowing next to nothing to knowing all that was calibrated."""
    return {
        "the delays alone, nothing else takes time": None,
        "besides, links of the nominal rate and latency": Model(),
        "besides, headers": Model(headers=model.headers),
        "besides, costs of messages and numbers, lateness": replace(model, keeps={}),
        SIMULATION: model,
    }


UNITS: dict[str, Any] = {"headers": 0.01, "latency": 1e-4, "message": 1e-4, "number": 1e-9}


def fit(cells: Sequence[Cell], seen: Mapping[Cell, list[Seen]]) -> Model:
    """What makes simulations come closest to runs, by relative least squares; how late workers are, they tell.

    A step is nearly linear in each of the unknowns, so the simulator itself gives the coefficients.
    """
    truth = {cell: middle(seen[cell]) for cell in cells if cell in seen}
    # Workers of a server compute nothing but gradients.
    took = [each.compute for cell in truth if cell.strategy.startswith("ps") for each in seen[cell]]
    late = max(0.0, statistics.median(took) - compute_times.parse(CONSTANT).mean())
    known = Model(late=late, keeps=dict(kept(seen)))
    free = {cell: simulate(cell, known).seconds for cell in truth}
    columns = [replace(known, **{name: unit}) for name, unit in UNITS.items()]
    slopes = [[(simulate(cell, column).seconds - free[cell]) / truth[cell] for column in columns] for cell in truth]
    wanted = [1 - free[cell] / truth[cell] for cell in truth]
    least = not_negative(torch.tensor(slopes, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64))
    return replace(known, **{name: float(x) * UNITS[name] for name, x in zip(UNITS, least, strict=True)})


def kept(seen: Mapping[Cell, list[Seen]]) -> Iterator[tuple[int, float]]:
    """By rate, bytes that a kernel holds of a connection: what was still there when a server's send returned."""
    for cell, each in seen.items():
        if cell.strategy == ASYNCHRONOUS and cell.parameters == LARGE:
            passed = (
                statistics.median(one.held for one in each if one.held is not None)
                * cell.megabits
                * 1e6
                / 8
                / (1 + HEADERS)
            )
            yield cell.megabits, max(1.0, 4 * cell.parameters - passed)


def middle(seen: Sequence[Seen]) -> float:
    """Seconds of a step."""
    return statistics.median(each.seconds for each in seen)


def write(predicted: Mapping[Cell, Seen], model: Model) -> None:
    """Write the predictions to a file that is committed before the runs."""
    text = json.dumps(
        {
            "written": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "model": asdict(model),
            "steps": [{**asdict(cell), "seconds": seen.seconds, "sent": seen.sent} for cell, seen in predicted.items()],
        },
        indent=1,
    )
    PREDICTIONS.write_text(text + "\n", encoding="utf-8")


# The truth.


def play_all(cells: Sequence[Cell], rounds: int) -> dict[Cell, list[Seen]]:
    """Every cell once a round: lab after lab, in each of them and among them in an order drawn by lot.

    Rounds after the first leave out what there is no time for.
    """
    labs: dict[tuple[int, int], list[Cell]] = {}
    for cell in cells:
        labs.setdefault((cell.hosts, cell.megabits), []).append(cell)
    found: dict[Cell, list[Seen]] = {}
    took, end = dict.fromkeys(labs, 0.0), time.monotonic() + MOST
    for number in range(rounds):
        lot = random.Random(number)
        for lab in lot.sample(sorted(labs), len(labs)):
            if number and time.monotonic() + took[lab] > end:
                continue
            strangers, begun = await_quiet(), time.monotonic()
            for cell, seen in play(lot.sample(labs[lab], len(labs[lab]))).items():
                found.setdefault(cell, []).append(seen)
            took[lab] = time.monotonic() - begun
            say(f"round {number}, lab {lab}: {took[lab]:.0f} s, strangers {strangers:.0%}")
    return found


def await_quiet() -> float:
    """Wait until strangers leave the cores alone, but not for ever; gives the share they use now."""
    for _ in range(PATIENCE):
        began, busy = time.monotonic(), busy_seconds()
        time.sleep(1)
        share = (busy_seconds() - busy) / (time.monotonic() - began) / (os.cpu_count() or 1)
        if share <= QUIET:
            break
    return share


# After.


@dataclass(frozen=True)
class Report:
    """What was predicted beside what came."""

    model: Model
    predicted: Mapping[str, Mapping[Cell, Seen]]
    real: Mapping[Cell, list[Seen]]
    digest: str

    def told(self) -> Outcome:
        """All of it."""
        m = self.model
        outcome = Outcome(
            "Prediction in the laboratory",
            "Seconds of a step on hosts of a laboratory, predicted by simulations. How late workers wake up was "
            "measured on 2 hosts, the rest calibrated there by least squares: "
            f"{m.headers:.1%} of headers, {(LATENCY + m.latency) * 1e3:.2f} ms from program to program on links of "
            f"{LATENCY * 1e3:g} ms, {m.message * 1e6:.0f} µs for a message, {m.number * 1e9:.2f} ms for a million "
            f"numbers; workers wake up {m.late * 1e3:.2f} ms late in the mean; kernels hold "
            f"{', '.join(f'{size / 1e3:.0f} kB of a connection at {rate} Mbit/s' for rate, size in m.keeps.items())} "
            f"(by when sends returned). {len(CELLS)} cells predicted: "
            f"{len(STRATEGIES)} strategies, 3 and 4 hosts (workers and servers), 10 and 100 Mbit/s, {SMALL:,} and "
            f"{LARGE:,} parameters, computing "
            f"emulated by sleeping {CONSTANT} or {VARYING} s, 8 to 20 steps; messages encrypted. The predictions were "
            f"written before the cells were measured (lab_predictions.json, sha256 {self.digest[:16]}…).",
        )
        self._errors(outcome)
        self._cells(outcome)
        self._traffic(outcome)
        self._goals(outcome)
        return outcome

    @property
    def truth(self) -> dict[Cell, float]:
        """Seconds of a real step."""
        return {cell: middle(self.real[cell]) for cell in CELLS if cell in self.real}

    @property
    def expected(self) -> dict[Cell, float]:
        """Seconds of a simulated one."""
        return {cell: seen.seconds for cell, seen in self.predicted[SIMULATION].items()}

    def _errors(self, outcome: Outcome) -> None:
        rows = [row(name, {c: s.seconds for c, s in each.items()}, self.truth) for name, each in self.predicted.items()]
        repeated = {cell: seen for cell, seen in self.real.items() if len(seen) > 1}
        if repeated:
            again = {cell: seen[0].seconds for cell, seen in repeated.items()}
            rows.append(
                row("a real run, of the others of its kind", again, {c: middle(s[1:]) for c, s in repeated.items()})
            )
        outcome.table(HEAD, rows)
        outcome.say(
            f"Errors are relative to the median of the real runs ({len(self.truth)} cells, {len(repeated)} of them "
            f"measured {max(map(len, self.real.values()))} times). τ compares the order of the strategies within each "
            "condition and is the mean over the conditions, of which there are "
            f"{len(taus(self.expected, self.truth))}; decided pairs are those whose real steps differ by more than "
            f"{DECIDED:.0%}."
        )
        found = errors_of(self.expected, self.truth)
        rows = []
        for strategy in STRATEGIES:
            own = [cell for cell in found if cell.strategy == strategy]
            ratios = [self.expected[cell] / self.truth[cell] for cell in own]
            errors = [found[cell] for cell in own]
            rows.append(
                [
                    strategy,
                    f"{statistics.median(errors):.1%}",
                    f"{max(errors):.1%}",
                    f"{min(ratios):.2f} to {max(ratios):.2f}",
                ]
            )
        outcome.table(["strategy", "median error", "most", "predicted by real"], rows)

    def _cells(self, outcome: Outcome) -> None:
        outcome.say("Every cell: predicted / real milliseconds of a step.")
        rows = []
        for condition in dict.fromkeys(cell.condition for cell in CELLS):
            hosts, megabits, parameters, delay = condition
            mine = [cell for cell in CELLS if cell.condition == condition]
            shown = [
                f"{self.expected[cell] * 1e3:.0f} / "
                + (f"{self.truth[cell] * 1e3:.0f}" if cell in self.truth else "failed")
                for cell in mine
            ]
            rows.append([f"{hosts}, {megabits} Mbit/s, {parameters * 4 / 1e6:g} MB, {delay.partition(':')[0]}", *shown])
        outcome.table(["hosts, link, model, delays", *STRATEGIES], rows)

    def _traffic(self, outcome: Outcome) -> None:
        same = [
            cell for cell in self.truth if all(s.sent == self.predicted[SIMULATION][cell].sent for s in self.real[cell])
        ]
        apart = [
            total_variation(self.predicted[SIMULATION][cell].staleness, seen.staleness)
            for cell in self.truth
            if "asp" in cell.strategy
            for seen in self.real[cell]
        ]
        shares = sorted(seen.share for seen in itertools.chain(*self.real.values()))
        outcome.say(
            f"Bytes sent are those predicted, to the byte, in {len(same)} of {len(self.truth)} cells. Staleness of "
            f"asynchronous pushes: total variation between run and simulation {statistics.median(apart):.2f} in the "
            f"middle, {max(apart):.2f} at most. All programs together, strangers included, used "
            f"{statistics.median(shares):.0%} of the cores in the middle of the runs, {shares[-1]:.0%} at most. Not "
            "looked at: the time to a target."
        )

    def _goals(self, outcome: Outcome) -> None:
        errors = sorted(errors_of(self.expected, self.truth).values())
        quiet = statistics.median(seen.share for seen in itertools.chain(*self.real.values())) <= BUSY
        outcome.goal("median error of at most 10 %", statistics.median(errors) <= 0.1, quiet=quiet)
        outcome.goal("90 % of the errors at most 20 %", errors[int(0.9 * len(errors))] <= 0.2, quiet=quiet)
        for apart, which in ((0.0, "all pairs"), (DECIDED, "decided pairs")):
            tau = statistics.fmean(taus(self.expected, self.truth, apart))
            outcome.goal(f"Kendall's τ of at least 0.8, {which}", tau >= 0.8, quiet=quiet)


def total_variation(a: Mapping[int, int], b: Mapping[int, int]) -> float:
    """Half the sum of the differences of two shares."""
    return sum(abs(a.get(k, 0) / sum(a.values()) - b.get(k, 0) / sum(b.values())) for k in {*a, *b}) / 2


if __name__ == "__main__":
    torch.manual_seed(0)
    parser = argparse.ArgumentParser(description=measure.__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="how often everyone takes a turn")
    parser.add_argument("--only", choices=("predict", "verify"), help="one half of it")
    asked = parser.parse_args()
    quiet_parent()
    print(machine(), end="\n\n")
    if asked.only == "predict":
        with with_token():
            predict()
    elif asked.only == "verify":
        with with_token():
            print(verify(asked.rounds))
    else:
        print(measure(asked.rounds))
