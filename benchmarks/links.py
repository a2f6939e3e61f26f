# SPDX-License-Identifier: Apache-2.0
"""How much of a link do our messages use: a ring of hosts, and a server that everybody pushes to?

Needs root: the hosts are namespaces of this machine (`orchestra lab`), so they share its cores.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path

from benchmarks.common import Outcome, Rounds, main, scratch
from orchestra.events import Stepped, read
from orchestra.lab import Lab
from orchestra.transports import token

STRATEGIES = ("allreduce(algorithm='ring')", "allreduce", "ps(consistency=asp())")
WAYS = ("TLS", "trusted")
HOSTS = (2, 4)
MANY = 7  # of which one has the server: how many workers does it take to keep its link busy?
STEPS = 12
LATENCY = "0.2ms"
_HEADERS = 1.043  # bytes on the wire for each of a message: 1,514 for 1,448, and those of TLS
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


@contextmanager
def secret() -> Iterator[None]:
    """A token for the runs inside."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "token"
        path.touch(mode=0o600)
        path.write_text(token.new(), encoding="ascii")
        os.environ["ORCHESTRA_TOKEN_FILE"] = str(path)
        yield
        del os.environ["ORCHESTRA_TOKEN_FILE"]


def train(lab: Lab, strategy: str, way: str, run: Path) -> None:
    """A run on all hosts of a lab."""
    if code := lab.run([sys.executable, "-c", SCRIPT, strategy, str(STEPS), way, str(run)]):
        raise SystemExit(f"{strategy} ended with status {code}")


def step_of(run: Path) -> float:
    """Seconds of a step of worker 0; the first ones, when windows of TCP are still small, do not count."""
    times = [event.t for event in read(run / "events-0.jsonl") if isinstance(event, Stepped)]
    return statistics.median(b - a for a, b in list(pairwise(times))[2:])


def busy(run: Path, server: int) -> float:
    """The share of its rate at which the server's link was used while all workers were at it, the busier direction."""
    steps = [[e for e in read(run / f"events-{w}.jsonl") if isinstance(e, Stepped)] for w in range(server)]
    began, ended = max(mine[1].t for mine in steps), min(mine[-1].t for mine in steps)
    within = [[event for event in mine if began <= event.t <= ended] for mine in steps]
    sent, received = (
        sum((getattr(mine[-1], way) - getattr(mine[0], way)) / (mine[-1].t - mine[0].t) for mine in within)
        for way in ("sent", "received")
    )
    return max(sent, received) / RATE


def measure(rounds: int) -> Outcome:
    """How much of a link do our messages use?"""
    outcome = Outcome(
        "Use of a link",
        f"Hosts of a laboratory with links of {MEGABITS} Mbit/s and {LATENCY}; {NUMBERS:,} parameters, batch 1, "
        f"{STEPS} steps, {rounds} rounds. All-reduce: the ideal step, 2 (N−1)/N S/R, as a share of the median step. "
        "Asynchronous server, on one of the hosts: bytes that passed its link in the busier direction while all "
        "workers were at it, as a share of what could have passed. Headers of TCP and IP, which take 4 %, do not "
        "count as use. One worker alone waits for each answer, so a link that goes both ways is used by half; three "
        "still leave it idle now and then.",
    )
    found = Rounds()
    with secret(), scratch() as folder:
        for number in range(rounds):
            for hosts in (*HOSTS, MANY):
                with Lab(name=f"links{os.getpid()}", hosts=hosts, rate=f"{MEGABITS}mbit", latency=LATENCY) as lab:
                    for strategy, way in product(STRATEGIES if hosts in HOSTS else STRATEGIES[-1:], WAYS):
                        run = folder / f"{number}-{hosts}-{STRATEGIES.index(strategy)}-{way}"
                        train(lab, strategy, way, run)
                        found.add(f"{strategy}|{hosts}|{way}", share_of(run, strategy, hosts))
    names = [f"{strategy}|{hosts}|{way}" for strategy, hosts, way in product(STRATEGIES, HOSTS, WAYS)]
    names += [f"{STRATEGIES[-1]}|{MANY}|{way}" for way in WAYS]
    outcome.table(
        ["strategy", "hosts", "connection", "used of the link, %"],
        [[*name.split("|"), found[name].show(1, 100)] for name in names],
    )
    ring = min(found[name].median for name in names if "ring" in name)
    served = min(found[name].median for name in names if name.startswith("ps") and f"|{MANY}|" in name)
    outcome.goal(f"a ring of messages at 85 % of the ideal or more (least here {ring:.1%})", ring >= 0.85)
    busiest = served * _HEADERS
    goal = f"the link of an asynchronous server with {MANY - 1} workers 90 % busy or more, headers included"
    outcome.goal(f"{goal} (least here {busiest:.1%})", busiest >= 0.9)
    return outcome


def share_of(run: Path, strategy: str, hosts: int) -> float:
    """What was used of the link."""
    if strategy.startswith("ps"):
        return busy(run, hosts - 1)
    return 2 * (hosts - 1) / hosts * BYTES / RATE / step_of(run)


if __name__ == "__main__":
    main(measure, rounds=3)
