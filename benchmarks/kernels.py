# SPDX-License-Identifier: Apache-2.0
"""How fast is virtual time by itself: our kernel beside a bare heap, SimPy and SimGrid?

waits       a hundred tasks that only let time pass
messages    fifty pairs of tasks that throw 1 kB to and fro over links of 1 Gbit/s, shared fairly (SimGrid: CM02);
            SimPy has no network: its tasks hand over an object after a while
"""

from __future__ import annotations

import heapq
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, Outcome, Rounds, main

TASKS, PAIRS, SIZE, RATE = 100, 50, 1000, 1.25e8
DEBIAN = Path("/usr/lib/python3/dist-packages")  # where Debian's python3-simgrid is


def timed(act: Callable[[], object], count: int) -> float:
    """Times a second."""
    began = time.perf_counter()
    act()
    return count / (time.perf_counter() - began)


def heap(count: int) -> tuple[float, None]:
    """Callbacks in a heap: the least that any kernel does."""
    queue: list[tuple[float, int, Any]] = []
    number = 0

    def again(left: int, now: float) -> None:
        nonlocal number
        if left:
            number += 1
            heapq.heappush(queue, (now + 1.0, number, left - 1))

    def run() -> None:
        while queue:
            now, _, left = heapq.heappop(queue)
            again(left, now)

    for _ in range(TASKS):
        again(count, 0.0)
    return timed(run, TASKS * count), None


def ours(count: int, kind: Any = "greenlet") -> tuple[float, float]:
    """Our own."""
    import torch

    from orchestra.core.ops import Group, Recv, Send, Sleep
    from orchestra.worlds.simulated.kernel import Kernel
    from orchestra.worlds.simulated.network import VirtualNetwork
    from orchestra.worlds.simulated.networks import Host, Network
    from orchestra.worlds.simulated.transport import connect

    network = Network(hosts=(Host(up=8 * RATE, down=8 * RATE),))

    def world(nodes: int) -> tuple[Kernel, list[Any]]:
        kernel = Kernel(fiber=kind)
        return kernel, connect(VirtualNetwork(kernel, network, nodes, nodes), nodes)

    kernel, ends = world(TASKS)

    def wait(end: Any) -> Callable[[], None]:
        def body() -> None:
            for _ in range(count):
                end.start(Sleep(1.0)).wait()

        return body

    for end in ends:
        kernel.spawn("waits", wait(end))
    waits = timed(kernel.run, TASKS * count)

    kernel, ends = world(2 * PAIRS)
    x, group = torch.empty(SIZE // 4, device="meta"), Group(tuple(range(2 * PAIRS)))

    def throw(end: Any) -> Callable[[], None]:
        other, first = end.rank ^ 1, end.rank % 2 == 0

        def body() -> None:
            for _ in range(count // 2):
                if first:
                    end.start(Send(other, x)).wait()
                end.start(Recv(other, group)).wait()
                if not first:
                    end.start(Send(other, x)).wait()

        return body

    for end in ends:
        kernel.spawn("throws", throw(end))
    return waits, timed(kernel.run, PAIRS * 2 * (count // 2))


def threads(count: int) -> tuple[float, float]:
    """Our own, on threads."""
    return ours(count // 4, "thread")


def simpy(count: int) -> tuple[float, float]:
    """SimPy."""
    import simpy as library

    env = library.Environment()

    def wait() -> Any:
        for _ in range(count):
            yield env.timeout(1.0)

    for _ in range(TASKS):
        env.process(wait())
    waits = timed(env.run, TASKS * count)
    env = library.Environment()

    def throw(mine: Any, other: Any, first: bool) -> Any:
        for _ in range(count // 2):
            if first:
                yield env.timeout(SIZE / RATE)
                yield other.put(1)
            yield mine.get()
            if not first:
                yield env.timeout(SIZE / RATE)
                yield other.put(1)

    for _ in range(PAIRS):
        a, b = library.Store(env), library.Store(env)
        env.process(throw(a, b, True))
        env.process(throw(b, a, False))
    return waits, timed(env.run, PAIRS * 2 * (count // 2))


def simgrid(count: int) -> tuple[float, float]:
    """SimGrid, from Python."""
    return _simgrid_waits(count // 10), _simgrid_apart(count // 10)


def _simgrid_engine() -> Any:
    sys.path.append(str(DEBIAN))
    from simgrid import Engine

    settings = ("network/model:CM02", "network/crosstraffic:0", "network/TCP-gamma:0")
    return Engine(["benchmark", "--log=root.thres:critical", *(f"--cfg={setting}" for setting in settings)])


def _simgrid_hosts(count: int) -> list[Any]:
    from simgrid import LinkInRoute, NetZone

    zone, hosts = NetZone.create_star_zone("zone"), []
    for i in range(count):
        hosts.append(host := zone.create_host(f"host-{i}", 1e9))
        link = zone.create_split_duplex_link(f"link-{i}", RATE).set_latency(0).seal()
        zone.add_route(host.netpoint, None, None, None, [LinkInRoute(link, LinkInRoute.Direction.UP)], True)
    zone.seal()
    return hosts


def _simgrid_waits(count: int) -> float:
    engine = _simgrid_engine()
    from simgrid import Actor, this_actor

    def wait() -> None:
        for _ in range(count):
            this_actor.sleep_for(1.0)

    for i, host in enumerate(_simgrid_hosts(TASKS)):
        Actor.create(f"waits-{i}", host, wait)
    return timed(engine.run, TASKS * count)


def _simgrid_messages(count: int) -> float:
    engine = _simgrid_engine()
    from simgrid import Actor, Mailbox

    def throw(rank: int) -> None:
        mine, other = Mailbox.by_name(f"box-{rank}"), Mailbox.by_name(f"box-{rank ^ 1}")
        for _ in range(count // 2):
            if rank % 2 == 0:
                other.put(1, SIZE)
            mine.get()
            if rank % 2:
                other.put(1, SIZE)

    for i, host in enumerate(_simgrid_hosts(2 * PAIRS)):
        Actor.create(f"throws-{i}", host, throw, i)
    return timed(engine.run, PAIRS * 2 * (count // 2))


def _simgrid_apart(count: int) -> float:
    """An engine is one for a process."""
    return float(_call("simgrid-messages", count)["waits"])


CONTESTANTS: dict[str, tuple[str, Callable[[int], tuple[float, float | None]]]] = {
    "heap": ("a bare heap of callbacks", heap),
    "ours": ("ours, greenlets", ours),
    "threads": ("ours, threads", threads),
    "simpy": ("SimPy", simpy),
    "simgrid": ("SimGrid, from Python", simgrid),
    "simgrid-messages": ("", lambda count: (_simgrid_messages(count), None)),
}


def _call(name: str, count: int) -> dict[str, Any]:
    """A contestant in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.kernels", "--one", name, str(count)]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return found


def measure(rounds: int) -> Outcome:
    """Everyone in turn, each time in a new process."""
    outcome = Outcome(
        "Kernels",
        f"Virtual time by itself. Waits: {TASKS} tasks that only let time pass. Messages: {PAIRS} pairs that throw "
        f"{SIZE} bytes to and fro over fairly shared links; SimPy has no network, its messages take a fixed time. "
        f"Thousands a second of real time, {rounds} rounds, each contestant in a new process.",
    )
    missing = [name for name, there in _there().items() if not there]
    names = [name for name in CONTESTANTS if name not in missing and name != "simgrid-messages"]
    waits, messages = Rounds(), Rounds()
    for _ in range(rounds):
        for name in names:
            found = _call(name, 2000)
            waits.add(name, found["waits"] / 1e3)
            if found["messages"] is not None:
                messages.add(name, found["messages"] / 1e3)
    rows = []
    for name in names:
        has = bool(messages[name].values)
        rows.append([
            CONTESTANTS[name][0], waits[name].show(), waits.ratio("ours", name).show(2),
            messages[name].show() if has else "", messages.ratio("ours", name).show(2) if has else "",
        ])  # fmt: skip
    outcome.table(
        ["kernel", "waits, thousands a second", "ours by it", "messages, thousands a second", "ours by it"], rows
    )
    for name in missing:
        outcome.say(f"{CONTESTANTS[name][0]} is not installed here, so it is left out.")
    return outcome


def _there() -> dict[str, bool]:
    return {
        "simpy": importlib.util.find_spec("simpy") is not None,
        "simgrid": bool(list(DEBIAN.glob(f"simgrid*{sys.implementation.cache_tag.removeprefix('cpython-')}*"))),
    }


if __name__ == "__main__":
    if "--one" in sys.argv:
        found = CONTESTANTS[sys.argv[2]][1](int(sys.argv[3]))
        print(json.dumps({"waits": found[0], "messages": found[1]}))
    else:
        main(measure, rounds=5)
