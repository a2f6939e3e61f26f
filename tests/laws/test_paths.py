# SPDX-License-Identifier: Apache-2.0
"""What holds on every path through processes: for one example of each, and for all of them in `make nightly`."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
import pytest
import torch
from tests.laws.examples import (
    CERTAIN,
    COUNTED,
    EXAMPLES,
    SYNCHRONOUS,
    alone,
    cancels,
    first_phase,
    in_processes,
    path,
    state,
    steps_of,
    workers_for,
)
from tests.laws.runs import Seen, check_what_is_held, real, simulated
from tests.zoo import (
    BATCH,
    Dicey,
    Jittery,
    Trap,
    assert_close,
    assert_same,
    die_after,
    make_data,
    make_model,
    note_and_die,
    plain,
    press_ctrl_c,
    sgd,
    tell,
    train,
    trapped,
)

import orchestra
from orchestra import (
    ASP,
    EASGD,
    AllReduce,
    Local,
    ParameterServer,
    RunStatus,
    Simulated,
    SlowMo,
    Steps,
    Strategy,
)
from orchestra.engine import checkpoint
from orchestra.errors import Interrupted, WorkerFailed, WorkerLost

S = Strategy[Any]
PARAMETERS = sum(p.numel() for p in make_model().parameters())


# A simulated run is the run.


@in_processes(SYNCHRONOUS)
def test_simulated_and_real_runs_give_the_same_model(strategy: S) -> None:
    """With BatchNorm, dropout and every other generator: each virtual node has its own random numbers."""
    assert_same(real(strategy, model=Dicey).model, simulated(strategy, model=Dicey).model)


@in_processes(COUNTED)
def test_bytes_are_the_same(strategy: S) -> None:
    runs = real(strategy, model=Dicey), simulated(strategy, model=Dicey)
    for node in range(len(runs[0].events)):
        here, there = (run.ended(node) for run in runs)
        # How many steps are passed over at the end, when some have finished, is a matter of timing: each spares S.
        less, fewer = (spared(run, node) for run in runs)
        assert (here.sent + less, here.received + less) == (there.sent + fewer, there.received + fewer)
        worker = node < runs[0].workers
        if strategy.layout.updates.synchronous or (worker and less == fewer):
            assert (here.step, here.samples) == (there.step, there.samples)
        elif worker:  # a server makes as many updates of them as timing has it
            assert here.step == there.step


@in_processes(EXAMPLES)
def test_all_replicas_are_equal_at_the_end(strategy: S) -> None:
    check_what_is_held(strategy, real(strategy, model=Dicey))


def spared(run: Seen, node: int) -> int:
    """Bytes that a node neither sent nor received, since workers passed over steps whose gradients had no use."""
    passed = [len(run.logged(worker, "dropped")) for worker in range(run.workers)]
    return 4 * int(run.facts["parameters"]) * (passed[node] if node < run.workers else sum(passed))


@in_processes(SYNCHRONOUS)
def test_same_seed_same_model_whatever_the_timing(strategy: S) -> None:
    assert_same(simulated(strategy).model, real(strategy, model=Jittery).model.inner)  # type: ignore[arg-type]


@in_processes(EXAMPLES)
def test_a_world_of_one_is_plain_training(strategy: S, tmp_path: Path) -> None:
    steps = 20  # more than an epoch, so that the short last batch is among them
    found = train(alone(strategy), tmp_path / "run", workers=1, budget=Steps(steps))
    # x₀ - (x₀ - x) is not x to the last bit.
    (assert_close if isinstance(strategy, SlowMo | EASGD) else assert_same)(found.model, plain(steps=steps))


# Asynchronous ones: which push comes first is chance.


gentle = partial(torch.optim.SGD, lr=0.02)


@pytest.mark.timed
@in_processes([s for s in EXAMPLES if not s.layout.updates.synchronous], of=lambda s: s.layout.model_location)
def test_asynchronous_runs_end_in_the_same_band(strategy: S, tmp_path: Path) -> None:
    """Which push comes first is chance in a real run; where it leads, in the mean over some seeds, is not."""
    delay, network = "exponential:0.02,0.01", "100gbit,50us"
    seeds = range(5 if cancels(strategy) else 3)
    processes, virtual = (
        [
            train(strategy, tmp_path / f"{name}-{seed}", cluster=cluster, seed=seed, optimizer=gentle, budget=Steps(40))
            for seed in seeds
        ]
        for name, cluster in (
            ("real", Local(workers=workers_for(strategy), compute_time=delay)),
            ("virtual", Simulated(workers=workers_for(strategy), compute_time=delay, network=network)),
        )
    )
    losses = [mean(loss_of(run.model) for run in runs) for runs in (processes, virtual)]
    if cancels(strategy):  # chance then also decides which samples count: no two runs of a seed are alike
        assert losses[1] == pytest.approx(losses[0], rel=0.3)
        return
    # The seeds differ by a third; the two worlds, seed by seed, by a fiftieth.
    assert losses[1] == pytest.approx(losses[0], rel=0.15)
    staleness = [mean(run.summary.staleness_mean or 0.0 for run in runs) for runs in (processes, virtual)]
    assert staleness[1] == pytest.approx(staleness[0], abs=0.5)


def loss_of(model: torch.nn.Module) -> float:
    x, y = make_data()
    with torch.no_grad():
        return float(torch.nn.functional.mse_loss(model(x), y))


# Save, stop, go on.


@in_processes(CERTAIN, of=state)
def test_stopped_by_a_death_and_resumed_is_never_stopped(strategy: S, tmp_path: Path) -> None:
    workers, out = workers_for(strategy), tmp_path / "run"
    given: dict[str, Any] = {"workers": workers, "budget": Steps(9), "checkpoint_every": Steps(3)}
    # At its own pace, only the one who asks for a checkpoint surely has not gone on before it is written.
    rank = workers - 1 if strategy.layout.updates.synchronous else 0
    death = Trap.at(rank, 4, partial(die_after, out / "checkpoints" / "step-00000003"), size=workers)
    if getattr(strategy, "promote", False):  # by then the samples have been shared out again
        death = dataclasses.replace(death, first=None)
    with pytest.raises(WorkerLost):
        train(strategy, out, model=trapped(death, model=Dicey), **given)
    assert checkpoint.newest(out / "checkpoints")[0].step == 3
    resumed = train(strategy, out, model=trapped(model=Dicey), resume=True, **given)
    assert resumed.summary.steps == steps_of(strategy, workers, 9)
    if strategy.layout.updates.synchronous:
        never = train(strategy, tmp_path / "never", model=trapped(model=Dicey), **given)
        assert_same(resumed.model, never.model)
        assert resumed.summary.sent_per_worker == never.summary.sent_per_worker
        assert resumed.summary.samples == never.summary.samples


@pytest.mark.timed
@in_processes(CERTAIN, of=path)
def test_stopped_by_ctrl_c_and_resumed_is_never_stopped(strategy: S, tmp_path: Path) -> None:
    workers, out = workers_for(strategy), tmp_path / "run"
    # For every other one a checkpoint is due at the very step at which the run is stopped.
    rhythm = Steps(1) if EXAMPLES.index(strategy) % 2 else None
    given: dict[str, Any] = {"workers": workers, "budget": Steps(8)}
    # The others take a long step as well: some strategies would let them run ahead to the end.
    waiting = [Trap.at(rank, 3, partial(time.sleep, 0.3), size=workers) for rank in range(1, workers)]
    pressed = Trap.at(0, 3, partial(press_ctrl_c, os.getpid()), size=workers)
    with pytest.raises(Interrupted, match="A checkpoint of step") as caught:
        train(strategy, out, model=trapped(pressed, *waiting, model=Dicey), checkpoint_every=rhythm, **given)
    assert caught.value.exit_code == 130
    saved, complaints = checkpoint.newest(out / "checkpoints")
    assert saved.step >= 4
    assert not complaints
    assert len(saved.manifest["files"]) == workers + strategy.layout.servers
    resumed = train(strategy, out, model=trapped(model=Dicey), resume=True, **given)
    assert resumed.summary.steps == steps_of(strategy, workers, 8)
    if strategy.layout.updates.synchronous:
        assert_same(resumed.model, train(strategy, tmp_path / "never", model=trapped(model=Dicey), **given).model)


@pytest.mark.timed
@in_processes(CERTAIN, of=first_phase)
def test_ctrl_c_in_the_last_step_loses_nothing(strategy: S, tmp_path: Path) -> None:
    workers = workers_for(strategy)
    pressed = Trap.at(0, 3, partial(press_ctrl_c, os.getpid()), size=workers)
    try:
        result = train(strategy, tmp_path / "run", workers=workers, model=trapped(pressed), budget=Steps(4))
    except Interrupted:
        result = train(strategy, tmp_path / "run", workers=workers, model=trapped(), budget=Steps(4), resume=True)
    assert result.summary.steps == steps_of(strategy, workers, 4)


# Deaths.


def processes() -> list[psutil.Process]:
    """Processes below this one, the fork server apart."""
    return [grandchild for child in psutil.Process().children() for grandchild in child.children(recursive=True)]


@pytest.mark.timed
@in_processes(CERTAIN, of=path)
def test_a_killed_worker_ends_the_run_soon(strategy: S, tmp_path: Path, promised: Callable[[float], float]) -> None:
    # After a promotion the deadly sample would be another's.
    workers, step = workers_for(strategy), 0 if strategy.layout.promotes else EXAMPLES.index(strategy) % 4
    victim = step % workers
    death = Trap.at(victim, step, partial(note_and_die, tmp_path / "death"), size=workers)
    with pytest.raises(WorkerLost, match=f"worker {victim} died: killed by SIGKILL") as caught:
        train(strategy, tmp_path / "run", workers=workers, model=trapped(death))
    assert time.time() - float((tmp_path / "death").read_text()) < promised(2)
    assert caught.value.exit_code == 6
    assert processes() == []


@pytest.mark.timed
@in_processes(CERTAIN, of=first_phase)
def test_a_worker_that_raises_ends_the_run_with_its_traceback_first(
    strategy: S, tmp_path: Path, promised: Callable[[float], float]
) -> None:
    workers = workers_for(strategy)
    victim = workers - 1
    trap = Trap.at(victim, 1, partial(tell, "é" * 3), size=workers)
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match=f"worker {victim} failed") as caught:
        train(strategy, tmp_path / "run", workers=workers, model=trapped(trap))
    assert time.monotonic() - began < promised(5)
    said = str(caught.value)
    assert said.startswith("Traceback (most recent call last):")
    assert said.count("Traceback") == 1
    assert "RuntimeError: sprung: ééé" in said
    assert caught.value.exit_code != 0
    assert processes() == []


@pytest.mark.timed
@in_processes([s for s in EXAMPLES if s.layout.servers], of=first_phase)
def test_a_killed_server_ends_the_run(strategy: S, tmp_path: Path, promised: Callable[[float], float]) -> None:
    workers = workers_for(strategy)
    when: list[float] = []

    def kill(watch: RunStatus) -> None:
        if not when and watch.nodes[0].step >= 1:
            victims = processes()  # in the order of their ranks
            when.append(time.monotonic())
            victims[workers].kill()

    with pytest.raises(WorkerLost, match="server 0 died: killed by SIGKILL"):
        train(strategy, tmp_path / "run", workers=workers, model=Jittery, budget=Steps(100_000), progress=kill)
    assert time.monotonic() - when[0] < promised(2)
    assert processes() == []


def test_long_words_outside_ascii_still_arrive(tmp_path: Path) -> None:
    trap = Trap.at(0, 1, partial(tell, "ä" * 200_000), size=2)
    with pytest.raises(WorkerFailed, match="worker 0 failed"):
        train(AllReduce(), tmp_path / "run", workers=2, model=trapped(trap))


def test_a_worker_that_exits_without_a_word_is_lost(tmp_path: Path) -> None:
    trap = Trap.at(1, 1, partial(os._exit, 0), size=2)
    with pytest.raises(WorkerLost, match="worker 1 died: it exited with code 0 without an error message"):
        train(AllReduce(), tmp_path / "run", workers=2, model=trapped(trap))


def test_many_runs_leave_no_descriptors_and_no_memory(tmp_path: Path) -> None:
    def state() -> tuple[int, int]:
        maps = sum("memfd:orchestra" in line for line in Path("/proc/self/maps").read_text().splitlines())
        return len(os.listdir("/proc/self/fd")), maps

    train(AllReduce(), tmp_path / "warm", workers=2)
    gc.collect()
    before = state()
    for i in range(4):
        train(ParameterServer(consistency=ASP()), tmp_path / f"{i}", workers=2, budget=Steps(2))
        death = Trap.at(1, 1, partial(note_and_die, tmp_path / "death"), size=2)
        with pytest.raises(WorkerLost):
            train(AllReduce(), tmp_path / f"dead-{i}", workers=2, model=trapped(death))
    gc.collect()
    assert state() == before


def test_the_facts_of_a_run_are_written(tmp_path: Path) -> None:
    result = train(AllReduce(), tmp_path / "run", workers=2, optimizer=sgd, budget=Steps(4))
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["strategy"] == "allreduce"
    assert config["parameters"] == PARAMETERS
    assert result.summary.samples == 4 * 2 * BATCH
    assert result.summary.steps == 4
    assert result.summary.stopped_by == "budget"
    assert result.run == tmp_path / "run"
    assert orchestra.__version__
