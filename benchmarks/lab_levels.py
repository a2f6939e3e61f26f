# SPDX-License-Identifier: Apache-2.0
"""What a prediction in the laboratory rests on, and what it is for: links, delays, and the time to a target.

    links      there and back with messages of eight sizes at four rates; what two numbers fitted to half of the sizes
               predict of the other half
    delays     how long gradients took that were told to take a while
    targets    strategies train to a target on three hosts, five seeds each, simulated with the costs that
               `benchmarks.lab_prediction` calibrated on two

    python -m benchmarks.lab_levels --only predict      writes what runs to the target will take
    python -m benchmarks.lab_levels --only verify        measures all of it
    python -m benchmarks.lab_levels --only again         measures the rest, and tells of those runs once more
    python -m benchmarks.lab_levels ORDERS.json          on every host of a lab: what it is told to take part in

Needs root: the hosts are namespaces of this machine (`orchestra lab`).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

import orchestra
from benchmarks import lab_prediction
from benchmarks.common import Outcome, machine, quiet_parent, scratch
from benchmarks.lab_cells import LATENCY, Model, Oversleeping
from benchmarks.lab_prediction import VARYING, await_quiet, say, total_variation
from benchmarks.prediction import DECIDED, kendall, not_negative, train
from orchestra import recipes
from orchestra.cli.in_lab import with_token
from orchestra.core.node import Node
from orchestra.core.strategy import Strategy
from orchestra.engine import compute_times, expression
from orchestra.lab import Lab
from orchestra.report.results import achieved
from orchestra.runs.budget import Target
from orchestra.runs.events import Event, Logged, NodeEnded, OpTraced, Scored, read
from orchestra.worlds.simulated.networks import Host, Network

PREDICTIONS = Path(__file__).with_name("lab_targets.json")
SEEN = Path(__file__).with_name("lab_targets_seen.jsonl")

NUMBERS = [4096 << i for i in range(8)]  # of a message, four bytes each
FITTED = NUMBERS[1::2]
RATES = (10, 20, 50, 100)  # Mbit/s
ECHOES = 6  # of each size and rate

STRATEGIES = (
    "allreduce",
    "allreduce(algorithm='ring')",
    "ps",
    "ps(consistency=asp())",
    "ps(consistency=ssp(staleness=2))",
    "localsgd(tau=4)",
    "slowmo(tau=4)",
)
SCENARIOS = (10, 100)  # Mbit/s
HOSTS, SEEDS, STEPS, EVERY = 3, 5, 96, 4
DELAY = "lognormal:0.03,0.3"
TARGET = Target("accuracy", 0.85)


@dataclass(frozen=True, kw_only=True)
class Echo(Strategy[None]):
    """The first worker sends a part of its vector, the second answers with nothing."""

    def init(self, node: Node) -> None:
        """Nothing to remember."""

    def step(self, node: Node, s: None) -> None:
        """Every size once."""
        node.local_step()
        for numbers in NUMBERS:
            if node.rank == 0:
                node.comm.send(1, node.x[:numbers])
                node.comm.recv(1)
            else:
                node.comm.recv(0)
                node.comm.send(0, node.x[:0])


@dataclass(frozen=True)
class Job:
    """A run on all hosts of a lab."""

    kind: str  # links, delays or targets
    megabits: int
    strategy: str = ""
    seed: int = 0

    @property
    def hosts(self) -> int:
        """Workers and servers."""
        return HOSTS if self.kind == "targets" else 2


def carry_out(job: Job, cluster: Any, run: Path) -> None:
    """On a host of a lab, or all of it simulated."""
    if job.kind == "targets":
        recipe = recipes.get("digits")
        orchestra.train(
            model=recipe.model,
            data=recipe.data,
            loss=recipe.loss,
            optimizer=recipe.optimizer,
            strategy=job.strategy,
            cluster=cluster,
            batch=recipe.batch,
            budget=orchestra.Steps(STEPS),
            evaluate=recipe.evaluate,
            evaluation_data=recipe.evaluation_data,
            evaluate_every=orchestra.Steps(EVERY),
            seed=job.seed,
            out=run,
            progress=False,
        )
    elif job.kind == "links":
        train(2 * NUMBERS[-1], Echo(), cluster, run, ECHOES, trace=True)
    else:
        train(25_000, "allreduce", cluster, run, 100, trace=True)


DELAYS = {"links": None, "delays": VARYING, "targets": DELAY}


# In the laboratory.


def play(jobs: Sequence[Job]) -> Iterator[tuple[Job, list[Event]]]:
    """All jobs, lab by lab, in an order drawn by lot."""
    labs: dict[tuple[int, int], list[Job]] = {}
    for job in jobs:
        labs.setdefault((job.hosts, job.megabits), []).append(job)
    lot = random.Random(0)
    for hosts, megabits in lot.sample(sorted(labs), len(labs)):
        mine = lot.sample(labs[hosts, megabits], len(labs[hosts, megabits]))
        strangers, begun = await_quiet(), time.monotonic()
        with (
            scratch() as folder,
            Lab(name=f"levels{os.getpid()}", hosts=hosts, rate=f"{megabits}mbit", latency=LATENCY) as lab,
        ):
            orders = folder / "orders.json"
            orders.write_text(json.dumps([asdict(job) for job in mine]), encoding="utf-8")
            lab.run([sys.executable, "-m", "benchmarks.lab_levels", str(orders)], out=sys.stderr.buffer)
            for i, job in enumerate(mine):
                yield job, events_of(folder / str(i))
        say(f"{hosts} hosts, {megabits} Mbit/s: {time.monotonic() - begun:.0f} s, strangers {strangers:.0%}")


def events_of(run: Path) -> list[Event]:
    """All that is in a run folder, in the order of time."""
    return sorted((e for path in run.glob("*.jsonl") for e in read(path)), key=lambda e: e.t)


def obey(orders: Path) -> None:
    """As one host: take part in all runs."""
    for i, order in enumerate(json.loads(orders.read_text(encoding="utf-8"))):
        job = Job(**order)
        cluster = orchestra.Attached(order="given", threads=1, compute_time=DELAYS[job.kind], patience=60)
        carry_out(job, cluster, orders.with_name(str(i)))


# Links.


def echoes(events: Sequence[Event]) -> dict[int, list[float]]:
    """Seconds there and back, by numbers sent; the first of each, which opens the way, is left out."""
    found: dict[int, list[float]] = {}
    sent: OpTraced | None = None
    for event in events:
        if isinstance(event, OpTraced) and event.node == 0 and event.kind == "send":
            sent = event
        elif isinstance(event, OpTraced) and event.node == 0 and event.kind == "receive" and sent is not None:
            found.setdefault(sent.bytes // 4, []).append(event.t - sent.began)
    return {numbers: seconds[1:] for numbers, seconds in found.items()}


def links(outcome: Outcome, seen: Mapping[Job, list[Event]]) -> None:
    """Two numbers from half of the sizes, and what they predict of the other half."""
    real = {
        (job.megabits, numbers): statistics.median(seconds)
        for job, events in seen.items()
        for numbers, seconds in echoes(events).items()
    }
    ideal = {(rate, numbers): 32 * numbers / rate / 1e6 for rate, numbers in real}
    known = [key for key in real if key[1] in FITTED]
    slopes = [[ideal[key] / real[key], 2 / real[key]] for key in known]
    rest = [1 - (ideal[key] + 2 * LATENCY) / real[key] for key in known]
    fit = not_negative(torch.tensor(slopes, dtype=torch.float64), torch.tensor(rest, dtype=torch.float64))
    headers, more = float(fit[0]), float(fit[1])
    predicted = {}
    for rate in RATES:
        bits, latency = rate * 1e6 / (1 + headers), (LATENCY + more) / 2
        network = Network(hosts=(Host(up=bits, down=bits, latency=latency),))
        with scratch() as folder:
            carry_out(Job("links", rate), simulated(network, compute_times.parse("constant:0"), 2), folder / "run")
            for numbers, seconds in echoes(events_of(folder / "run")).items():
                predicted[rate, numbers] = statistics.median(seconds)
    errors = {key: abs(predicted[key] / real[key] - 1) for key in real}
    outcome.say(
        f"Links. There and back, a message and an empty answer, through our encrypted connections: {headers:.1%} of "
        f"headers and {(LATENCY + more) * 1e3:.2f} ms from program to program were fitted to the sizes with a star; "
        "predicted / real milliseconds."
    )
    head = ["Mbit/s", *(f"{4 * n / 1000:g} kB{'*' if n in FITTED else ''}" for n in NUMBERS)]
    outcome.table(
        head,
        [[str(r), *(f"{predicted[r, n] * 1e3:.1f} / {real[r, n] * 1e3:.1f}" for n in NUMBERS)] for r in RATES],
    )
    held = [errors[key] for key in errors if key[1] not in FITTED]
    outcome.goal(
        f"sizes that were not fitted predicted to 5 % in the mean (here {statistics.fmean(held):.1%}, at most "
        f"{max(held):.1%})",
        statistics.fmean(held) <= 0.05,
    )


def simulated(network: Network, delay: compute_times.ComputeTime, workers: int, **given: Any) -> orchestra.Simulated:
    """Virtual hosts."""
    return orchestra.Simulated(workers=workers, network=network, compute_time=delay, **{"numerics": "off", **given})


# Delays.


def computing(outcome: Outcome, events: Sequence[Event]) -> None:
    """Each gradient beside what it was told to take."""
    law = compute_times.parse(VARYING)
    told, took = [], []
    for node in range(2):
        mine = [e for e in events if isinstance(e, OpTraced) and e.node == node and e.kind == "compute"]
        took += [e.t - e.began for e in mine]
        lasts = compute_times.sampler(law, 0, node)
        told += [lasts(step) for step in range(len(mine))]
    late = sorted(t - s for t, s in zip(took, told, strict=True))
    apart = kolmogorov_smirnov(told, took)
    outcome.say(
        f"Delays. {len(told)} gradients told to take {VARYING} s took {statistics.median(late) * 1e3:.2f} ms more in "
        f"the middle, nine of ten at most {late[int(0.9 * len(late))] * 1e3:.2f} ms."
    )
    outcome.goal("delays kept to 1 ms in the middle", abs(statistics.median(late)) <= 1e-3)
    outcome.goal(f"distributions at most 0.1 apart (Kolmogorov and Smirnov; here {apart:.3f})", apart < 0.1)


def kolmogorov_smirnov(a: Sequence[float], b: Sequence[float]) -> float:
    """The largest difference of two distributions."""
    both = sorted([(x, 1 / len(a)) for x in a] + [(x, -1 / len(b)) for x in b])
    heights = itertools.accumulate(by for _, by in both)
    return max(abs(height) for height in heights)


# Targets.


@dataclass(frozen=True)
class Reached:
    """What a run to the target came to."""

    seconds: float | None
    sent: int  # bytes, by all nodes
    staleness: dict[str, int]  # how many pushes were how stale

    @classmethod
    def of(cls, events: Sequence[Event]) -> Reached:
        """From all that was written down."""
        scores = [e for e in events if isinstance(e, Scored)]
        stale = Counter(str(int(e.value)) for e in events if isinstance(e, Logged) and e.name == "staleness")
        return cls(
            achieved(scores, TARGET).seconds, sum(e.sent for e in events if isinstance(e, NodeEnded)), dict(stale)
        )


JOBS = [Job("targets", rate, strategy, seed) for rate in SCENARIOS for strategy in STRATEGIES for seed in range(SEEDS)]


def predict() -> None:
    """Simulate every run to the target, with all that was calibrated on two hosts."""
    model = Model.read(json.loads(lab_prediction.PREDICTIONS.read_text(encoding="utf-8"))["model"])
    lines = []
    for job in JOBS:
        workers = HOSTS - expression.parse(job.strategy).layout.servers
        delay = Oversleeping(compute_times.parse(DELAY), model.late)
        cluster = simulated(model.network(job.megabits), delay, workers, numerics="auto")
        with scratch() as folder:
            carry_out(job, cluster, folder / "run")
            lines.append({**asdict(job), "predicted": asdict(Reached.of(events_of(folder / "run")))})
    PREDICTIONS.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")


def keep(seen: Mapping[Job, list[Event]]) -> None:
    """Write what runs to the target came to."""
    lines = (json.dumps({**asdict(job), "seen": asdict(Reached.of(events))}) for job, events in seen.items())
    SEEN.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def kept(lines: Sequence[dict[str, Any]]) -> dict[Job, Reached]:
    """The same, read again: a job, and under one more name what it came to."""
    names = {field.name for field in fields(Job)}
    found = {}
    for line in lines:
        (reached,) = (value for name, value in line.items() if name not in names)
        found[Job(**{name: value for name, value in line.items() if name in names})] = Reached(**reached)
    return found


def targets(outcome: Outcome) -> None:
    """What was predicted beside what came."""
    written = PREDICTIONS.read_bytes()
    predicted = kept(json.loads(written))
    real = kept([json.loads(line) for line in SEEN.read_text(encoding="utf-8").splitlines()])
    outcome.say(
        f"Targets. The recipe digits to {TARGET.value:.0%} on {HOSTS} hosts (workers and servers), delays {DELAY} s, "
        f"{SEEDS} seeds, models set aside every {EVERY} steps, {STEPS} steps; predicted / real seconds, means of the "
        "seeds, or how many of them got there if not all did. The predictions were written before (lab_targets.json, "
        f"sha256 {hashlib.sha256(written).hexdigest()[:16]}…)."
    )
    cells = [[f"{show(predicted, (r, name))} / {show(real, (r, name))}" for name in STRATEGIES] for r in SCENARIOS]
    outcome.table(["Mbit/s", *STRATEGIES], [[str(rate), *row] for rate, row in zip(SCENARIOS, cells, strict=True)])
    goals(outcome, predicted, real)


def show(runs: Mapping[Job, Reached], key: tuple[int, str]) -> str:
    """Seconds, or how many runs reached the target."""
    mine = [run.seconds for job, run in runs.items() if (job.megabits, job.strategy) == key]
    times = [seconds for seconds in mine if seconds is not None]
    return f"{statistics.fmean(times):.2f}" if len(times) == len(mine) else f"{len(times)} of {len(mine)}"


def means(runs: Mapping[Job, Reached]) -> dict[tuple[int, str], float]:
    """Seconds to the target, by scenario and strategy; infinite if it was missed."""
    found: dict[tuple[int, str], list[float]] = {}
    for job, run in runs.items():
        found.setdefault((job.megabits, job.strategy), []).append(float("inf") if run.seconds is None else run.seconds)
    return {key: statistics.fmean(seconds) for key, seconds in found.items()}


def goals(outcome: Outcome, predicted: Mapping[Job, Reached], real: Mapping[Job, Reached]) -> None:
    """Errors, bytes, staleness, and whether the simulation would have chosen well."""
    told, came = means(predicted), means(real)
    both = [key for key in told if math.isfinite(told[key]) and math.isfinite(came[key])]
    errors = [abs(told[key] / came[key] - 1) for key in both]
    outcome.goal(
        f"time to the target predicted to 10 % in the mean (here {statistics.fmean(errors):.1%}, at most "
        f"{max(errors):.1%}, of the {len(both)} of {len(told)} cells in which all runs and simulations got there)",
        statistics.fmean(errors) <= 0.1,
    )
    same = sum(predicted[job].sent == real[job].sent for job in real)
    outcome.goal(f"bytes to the byte ({same} of {len(real)} runs)", same == len(real))
    apart = [total_variation(stale(predicted, key), stale(real, key)) for key in told if "asp" in key[1]]
    outcome.goal(f"staleness at most 0.1 apart in total variation (here {max(apart):.2f})", max(apart) <= 0.1)
    ranks = [statistics.fmean(orders(told, came, apart)) for apart in (0.0, DECIDED)]
    outcome.goal(
        f"Kendall's τ of at least 0.8 (here {ranks[0]:.2f}, {ranks[1]:.2f} over decided pairs)", ranks[0] >= 0.8
    )
    regrets = []
    for rate in SCENARIOS:
        chosen = min(STRATEGIES, key=lambda name: told[rate, name])
        regrets.append(came[rate, chosen] / min(came[rate, name] for name in STRATEGIES) - 1)
    outcome.goal(
        f"who takes what the simulation says loses at most 5 % (here {max(regrets):.1%})", max(regrets) <= 0.05
    )


def orders(told: Mapping[tuple[int, str], float], came: Mapping[tuple[int, str], float], apart: float) -> list[float]:
    """τ of every scenario."""
    found = []
    for rate in SCENARIOS:
        a, b = ([times[rate, name] for name in STRATEGIES] for times in (told, came))
        if (tau := kendall(a, b, apart)) is not None:
            found.append(tau)
    return found


def stale(runs: Mapping[Job, Reached], key: tuple[int, str]) -> dict[int, int]:
    """Of all seeds."""
    total: Counter[int] = Counter()
    for job, run in runs.items():
        if (job.megabits, job.strategy) == key:
            total.update({int(stale): count for stale, count in run.staleness.items()})
    return dict(total)


def verify(*, again: bool = False) -> Outcome:
    """All three; `again`: of the runs to the target what they came to the last time."""
    outcome = Outcome("Levels of prediction in the laboratory", "Hosts of a laboratory, links of 1 ms.")
    jobs = [*(Job("links", rate) for rate in RATES), Job("delays", 100), *([] if again else JOBS)]
    seen = dict(play(jobs))
    links(outcome, {job: events for job, events in seen.items() if job.kind == "links"})
    computing(outcome, seen[Job("delays", 100)])
    if not again:
        keep({job: events for job, events in seen.items() if job.kind == "targets"})
    targets(outcome)
    return outcome


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("orders", nargs="?", type=Path, help="on a host of a lab")
    parser.add_argument("--only", choices=("predict", "verify", "again"), help="one half of it")
    asked = parser.parse_args()
    quiet_parent()
    if asked.orders is not None:
        obey(asked.orders)
    else:
        print(machine(), end="\n\n")
        with with_token():
            if asked.only in (None, "predict"):
                predict()
            if asked.only != "predict":
                print(verify(again=asked.only == "again"))
