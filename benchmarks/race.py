# SPDX-License-Identifier: Apache-2.0
"""A race on hosts with slow links: LeNet-5 to 85 % on Fashion-MNIST, the best strategy so far against DDP.

    tune     the same learning rates for everyone, on one seed, by the samples to the target; timing does not matter
    race     for real, with other seeds, everyone in turn on the same hosts

python -m benchmarks.race [--rounds R] [--only CONTESTANT ...] [--tune | --report] as root: the hosts are namespaces of
this machine (`orchestra lab`). What was tuned stays beside the results and is used until it is tuned again, and so do
the scores of all models of the last race, of which `--report` tells again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orchestra
from benchmarks.common import DISTURBED, Figure, Outcome, Rounds, machine, quiet_parent, scratch, watched
from benchmarks.lab_prediction import await_quiet
from benchmarks.race_peer import BATCH, MOMENTUM, RESULT, Score, train
from orchestra.cli.in_lab import with_token
from orchestra.errors import Diverged
from orchestra.lab import Lab

TUNED = Path(__file__).with_name("race_tuned.json")
RUNS = Path(__file__).with_name("race_runs.json")
HOSTS = 4
RATE, LATENCY = "10mbit", "1ms"
TARGET = 0.85
EVERY = 32  # steps between two models that are scored
RATES = (0.01, 0.02, 0.04, 0.08)
LONGEST = 960  # steps of a try
MARGIN = 1.4  # steps of a timed run over those of the best try
AIM = 8.0  # times as fast as DDP

# What our own workers tell the allocator; theirs are faster with it, too.
MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
SETTINGS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TORCH_CPP_LOG_LEVEL": "ERROR", **MEMORY}

Tries = Mapping[str, int | None]  # samples to the target by learning rate


@dataclass(frozen=True)
class Contestant:
    """A way to train; its models are scored when all hosts have the same one."""

    name: str  # as `race_peer` has it
    about: str
    tuned_as: str = ""  # whose learning rate it takes, if its updates are the same, or the same but for rounding
    every: int = EVERY

    @property
    def theirs(self) -> bool:
        """Whether it comes with torch."""
        return self.name.startswith("ddp")

    @property
    def tuned(self) -> str:
        """Who was tuned for it."""
        return self.tuned_as or self.name


CONTESTANTS = (
    Contestant("ddp", "DDP", "allreduce"),
    Contestant("ddp-fp16", "DDP, fp16_compress_hook", "allreduce"),
    Contestant("ddp-powersgd-1", "DDP, powerSGD_hook, rank 1"),
    Contestant("ddp-powersgd-4", "DDP, powerSGD_hook, rank 4"),
    Contestant("ddp-local-32", "DDP, post_localSGD_hook, period 32", "localsgd(tau=32)"),
    Contestant("allreduce", "ours, allreduce"),
    Contestant("localsgd(tau=32)", "ours, localsgd(tau=32)"),
    Contestant("localsgd(tau=64)", "ours, localsgd(tau=64)", every=64),
    Contestant("slowmo(tau=32)", "ours, slowmo(tau=32)"),
)


def reached(scores: Sequence[Score]) -> tuple[float, float]:
    """Samples and seconds of the first model that is good enough."""
    return next(((samples, t) for samples, t, score in scores if score >= TARGET), (math.inf, math.inf))


def say(text: str) -> None:
    """Print progress."""
    print(text, file=sys.stderr, flush=True)


# Before.


def tune(contestants: Sequence[Contestant]) -> None:
    """Write down the samples to the target by learning rate, on seed 0; null: not reached in `LONGEST` steps.

    Ours is simulated, theirs is run on hosts with links as fast as can be.
    """
    with Lab(name=f"tune{os.getpid()}", hosts=HOSTS) as lab:
        for who in contestants:
            tries = {}
            for rate in RATES:
                scores = play(lab, who, rate, 0, LONGEST).scores if who.theirs else simulate(who, rate)
                tries[str(rate)] = used if (used := reached(scores)[0]) < math.inf else None
                say(f"tuning {who.name}, learning rate {rate}: {tries[str(rate)]} samples")
            TUNED.write_text(json.dumps(read_tuned() | {who.name: tries}, indent=1) + "\n", encoding="utf-8")


def read_tuned() -> dict[str, Tries]:
    """What was found out so far."""
    return json.loads(TUNED.read_text(encoding="utf-8")) if TUNED.exists() else {}


def simulate(who: Contestant, rate: float) -> list[Score]:
    """Until the target is reached; the seconds do not count."""
    budget = orchestra.Target("accuracy", TARGET) | orchestra.Steps(LONGEST)
    with scratch() as folder:
        try:
            return train(who.name, rate, 0, who.every, orchestra.Simulated(workers=HOSTS), budget, folder / "run")
        except Diverged:
            return []


def best(tries: Tries) -> tuple[float, float]:
    """The learning rate that took the fewest samples, and how many."""
    return min(((float(rate), used) for rate, used in tries.items() if used is not None), key=lambda each: each[1])


# For real.


@dataclass(frozen=True)
class Seen:
    """What a run left."""

    scores: list[Score]
    sent: float  # bytes that left a host, the mean over the hosts, from the first process's start to the last one's end
    strangers: float = 0.0  # share of the cores that others used

    @property
    def sent_to_target(self) -> float:
        """Bytes until the target was reached: every round of steps sends as much as any other."""
        return self.sent * reached(self.scores)[0] / self.scores[-1][0]


def play(lab: Lab, who: Contestant, rate: float, seed: int, steps: int) -> Seen:
    """A run on all hosts."""
    with scratch() as folder:
        words = [who.name, rate, seed, steps, who.every, folder]
        before = sent(lab)
        code = 0

        def go() -> list[float]:
            nonlocal code
            code = lab.run([sys.executable, "-m", "benchmarks.race_peer", *map(str, words)], out=sys.stderr.buffer)
            return []

        strangers, _, _ = watched(go)
        if code:
            raise SystemExit(f"{who.name} ended with status {code}")
        scores = [tuple(score) for score in json.loads((folder / RESULT).read_text(encoding="utf-8"))]
        return Seen(scores, statistics.fmean(b - a for a, b in zip(before, sent(lab), strict=True)), strangers)


def sent(lab: Lab) -> list[int]:
    """Bytes that have left each host, as its kernel counts them: headers and all."""
    counter = ["cat", "/sys/class/net/eth0/statistics/tx_bytes"]
    return [int(subprocess.check_output(lab.command(host, counter))) for host in range(1, HOSTS + 1)]


def steps_of(who: Contestant, samples: float) -> int:
    """Steps of a timed run: more than those of the best try, in whole rounds."""
    return math.ceil(MARGIN * samples / (BATCH * HOSTS) / who.every) * who.every


def race(contestants: Sequence[Contestant], rounds: int) -> dict[str, list[Seen]]:
    """Everyone once a round, each round with a seed of its own, every other one backwards."""
    tuned = read_tuned()
    found: dict[str, list[Seen]] = {who.name: [] for who in contestants}
    with with_token(), Lab(name=f"race{os.getpid()}", hosts=HOSTS, rate=RATE, latency=LATENCY) as lab:
        for number in range(1, rounds + 1):
            for who in contestants if number % 2 else reversed(contestants):
                rate, samples = best(tuned[who.tuned])
                await_quiet()
                seen = play(lab, who, rate, number, steps_of(who, samples))
                found[who.name].append(seen)
                RUNS.write_text(json.dumps(found, default=asdict) + "\n", encoding="utf-8")
                used, seconds = reached(seen.scores)
                say(f"round {number}, {who.name}: {used:,.0f} samples, {seconds:.1f} s; others {seen.strangers:.0%}")
    return found


# After.


def read_runs() -> dict[str, list[Seen]]:
    """What the last race left."""
    return {name: [Seen(**seen) for seen in runs] for name, runs in json.loads(RUNS.read_text("utf-8")).items()}


@dataclass(frozen=True)
class Report:
    """What came of it."""

    contestants: Sequence[Contestant]
    found: Mapping[str, Sequence[Seen]]
    tuned: Mapping[str, Tries]

    def told(self) -> Outcome:
        """All of it."""
        outcome = Outcome("The race to 85 % on slow links", self._question())
        names = [who.name for who in self.contestants]
        seconds = self._figures(lambda seen: reached(seen.scores)[1])
        theirs = min((who for who in names if who.startswith("ddp")), key=lambda who: seconds[who].median)
        ours = min((who for who in names if not who.startswith("ddp")), key=lambda who: seconds[who].median)
        outcome.table(
            [
                "contestant", "learning rate", "samples to the target", "seconds to the target", "ms a step",
                "MB sent by a host", "times as fast as DDP", f"as {self._about(theirs)}",
            ],
            [self._row(who, seconds, theirs) for who in self.contestants],
        )  # fmt: skip
        outcome.say(self._tries())
        outcome.say(self._load())
        for other in [who for who in names if who.startswith("ddp") and who != "ddp"]:
            ratio = seconds.ratio(other, ours)
            outcome.say(f"{self._about(ours)} against {self._about(other)}: {show(ratio, 2)} times as fast.")
        ratio = seconds.ratio("ddp", ours)
        outcome.goal(
            f"the strategy of fewest seconds here ({self._about(ours)}) at least {AIM:g} times as fast as DDP: "
            f"{show(ratio, 1)} times",
            ratio.median >= AIM,
            quiet=statistics.median(self._shares()) <= DISTURBED,
        )
        return outcome

    def _about(self, name: str) -> str:
        return next(who.about for who in self.contestants if who.name == name)

    def _figures(self, take: Callable[[Seen], float]) -> Rounds:
        rounds = Rounds()
        for name, seen in self.found.items():
            for each in seen:
                rounds.add(name, take(each))
        return rounds

    def _row(self, who: Contestant, seconds: Rounds, theirs: str) -> list[str]:
        samples = self._figures(lambda seen: reached(seen.scores)[0])[who.name]
        step = self._figures(lambda seen: seen.scores[-1][1] / seen.scores[-1][0] * BATCH * HOSTS)[who.name]
        traffic = self._figures(lambda seen: seen.sent_to_target)[who.name]
        return [
            who.about,
            f"{best(self.tuned[who.tuned])[0]:g}",
            show(samples, 0),
            show(seconds[who.name], 1),
            show(step, 1, 1e3),
            show(traffic, 1, 1e-6),
            show(seconds.ratio("ddp", who.name), 1),
            show(seconds.ratio(theirs, who.name), 2),
        ]

    def _question(self) -> str:
        rounds = len(next(iter(self.found.values())))
        return (
            f"{HOSTS} hosts of a laboratory with links of 10 Mbit/s and 1 ms; LeNet-5 (61,706 parameters), "
            f"Fashion-MNIST (60,000 to train, 10,000 to test), batch {BATCH} on each host, SGD with momentum "
            f"{MOMENTUM:g}, no weight decay, a constant learning rate; {rounds} seeds, everyone once with each, in "
            f"turn on the same hosts. Models are set aside every {EVERY} steps (every τ if that is more, so that all "
            "hosts have the one that is scored) and scored when the run is over, all by one function; the first one "
            "right on 85 % of the test set counts. Setting aside is timed for all (theirs is kept in memory, "
            "ours written to a file), starting and scoring are not timed. Means of ours are taken by Gloo, as theirs "
            "are, unencrypted. All hosts share two cores, one thread each, so that a step takes twice as long to "
            "compute as on hosts of their own; that is the same for all, and costs most those that communicate least. "
            "MB are what the kernel counted, headers included. Median (least to most); ratios round by round. ∞: not "
            f"within {MARGIN:g} times the samples of the best try."
        )

    def _tries(self) -> str:
        tried = {name: tries for name, tries in self.tuned.items() if name in {who.tuned for who in self.contestants}}
        found = "; ".join(
            f"{name}: " + ", ".join(f"{rate}: {f'{used:,}' if used else 'not'}" for rate, used in tries.items())
            for name, tries in tried.items()
        )
        return (
            f"Tuned on another seed, {len(RATES)} tries for each, by the samples to the target, of {LONGEST} steps at "
            "most, ours in simulation. DDP, also with fp16, makes the updates of allreduce, and post_localSGD those of "
            f"localsgd, so they share a learning rate. Samples by learning rate: {found}."
        )

    def _shares(self) -> list[float]:
        return [each.strangers for seen in self.found.values() for each in seen]

    def _load(self) -> str:
        shares = self._shares()
        return (
            f"Other programs, the laboratory's delay line among them, used {statistics.median(shares):.0%} of the "
            f"cores in the middle of the runs ({min(shares):.0%} to {max(shares):.0%})."
        )


def show(figure: Figure, digits: int, scale: float = 1.0) -> str:
    """Median and range."""
    return figure.show(digits, scale).replace("inf", "∞")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[who.name for who in CONTESTANTS], help="contestants")
    parser.add_argument("--tune", action="store_true", help="tune them again, and do not race")
    parser.add_argument("--report", action="store_true", help="tell of the last race")
    given = parser.parse_args()
    quiet_parent()
    os.environ |= SETTINGS
    chosen = [who for who in CONTESTANTS if who.name in given.only]
    if given.tune:
        tune([who for who in chosen if not who.tuned_as])
        return
    print(machine(), end="\n\n", flush=True)
    print(Report(chosen, read_runs() if given.report else race(chosen, given.rounds), read_tuned()).told())


if __name__ == "__main__":
    main()
