# SPDX-License-Identifier: Apache-2.0
"""Do links shared by several flows share as the simulator has it?

Plain sockets, without our messages, between the hosts of a laboratory: all flows of a pattern begin at once, and each
receiver notes when its last byte came. The simulator is told the rates of the links, less the bytes of headers.

Needs root: the hosts are namespaces of this machine (`orchestra lab`).
"""

from __future__ import annotations

import io
import itertools
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass

from benchmarks.common import Outcome, main
from benchmarks.lab_cells import LATENCY
from orchestra.lab import Lab
from orchestra.worlds.simulated.kernel import Kernel
from orchestra.worlds.simulated.network import VirtualNetwork
from orchestra.worlds.simulated.networks import Host, Network

HEADERS = 0.045  # bytes of TCP, IP and Ethernet beside each of ours: 66 on 1,448
BYTES = 1_000_000  # of every flow
Flow = tuple[int, int]  # from host to host

SCRIPT = """
import json, os, socket, sys, threading, time
rank, size, total, at = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(sys.argv[2]), float(sys.argv[3])
flows = json.loads(sys.argv[1])
server = socket.create_server(("", 5000), backlog=16)
def receive():
    c = server.accept()[0]
    source, left = c.recv(1)[0], total
    while left: left -= len(c.recv(min(left, 1 << 16)))
    print(json.dumps([source, rank, time.time() - at]), flush=True)
    c.close()
def send(c):
    c.sendall(bytes(total))
    c.recv(1)
ears = [threading.Thread(target=receive) for source, to in flows if to == rank]
outs = []
for source, to in flows:
    if source == rank:
        while True:
            try: c = socket.create_connection((f"host-{to + 1}", 5000), timeout=60); break
            except ConnectionRefusedError: time.sleep(0.02)
        c.sendall(bytes([rank]))
        outs.append(threading.Thread(target=send, args=(c,)))
time.sleep(max(0, at - time.time()))
for thread in ears + outs: thread.start()
for thread in ears + outs: thread.join()
"""


@dataclass(frozen=True)
class Pattern:
    """Who sends to whom."""

    name: str
    flows: tuple[Flow, ...]
    up: tuple[float, ...] = (20, 20, 20, 20)  # Mbit/s of every host; down as the first


def _pairs(hosts: int) -> tuple[Flow, ...]:
    return tuple(itertools.permutations(range(hosts), 2))


PATTERNS = (
    Pattern("one to one", ((1, 0),)),
    Pattern("two to one", ((1, 0), (2, 0))),
    Pattern("three to one", ((1, 0), (2, 0), (3, 0))),
    Pattern("one to three", ((0, 1), (0, 2), (0, 3))),
    Pattern("ring of four", ((0, 1), (1, 2), (2, 3), (3, 0))),
    Pattern("all to all, three", _pairs(3)),
    Pattern("all to all, four", _pairs(4)),
    Pattern("two to one and one beside", ((1, 0), (2, 0), (1, 3))),
    Pattern("two to one, one of them slow", ((1, 0), (2, 0)), up=(20, 20, 6, 20)),
)


def measure(rounds: int) -> Outcome:
    """Do links shared by several flows share as the simulator has it?"""
    outcome = Outcome(
        "Shared links",
        f"Flows of {BYTES:,} bytes between hosts of a laboratory with links of 20 Mbit/s and {LATENCY * 1e3:g} ms, all "
        f"begun at once, through plain sockets; {rounds} rounds, the median of each flow. Predicted by max-min fair "
        f"shares of the rates less {HEADERS:.1%} of headers, which were not fitted.",
    )
    rows, errors = [], []
    for pattern in PATTERNS:
        runs = [real(pattern) for _ in range(rounds)]
        predicted = simulated(pattern)
        seen = {flow: statistics.median(run[flow] for run in runs) for flow in pattern.flows}
        own = [abs(predicted[flow] / seen[flow] - 1) for flow in pattern.flows]
        ends = [f"{max(each.values()):.2f}" for each in (predicted, seen)]
        rows.append([pattern.name, str(len(own)), *ends, f"{statistics.median(own):.1%}", f"{max(own):.1%}"])
        errors += own
    head = ["pattern", "flows", "all there, predicted, s", "real, s", "error by flow, median", "most"]
    outcome.table(head, rows)
    outcome.goal(
        f"median error by flow of at most 10 % ({statistics.median(errors):.1%})", statistics.median(errors) <= 0.1
    )
    return outcome


def real(pattern: Pattern) -> dict[Flow, float]:
    """Seconds until the last byte of each flow came."""
    said = io.BytesIO()
    up = {i + 1: {"up": f"{rate}mbit"} for i, rate in enumerate(pattern.up) if rate != pattern.up[0]}
    rate = f"{pattern.up[0]}mbit"
    with Lab(name=f"flows{os.getpid()}", hosts=4, rate=rate, latency=LATENCY, exceptions=up) as lab:
        order = [json.dumps(pattern.flows), str(BYTES), str(time.time() + START)]
        if lab.run([sys.executable, "-I", "-S", "-c", SCRIPT, *order], out=said):
            raise SystemExit(f"{pattern.name} failed")
    lines = [json.loads(line.partition(" | ")[2]) for line in said.getvalue().decode().splitlines()]
    return {(source, to): seconds for source, to, seconds in lines}


START = 1.5  # seconds for all hosts to be ready


def simulated(pattern: Pattern) -> dict[Flow, float]:
    """The same in virtual time."""
    up, down = ([rate * 1e6 / (1 + HEADERS) for rate in rates] for rates in (pattern.up, pattern.up[:1] * 4))
    hosts = tuple(Host(up=u, down=d, latency=LATENCY / 2) for u, d in zip(up, down, strict=True))
    kernel, found = Kernel(), dict[Flow, float]()
    world = VirtualNetwork(kernel, Network(hosts=hosts), 4, 4)
    for flow in pattern.flows:
        world.carry(world.way(*flow), BYTES, lambda flow: found.__setitem__(flow, kernel.now), flow)
    kernel.run()
    return found


if __name__ == "__main__":
    main(measure, rounds=3)
