# SPDX-License-Identifier: Apache-2.0
"""How much of a link do our messages use: a ring of hosts, and a server that all push to?

Needs root: the hosts are namespaces of this machine (`orchestra lab`), so they share its cores.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path

from benchmarks.common import Outcome, Rounds, main, scratch
from orchestra.cli.in_lab import with_token
from orchestra.lab import Lab
from orchestra.runs.events import Stepped, read

STRATEGIES = ("allreduce(algorithm='ring')", "allreduce", "ps(consistency=asp())")
WAYS = ("TLS", "trusted")
HOSTS = (2, 4)
MANY = 7  # of which one has the server: how many workers does it take to keep its link busy?
STEPS = 12
LATENCY = "0.2ms"
MEGABITS = 100
RATE = MEGABITS * 1e6 / 8  # bytes a second
NUMBERS = 1_001_000
BYTES = 4 * NUMBERS

SCRIPT = """
import sys, torch, orchestra
from functools import partial
strategy, steps, trusted, out = sys.argv[1:]
orchestra.train(
    model=lambda: torch.nn.Linear(1000, 1000), data=lambda: (torch.zeros(999, 1000), torch.zeros(999, 1000)),
    loss=torch.nn.functional.mse_loss, optimizer=partial(torch.optim.SGD, lr=0.1), strategy=strategy, batch=1,
    budget=orchestra.Steps(int(steps)), out=out, progress=False,
    cluster=orchestra.Attached(order="given", trusted=trusted == "trusted", threads=1),
)
"""

COUNTER = """
import time
while True:
    link = next(line for line in open("/proc/net/dev") if "eth0" in line).split(":")[1].split()
    print(time.monotonic(), link[0], link[8], flush=True)
    time.sleep(0.2)
"""


def train(lab: Lab, strategy: str, way: str, run: Path) -> None:
    """A run on all hosts of a lab."""
    if code := lab.run([sys.executable, "-c", SCRIPT, strategy, str(STEPS), way, str(run)]):
        raise SystemExit(f"{strategy} ended with status {code}")


def step_of(run: Path) -> float:
    """Seconds of a step of worker 0; the first ones, when windows of TCP are still small, do not count."""
    times = [event.t for event in read(run / "events-0.jsonl") if isinstance(event, Stepped)]
    return statistics.median(b - a for a, b in list(pairwise(times))[2:])


@contextmanager
def counted(lab: Lab, host: int) -> Iterator[list[list[float]]]:
    """Seconds, bytes received and bytes sent on a host's link, five times a second; there when this is over."""
    found: list[list[float]] = []
    counting = subprocess.Popen(
        lab.command(host, [sys.executable, "-c", COUNTER]), stdout=subprocess.PIPE, text=True, env=lab.environment(host)
    )
    try:
        yield found
    finally:
        counting.terminate()
        said, _ = counting.communicate()
        found += [[float(word) for word in line.split()] for line in said.splitlines()]


def busy(samples: list[list[float]]) -> float:
    """The share of its rate at which a link was used, the busier way, while the middle half of all bytes passed it."""

    def share(way: int) -> float:
        first, last = samples[0][way], samples[-1][way]
        within = [s for s in samples if 0.25 <= (s[way] - first) / (last - first) <= 0.75]
        return (within[-1][way] - within[0][way]) / (within[-1][0] - within[0][0]) / RATE

    return max(share(1), share(2))


def measure(rounds: int) -> Outcome:
    """How much of a link do our messages use?"""
    outcome = Outcome(
        "Use of a link",
        f"Hosts of a laboratory with links of {MEGABITS} Mbit/s and {LATENCY}; {NUMBERS:,} parameters, batch 1, "
        f"{STEPS} steps, {rounds} rounds. All-reduce: the ideal step, 2 (N−1)/N S/R, as a share of the median step. "
        "Asynchronous server, on one of the hosts: bytes that passed its link as the kernel counts them (headers and "
        "acknowledgements included, as the link's rate is counted), in the busier direction, while the middle half of "
        "all bytes passed. One worker alone waits for each answer, so a link that goes both ways is used by half. "
        "Headers take 4 % of the ideal step of a ring, which does not count them.",
    )
    found = Rounds()
    with with_token(), scratch() as folder:
        for number in range(rounds):
            for hosts in (*HOSTS, MANY):
                with Lab(name=f"links{os.getpid()}", hosts=hosts, rate=f"{MEGABITS}mbit", latency=LATENCY) as lab:
                    for strategy, way in product(STRATEGIES if hosts in HOSTS else STRATEGIES[-1:], WAYS):
                        run = folder / f"{number}-{hosts}-{STRATEGIES.index(strategy)}-{way}"
                        with counted(lab, hosts) as samples:
                            train(lab, strategy, way, run)
                        share = busy(samples) if strategy.startswith("ps") else efficiency(run, hosts)
                        found.add(f"{strategy}|{hosts}|{way}", share)
    names = [f"{strategy}|{hosts}|{way}" for strategy, hosts, way in product(STRATEGIES, HOSTS, WAYS)]
    names += [f"{STRATEGIES[-1]}|{MANY}|{way}" for way in WAYS]
    outcome.table(
        ["strategy", "hosts", "connection", "used of the link, %"],
        [[*name.split("|"), found[name].show(1, 100)] for name in names],
    )
    ring = min(found[name].median for name in names if "ring" in name)
    served = min(found[name].median for name in names if name.startswith("ps") and "|2|" not in name)
    outcome.goal(f"a ring of messages at 85 % of the ideal or more (least here {ring:.1%})", ring >= 0.85)
    goal = f"the link of an asynchronous server with {HOSTS[-1] - 1} workers or more 90 % busy or more"
    outcome.goal(f"{goal} (least here {served:.1%})", served >= 0.9)
    return outcome


def efficiency(run: Path, hosts: int) -> float:
    """The ideal step of a ring as a share of the step."""
    return 2 * (hosts - 1) / hosts * BYTES / RATE / step_of(run)


if __name__ == "__main__":
    main(measure, rounds=3)
