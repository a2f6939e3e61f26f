# SPDX-License-Identifier: Apache-2.0
"""Processes that hang are found and named, in every strategy; those that only wait or work are left alone."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.cases import few
from tests.processes import Outcome, Processes, together
from tests.zoo import Trap, ended, make_data, make_model, momentum, paced, train, trapped

import orchestra
from orchestra import Attached, Budget, Local, Seconds, Steps, Strategy
from orchestra.core.node import Node
from orchestra.errors import Stalled, WorkerLost
from orchestra.worlds.shared_memory import hangs
from orchestra.worlds.shared_memory.hangs import HangWatch, Limits, Seen
from orchestra.worlds.shared_memory.layout import NOT_WAITING, SLEEPING, WAITING

STRATEGIES = ["allreduce", "ps(consistency=asp)", "hogwild", "localsgd(tau=2)", "easgd(tau=2)", "slowmo(tau=2)"]


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def block() -> None:
    threading.Event().wait()


@pytest.mark.parametrize("strategy", few(STRATEGIES, ["allreduce", "hogwild"]))
def test_a_stopped_process_is_found(tmp_path: Path, strategy: str) -> None:
    trap = Trap.at(1, 2, stop, size=2)
    with pytest.raises(WorkerLost, match=r"worker 1 hangs: process \d+ has been stopped \(state T\)") as caught:
        train(strategy, tmp_path, cluster=Local(workers=2), model=trapped(trap), budget=Steps(8))
    assert caught.value.exit_code == 6


@pytest.mark.parametrize("strategy", few(STRATEGIES, ["allreduce", "ps(consistency=asp)"]))
def test_a_process_that_does_nothing_is_found(tmp_path: Path, strategy: str) -> None:
    trap = Trap.at(1, 2, block, size=2)
    with pytest.raises(WorkerLost, match=r"worker 1 hangs: process \d+ \(state S\) has made no step and used no proc"):
        train(strategy, tmp_path, cluster=Local(workers=2, patience=1.5), model=trapped(trap), budget=Steps(8))


def own_loop(action: Callable[[], None], strategy: str) -> None:
    torch.manual_seed(0)
    model = make_model()
    cluster = Attached(patience=3 if action is block else 300)
    model, optimizer = orchestra.prepare(model, momentum(model.parameters()), strategy=strategy, cluster=cluster)
    x, y = make_data()
    for step in range(8):
        if step == 2 and os.environ["RANK"] == "1":
            action()
        optimizer.zero_grad()
        torch.autograd.backward(F.mse_loss(model(x), y))
        optimizer.step()
    optimizer.finish()


LOCAL_STEPS = "localsgd(tau=1000)"  # a worker of it waits for no other for a long time


def in_train(trap: Trap, strategy: str, out: Path) -> None:
    cluster = Attached(patience=3 if trap.action is block else 300)
    model = trapped(trap, model=paced(0.2, 0.2)) if strategy == LOCAL_STEPS else trapped(trap)
    train(strategy, out, cluster=cluster, model=model, budget=Steps(10**6 if strategy == LOCAL_STEPS else 8))


CAUSES = {stop: r"has been stopped \(state T\)", block: r"\(state S\) has made no step and used no processor time"}


ATTACHED = [
    ("train", "allreduce", 2),
    ("train", "ps(consistency=asp)", 3),
    ("train", LOCAL_STEPS, 2),
    ("own loop", "allreduce", 2),
    ("own loop", "ps", 3),
    ("own loop", "ps(consistency=asp)", 3),
]


@pytest.mark.parametrize(
    ("kind", "strategy", "size", "action"),
    few(
        [(*case, action) for case in ATTACHED for action in (stop, block)],
        [(*ATTACHED[4], stop), (*ATTACHED[1], block), (*ATTACHED[3], block)],
    ),
)
def test_attached_processes_of_one_machine(
    tmp_path: Path, kind: str, strategy: str, size: int, action: Callable[[], None]
) -> None:
    trap = Trap.at(1, 2, action, size=2)
    call = partial(in_train, trap, strategy, tmp_path) if kind == "train" else partial(own_loop, action, strategy)
    with Processes([call] * size) as processes:
        others = [end for rank, end in enumerate(processes.ends) if rank != 1]
        told: list[Outcome] = []
        while len(told) < len(others) and (ready := wait([end for end in others if not end.closed], timeout=100)):
            for end in ready:
                told.append(pickle.loads(end.recv_bytes()))  # type: ignore[union-attr]
                end.close()  # type: ignore[union-attr]
    # The first to find it names it; another may only hear that the first has gone.
    assert any(re.search(rf"worker 1 hangs: process \d+ {CAUSES[action]}", outcome.error) for outcome in told), told
    assert {outcome.code for outcome in told} == {6}


def never_finishes() -> None:
    torch.manual_seed(0)
    model = make_model()
    model, optimizer = orchestra.prepare(model, momentum(model.parameters()), cluster=Attached(patience=3))
    x, y = make_data()
    for _ in range(3):
        optimizer.zero_grad()
        torch.autograd.backward(F.mse_loss(model(x), y))
        optimizer.step()
    if os.environ["RANK"] == "1":
        block()
    optimizer.finish()


def test_a_process_that_hangs_after_its_last_step_is_found() -> None:
    with Processes([never_finishes] * 2) as processes:
        (ready,) = wait([processes.ends[0]], timeout=90)
        told = pickle.loads(ready.recv_bytes())  # type: ignore[union-attr]
    assert re.search(r"worker 1 hangs: process \d+ .*used no processor time", told.error)


@pytest.mark.parametrize("way", ["budget", "SIGTERM"])
def test_hogwild_ends_though_a_worker_hangs(tmp_path: Path, way: str) -> None:
    caller = os.getpid()

    def hang() -> None:
        if way == "SIGTERM":
            os.kill(caller, signal.SIGTERM)
        block()

    budget: Budget = Steps(10**6) if way == "SIGTERM" else Seconds(1.0) | Steps(10**6)
    model = trapped(Trap.at(1, 2, hang, size=2))
    with pytest.raises(WorkerLost, match="worker 1 hangs"):
        train("hogwild", tmp_path, cluster=Local(workers=2, patience=3), model=model, budget=budget)


@pytest.mark.nightly
def test_hogwild_ends_though_a_worker_is_busy_with_one_step(tmp_path: Path) -> None:
    def spin() -> None:
        while True:
            pass

    model, budget = trapped(Trap.at(1, 2, spin, size=2)), Seconds(1.0) | Steps(10**6)
    with pytest.raises(WorkerLost, match=r"worker 1 hangs: .* made no step for \d+ s, though asked to stop"):
        train("hogwild", tmp_path, cluster=Local(workers=2, patience=3), model=model, budget=budget)


def by_itself() -> None:
    until = time.monotonic() + 5
    while time.monotonic() < until:
        pass


def through_another() -> None:
    """A step that waits for a process of its own, as for a DataLoader's workers."""
    code = "import time\nuntil = time.monotonic() + 5\nwhile time.monotonic() < until: pass"
    subprocess.run([sys.executable, "-c", code], check=True)


def everywhere(way: str, out: Path, *, strategy: str = "allreduce", **given: Any) -> None:
    """Train two workers whose patience is 2 s: of `Local`, or Attached with messages, torch or a server."""
    if way == "local":
        train(strategy, out, cluster=Local(workers=2, patience=2), **given)
        return
    cluster = Attached(patience=2, trusted=way == "torch")

    def call() -> None:
        train("ps" if way == "server" else strategy, out, cluster=cluster, **given)

    outcomes = together(3 if way == "server" else 2, call)
    assert not any(outcome.kind for outcome in outcomes), outcomes


WORK = [by_itself, through_another]


@pytest.mark.parametrize(
    ("way", "action"),
    few(
        [(way, action) for way in ("local", "messages", "torch", "server") for action in WORK],
        [("local", WORK[1]), ("torch", WORK[1])],
    ),
)
def test_a_process_that_works_is_left_alone(tmp_path: Path, way: str, action: Callable[[], None]) -> None:
    everywhere(way, tmp_path, model=trapped(Trap.at(1, 2, action, size=2)))
    assert [ended(tmp_path, node).step for node in range(2)] == [5, 5]


@pytest.mark.parametrize("way", ["messages", "torch"])
@pytest.mark.nightly
def test_local_steps_of_a_worker_that_waits_for_no_other_are_no_hang(tmp_path: Path, way: str) -> None:
    """Nor if they use no processor time."""
    everywhere(way, tmp_path, strategy=LOCAL_STEPS, model=paced(1.0, 1.0), budget=Steps(6))
    assert ended(tmp_path, 1).step == 6


def pausing_loop(resumed: Path) -> int:
    """A loop of one's own in which worker 1 pauses for longer than a hang may last, and worker 0 goes on meanwhile."""
    torch.manual_seed(0)
    model = make_model()
    strategy, cluster = "ps(consistency=asp)", Attached(patience=2)
    model, optimizer = orchestra.prepare(model, momentum(model.parameters()), strategy=strategy, cluster=cluster)
    (x, y), steps, until = make_data(), 0, time.monotonic() + 60
    first = os.environ["RANK"] == "0"
    while steps < 10 or (first and not resumed.exists() and time.monotonic() < until):
        if not first and steps == 5:
            time.sleep(8)
            resumed.touch()
        optimizer.zero_grad()
        torch.autograd.backward(F.mse_loss(model(x), y))
        optimizer.step()
        time.sleep(0.05)
        steps += 1
    optimizer.finish()
    return steps


@pytest.mark.nightly
def test_a_server_of_a_loop_that_waits_is_not_waited_for(tmp_path: Path) -> None:
    outcomes = together(3, partial(pausing_loop, tmp_path / "resumed"))
    assert not any(outcome.kind for outcome in outcomes[:2]), outcomes
    assert outcomes[0].value > 20
    assert outcomes[1].value == 10


@pytest.mark.nightly
def test_delays_that_were_asked_for_are_no_hang(tmp_path: Path) -> None:
    cluster = Local(workers=2, patience=1.5, compute_time="constant:0.02 slow:1x150")
    train("allreduce", tmp_path, cluster=cluster, budget=Steps(1))
    assert ended(tmp_path, 1).step == 1


@dataclass(frozen=True, kw_only=True)
class Mute(Strategy[None]):
    """Every worker waits for a message that no other sends."""

    def init(self, node: Node) -> None:
        pass

    def step(self, node: Node, s: None) -> None:
        if node.steps == 1:
            node.comm.recv(1 - node.rank)
        node.local_step()


def test_workers_that_wait_for_each_other_say_for_whom(tmp_path: Path) -> None:
    with pytest.raises(Stalled, match=r"worker \d waited \S+ s for a message from worker \d"):
        train(Mute(), tmp_path, cluster=Local(workers=2, patience=2))


# What counts, with a clock of our own.


@dataclass
class Scene:
    """One process as it is seen at every look."""

    watch: HangWatch
    now: float = 0.0
    cpu: float = 0.0
    state: str = "S"

    def pass_by(
        self, seconds: float, *, steps: int = 0, waits: int = NOT_WAITING, look: float = 1.0, cpu: float = 0.0
    ) -> bool:
        found = False
        for _ in range(round(seconds / look)):
            self.now += look
            self.cpu += cpu
            found |= self.watch.look({0: 17}, {0: Seen((steps,), waits)})
        return found


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    made = Scene(HangWatch(Limits.of(300.0), lambda node: f"worker {node}"))
    made.watch.clock = lambda: made.now
    monkeypatch.setattr(hangs, "_stat", lambda pid: (made.state, made.cpu))
    monkeypatch.setattr(hangs, "_offspring", lambda pid: 0.0)
    made.pass_by(1)
    return made


def test_the_limits_are_those_promised(scene: Scene) -> None:
    scene.pass_by(28)
    with pytest.raises(WorkerLost, match="no processor time for 3"):
        scene.pass_by(4)
    limits = Limits.of(300.0)
    assert (limits.silent, limits.steps) == (30, 10)
    assert limits.stopped + 2 * limits.look <= 5


def test_ten_times_the_longest_step(scene: Scene) -> None:
    scene.pass_by(8)
    scene.pass_by(1, steps=1)
    scene.pass_by(75, steps=1)
    with pytest.raises(WorkerLost, match=r"no processor time for [89]"):
        scene.pass_by(20, steps=1)


def test_a_stopped_one_within_five_seconds(scene: Scene) -> None:
    scene.state = "T"
    with pytest.raises(WorkerLost, match="state T"):
        scene.pass_by(5, look=0.5)


def test_time_in_which_the_watcher_was_stopped_does_not_count(scene: Scene) -> None:
    scene.state = "T"
    for _ in range(2):
        scene.now += 3600  # all were stopped, and all go on
        scene.pass_by(1)
        scene.state = "S"
    scene.now += 3600
    scene.pass_by(20)


@pytest.mark.parametrize("waits", [WAITING, SLEEPING])
def test_one_that_waits_or_sleeps_does_not_hang(scene: Scene, waits: int) -> None:
    assert scene.pass_by(200, waits=waits) == (waits == WAITING)  # all wait: that is another matter


def test_a_clock_that_a_thread_looks_at_is_no_work_but_computing_is(scene: Scene) -> None:
    scene.pass_by(100, cpu=0.1)
    with pytest.raises(WorkerLost):
        scene.pass_by(100, cpu=0.001)


def test_time_in_which_the_watcher_computed_counts(scene: Scene) -> None:
    """One that looks between two steps of its own looks seldom; one that was suspended used no processor time."""
    spent = 0.0
    scene.watch.computed = lambda: spent
    for _ in range(2):
        scene.now += 20
        scene.pass_by(1)
    spent = 40.0
    with pytest.raises(WorkerLost, match="no processor time for"):
        scene.pass_by(40, look=40)


@pytest.mark.parametrize("state", ["S", "T"])
def test_unless_a_waiter_waits_no_process_hangs(scene: Scene, state: str) -> None:
    scene.watch.waiters, scene.state = (1, 2), state

    def pass_by(seconds: int, steps: int, waits: int) -> None:
        for second in range(seconds):
            scene.now += 1
            waiter = Seen((second * steps,), waits)
            scene.watch.look(
                {0: 17, 1: 18}, {0: Seen((0,), NOT_WAITING), 1: waiter, 3: Seen((0,), WAITING)}, judged={0}
            )

    pass_by(100, 0, NOT_WAITING)  # only node 3 waits, a server
    pass_by(100, 1, WAITING)  # it gets what it waits for
    with pytest.raises(WorkerLost, match=r"worker [01] hangs"):
        pass_by(100, 0, WAITING)
