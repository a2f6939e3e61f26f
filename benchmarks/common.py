# SPDX-License-Identifier: Apache-2.0
"""Interleaving and statistics.

The machine is shared and noisy, so figures of different runs are not comparable. Contestants therefore take turns
within one run: in each round everyone does a few dozen steps. A contestant's figure of a round is its median step;
differences and ratios are taken within a round, and reported as the median over the rounds with the least and the most.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from orchestra.probe import measure as probing

ROOT = Path(__file__).resolve().parents[1]


# Statistics.


@dataclass
class Figure:
    """A figure of every round."""

    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def show(self, digits: int = 1, scale: float = 1.0) -> str:
        """Median (least to most)."""
        low, high = min(self.values) * scale, max(self.values) * scale
        return f"{self.median * scale:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


class Rounds:
    """Figures by name, one of each per round."""

    def __init__(self) -> None:
        self.figures: dict[str, Figure] = defaultdict(Figure)

    def add(self, name: str, value: float) -> None:
        """Note this round's value."""
        self.figures[name].values.append(value)

    def __getitem__(self, name: str) -> Figure:
        return self.figures[name]

    def minus(self, name: str, base: str) -> Figure:
        """Differences, round by round."""
        return Figure([a - b for a, b in self._pairs(name, base)])

    def ratio(self, name: str, base: str) -> Figure:
        """Ratios, round by round."""
        return Figure([a / b for a, b in self._pairs(name, base)])

    def _pairs(self, name: str, base: str) -> Iterator[tuple[float, float]]:
        return zip(self[name].values, self[base].values, strict=True)


@dataclass
class Turns:
    """What everyone measured in every round, and what the processors did meanwhile."""

    samples: dict[str, list[list[float]]]
    foreign: dict[str, list[float]]  # share of the cores that strangers used
    processor: dict[str, list[float]]  # seconds that our own processes used; a contestant that is not at turn sleeps

    def counted(self) -> list[int]:
        """The rounds with little disturbance; all of them if those are too few."""
        rounds = range(min(map(len, self.samples.values())))
        quiet = [r for r in rounds if all(shares[r] <= DISTURBED for shares in self.foreign.values())]
        return quiet if len(quiet) >= LEAST_ROUNDS else list(rounds)

    def by(self, reduce: Callable[[list[float]], float]) -> Rounds:
        """One figure per turn of the rounds that count."""
        rounds = Rounds()
        for name, turns in self.samples.items():
            for number in self.counted():
                rounds.add(name, reduce(turns[number]))
        return rounds

    @property
    def quiet(self) -> bool:
        """Whether what was measured by the clock can be relied on."""
        counted = self.counted()
        return statistics.median(s[r] for s in self.foreign.values() for r in counted) <= DISTURBED

    def processor_by(self, steps: int) -> Rounds:
        """Processor seconds of all processes of a contestant together, per step: strangers hardly change those."""
        rounds = Rounds()
        for name, turns in self.processor.items():
            for number in self.counted():
                rounds.add(name, turns[number] / steps)
        return rounds

    def disturbance(self) -> str:
        """How much of the machine went to others."""
        counted = self.counted()
        shares = [shares[r] for shares in self.foreign.values() for r in counted]
        return (
            f"{len(counted)} of {max(map(len, self.samples.values()))} rounds count; in them other programs used "
            f"{statistics.median(shares):.0%} of the cores (up to {max(shares):.0%} in a turn)."
        )


def interleave(contestants: dict[str, Callable[[], list[float]]], rounds: int) -> Turns:
    """Let everyone measure once per round, in turn; every other round backwards.

    A turn during which strangers used much of the machine is taken again, while there is time; the quietest one counts.
    """
    result = Turns(
        {name: [] for name in contestants}, {name: [] for name in contestants}, {name: [] for name in contestants}
    )
    deadline = time.monotonic() + EXTRA_SECONDS
    for number in range(rounds):
        order = list(contestants.items())
        for name, measure in order if number % 2 == 0 else reversed(order):
            tries = [watched(measure)]
            while tries[-1][0] > QUIET and time.monotonic() < deadline and len(tries) < MOST_TRIES:
                time.sleep(0.5)
                tries.append(watched(measure))
            foreign, samples, processor = min(tries)
            result.samples[name].append(samples)
            result.foreign[name].append(foreign)
            result.processor[name].append(processor)
    return result


QUIET = 0.04  # share of the cores that strangers may use during a turn without its being taken again
DISTURBED = 0.12  # share from which a turn makes its round worthless
LEAST_ROUNDS = 4  # unless fewer than these would be left
EXTRA_SECONDS = 60.0  # after so long a disturbed turn is kept as it is
MOST_TRIES = 5


def watched(measure: Callable[[], list[float]]) -> tuple[float, list[float], float]:
    """The share of the cores that went to strangers, what was measured, and our own processor seconds."""
    began, busy, own = time.monotonic(), busy_seconds(), own_seconds()
    value = measure()
    took, own = time.monotonic() - began, own_seconds() - own
    strangers = (busy_seconds() - busy - own) / (os.cpu_count() or 1) / took
    return max(0.0, strangers), value, own


_TICK = os.sysconf("SC_CLK_TCK")


def busy_seconds() -> float:
    """Seconds that all cores together were not idle, since boot."""
    user, nice, system, _, _, interrupts, soft, steal = _cpu_line()[:8]
    return (user + nice + system + interrupts + soft + steal) / _TICK


def _cpu_line() -> list[int]:
    return [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]


def own_seconds() -> float:
    """Processor seconds of this process and all its descendants, those that ended included."""
    parents, seconds = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(path.parent.name)
        parents[pid] = int(words[1])
        seconds[pid] = sum(map(int, words[11:15])) / _TICK
    family, known = {os.getpid()}, 0
    while known != len(family):
        known = len(family)
        family |= {pid for pid, parent in parents.items() if parent in family}
    return sum(seconds.get(pid, 0.0) for pid in family)


# What a script leaves behind.


@dataclass
class Outcome:
    """Tables and verdicts of one script, as Markdown."""

    title: str
    question: str
    lines: list[str] = field(default_factory=list)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Add a table."""
        widths = [max(len(str(row[i])) for row in [head, *rows]) for i in range(len(head))]

        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(str(c).ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"

        self.lines += [line(head), "|" + "|".join("-" * (w + 2) for w in widths) + "|", *map(line, rows), ""]

    def say(self, text: str) -> None:
        """Add a paragraph."""
        self.lines += [text, ""]

    def part(self, heading: str) -> None:
        """Begin a part."""
        self.say(f"### {heading}")

    def goal(self, what: str, met: bool, *, quiet: bool = True) -> None:
        """State a goal and whether it was reached here."""
        doubt = (
            ""
            if quiet
            else " The machine was busy with other programs: look at the processor time if given, and repeat."
        )
        self.say(f"Goal: {what}. **{'Reached' if met else 'Missed'}.**{doubt}")

    def __str__(self) -> str:
        return "\n".join([f"## {self.title}", "", self.question, "", *self.lines])


def main(measure: Callable[[int], Outcome], *, rounds: int) -> None:
    """`python -m benchmarks.NAME [--rounds R]`."""
    parser = argparse.ArgumentParser(description=measure.__doc__)
    parser.add_argument("--rounds", type=int, default=rounds, help="how often everyone takes a turn")
    arguments = parser.parse_args()
    quiet_parent()
    print(machine(), end="\n\n")
    print(measure(arguments.rounds))


def quiet_parent() -> None:
    """Keep this process's own threads off the cores that the contestants use."""
    torch.set_num_threads(1)


# The machine.


def machine() -> str:
    """Date, commit, cores, model, versions, and how busy the machine is."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return f"{now}, commit {commit()}: {probing.machine()}{gpu}; load {load}, steal {steal():.1%} since boot."


def commit() -> str:
    """The commit that is measured; with a plus if files differ from it."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=False).stdout.strip() or "unknown"


def steal() -> float:
    """Share of processor time the hypervisor gave to others since boot."""
    numbers = _cpu_line()
    return numbers[7] / sum(numbers)


# Files.


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="orchestra-benchmark-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
