# SPDX-License-Identifier: Apache-2.0
"""What holds for every strategy."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.laws.examples import (
    CERTAIN,
    EXAMPLES,
    SYNCHRONOUS,
    WORKERS,
    alone,
    bytes_sent,
    each_of,
    ends_at,
    sieves,
    steps_of,
    workers_for,
)
from tests.zoo import (
    BATCH,
    Dicey,
    Jittery,
    Trap,
    assert_close,
    assert_same,
    die_after,
    ended,
    events,
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
    Downpour,
    ParameterServer,
    RunStatus,
    SlowMo,
    Steps,
    Strategy,
    StrategySwitch,
)
from orchestra.core.traffic import RunSize
from orchestra.engine import checkpoint
from orchestra.engine.expression import parse, show
from orchestra.errors import Interrupted, WorkerFailed, WorkerLost
from orchestra.model.flat_optimizer import Factory
from orchestra.runs.events import Logged
from orchestra.strategies import catalogue
from orchestra.strategies.catalogue import STRATEGIES
from orchestra.strategies.parameter_server import consistency, filters
from orchestra.strategies.parameter_server.consistency.base import OnRequest
from orchestra.strategies.switch import triggers

S = Strategy[Any]
LAYERS = [p.numel() for p in make_model().parameters()]
PARAMETERS = sum(LAYERS)
every = each_of(EXAMPLES)
certain = each_of(CERTAIN)  # to compute every mini-batch
stopped = each_of(CERTAIN, slow=True)
synchronous = each_of(SYNCHRONOUS)


def test_the_catalogue_is_covered() -> None:
    assert {type(s) for s in EXAMPLES} == set(STRATEGIES)


# Values.


@every
def test_frozen_hashable_and_read_back(strategy: S) -> None:
    known = vars(catalogue) | vars(consistency) | vars(filters) | vars(triggers)
    assert eval(repr(strategy), known) == strategy
    assert parse(show(strategy)) == strategy
    assert len({strategy, copy.deepcopy(strategy)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategy.anything = 1  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        type(strategy)(1)  # type: ignore[call-arg]


# Paths.


@every
@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-3),
        partial(torch.optim.Adam, lr=0.01),
    ],
    ids=["sgd", "adam"],
)
def test_a_world_of_one_is_plain_training(strategy: S, optimizer: Factory, tmp_path: Path) -> None:
    strategy = alone(strategy)
    steps = 20  # more than an epoch, so that the short last batch is among them
    result = train(strategy, tmp_path / "run", workers=1, optimizer=optimizer, budget=Steps(steps))
    expected = plain(optimizer=optimizer, steps=steps)
    # x₀ - (x₀ - x) is not x to the last bit.
    (assert_close if isinstance(strategy, SlowMo | EASGD) else assert_same)(result.model, expected)


@synchronous
def test_same_seed_same_model_whatever_the_timing(strategy: S, tmp_path: Path) -> None:
    workers = workers_for(strategy)
    first = train(strategy, tmp_path / "first", workers=workers, budget=Steps(8))
    again = train(strategy, tmp_path / "again", workers=workers, budget=Steps(8))
    late = train(strategy, tmp_path / "late", workers=workers, budget=Steps(8), model=Jittery)
    other = train(strategy, tmp_path / "other", workers=workers, budget=Steps(8), seed=4)
    assert_same(first.model, again.model)
    torch.testing.assert_close([*first.model.parameters()], [*late.model.parameters()], rtol=0, atol=0)
    assert not torch.equal(next(first.model.parameters()), next(other.model.parameters()))


@every
def test_all_replicas_are_equal_at_the_end(strategy: S, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = workers_for(strategy)
    kept = _keep_the_parts(monkeypatch)
    result = train(strategy, tmp_path / "run", workers=workers, budget=Steps(7))
    where = ends_at(strategy)
    if where == "apart":
        assert len(kept) == workers
        for x in kept:
            assert torch.equal(x, kept[0])
    elif where == "servers":
        size = RunSize(workers=1, steps=1, layers=tuple(LAYERS), item=1)
        assert [len(x) for x in kept] == size.ranges(strategy.layout)
    else:
        assert len(kept) == 1
    x = kept[0] if where != "servers" else torch.cat(kept)
    assert torch.equal(x, torch.cat([p.detach().reshape(-1) for p in result.model.parameters()]))


def _keep_the_parts(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What each node held at the end, as the coordinator reads it."""
    from orchestra.engine import snapshot

    kept: list[torch.Tensor] = []
    read = snapshot.parts

    def reading(*folders: Path) -> list[snapshot.SnapshotPart]:
        found = read(*folders)
        kept.extend(part.x for part in found if part.x is not None)
        return found

    monkeypatch.setattr(snapshot, "parts", reading)
    return kept


# Save, stop, go on.


@stopped
def test_stopped_by_a_death_and_resumed_is_never_stopped(strategy: S, tmp_path: Path) -> None:
    workers, out = workers_for(strategy), tmp_path / "run"
    given: dict[str, Any] = {"workers": workers, "budget": Steps(9), "checkpoint_every": Steps(3)}
    # At its own pace, only the one who asks for a checkpoint surely has not gone on before it is written.
    rank = workers - 1 if strategy.layout.updates.synchronous else 0
    death = Trap.at(rank, 4, partial(die_after, out / "checkpoints" / "step-00000003"), size=workers)
    if getattr(strategy, "promote", False):  # samples are shared anew by then
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


@pytest.mark.alone
@stopped
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


@pytest.mark.alone
@stopped
def test_ctrl_c_in_the_last_step_loses_nothing(strategy: S, tmp_path: Path) -> None:
    workers = workers_for(strategy)
    pressed = Trap.at(0, 3, partial(press_ctrl_c, os.getpid()), size=workers)
    try:
        result = train(strategy, tmp_path / "run", workers=workers, model=trapped(pressed), budget=Steps(4))
    except Interrupted:
        result = train(strategy, tmp_path / "run", workers=workers, model=trapped(), budget=Steps(4), resume=True)
    assert result.summary.steps == steps_of(strategy, workers, 4)


# Bytes.


@every
@pytest.mark.parametrize("wanted", [2, 3])
def test_bytes_on_the_wire_are_those_of_the_docstring(strategy: S, wanted: int, tmp_path: Path) -> None:
    workers, steps = workers_for(strategy, wanted), 5
    train(strategy, tmp_path, workers=workers, budget=Steps(steps))
    sent = [ended(tmp_path, node).sent for node in range(workers + strategy.layout.servers)]
    received = [ended(tmp_path, node).received for node in range(workers + strategy.layout.servers)]
    if isinstance(strategy, ParameterServer) and isinstance(strategy.consistency, OnRequest):
        check_what_was_needed(strategy, tmp_path, workers, steps)
        return
    if sieves(strategy):
        check_what_passed(tmp_path, workers, steps)
        return
    by_worker, by_server = bytes_sent(strategy, workers, steps, LAYERS)
    assert sent == by_worker + by_server
    assert sum(received) == sum(sent)
    if isinstance(strategy, Downpour):
        assert received[:workers] == [sum(by_server) // workers] * workers  # as often as it fetches
    elif getattr(strategy, "algorithm", "native") == "native" and not isinstance(strategy, StrategySwitch):
        assert received == sent  # pushes and pulls, reduce-scatter and all-gather: symmetric
    assert "Bytes" in (strategies_doc(strategy) or "")


def check_what_was_needed(strategy: ParameterServer, run: Path, workers: int, steps: int) -> None:
    """S is sent unless the gradient was cancelled; S is received unless x is still the same."""
    for worker in range(workers):
        logged = [e for e in events(run, worker) if isinstance(e, Logged)]
        cancelled = sum(e.name == "abandoned" for e in logged)
        unchanged = int(sum(e.value for e in logged if e.name == "unchanged"))
        assert ended(run, worker).sent == 4 * PARAMETERS * (steps - cancelled)
        assert ended(run, worker).received == 4 * (PARAMETERS * steps - unchanged)
    nodes = range(workers + strategy.servers)
    assert sum(ended(run, n).sent for n in nodes) == sum(ended(run, n).received for n in nodes)


def check_what_passed(run: Path, workers: int, steps: int) -> None:
    """16 bytes, and all values or those that passed with their keys; of one server, which may answer without filter."""
    for node in range(workers + 1):
        passed = [int(e.value) for e in events(run, node) if isinstance(e, Logged) and e.name == "passed"]
        plain = steps * (1 if node < workers else workers) - len(passed)
        assert plain == 0 or node == workers
        bytes_passed = sum(16 + min(4 * PARAMETERS, 8 * k) for k in passed)
        assert ended(run, node).sent == bytes_passed + plain * 4 * PARAMETERS


def strategies_doc(strategy: S) -> str | None:
    import sys

    return sys.modules[type(strategy).__module__].__doc__


# Deaths.


def processes() -> list[psutil.Process]:
    """Processes below this one, the fork server apart."""
    return [grandchild for child in psutil.Process().children() for grandchild in child.children(recursive=True)]


@pytest.mark.alone
@stopped
def test_a_killed_worker_ends_the_run_within_two_seconds(strategy: S, tmp_path: Path) -> None:
    # After a promotion the deadly sample would be another's.
    workers, step = workers_for(strategy), 0 if strategy.layout.promotes else EXAMPLES.index(strategy) % 4
    shared = set(os.listdir("/dev/shm"))
    victim = step % workers
    death = Trap.at(victim, step, partial(note_and_die, tmp_path / "death"), size=workers)
    with pytest.raises(WorkerLost, match=f"worker {victim} died: killed by SIGKILL") as caught:
        train(strategy, tmp_path / "run", workers=workers, model=trapped(death))
    assert time.time() - float((tmp_path / "death").read_text()) < 2
    assert caught.value.exit_code == 6
    assert processes() == []
    assert {n for n in set(os.listdir("/dev/shm")) - shared if "orchestra" in n or "psm" in n} == set()


@pytest.mark.alone
@stopped
def test_a_worker_that_raises_ends_the_run_with_its_traceback_first(strategy: S, tmp_path: Path) -> None:
    workers = workers_for(strategy)
    victim = workers - 1
    trap = Trap.at(victim, 1, partial(tell, "é" * 3), size=workers)
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match=f"worker {victim} failed") as caught:
        train(strategy, tmp_path / "run", workers=workers, model=trapped(trap))
    assert time.monotonic() - began < 5
    said = str(caught.value)
    assert said.startswith("Traceback (most recent call last):")
    assert said.count("Traceback") == 1
    assert "RuntimeError: sprung: ééé" in said
    assert caught.value.exit_code != 0
    assert processes() == []


@pytest.mark.alone
@each_of([s for s in EXAMPLES if s.layout.servers], slow=True)
def test_a_killed_server_ends_the_run(strategy: S, tmp_path: Path) -> None:
    workers = workers_for(strategy)
    when: list[float] = []

    def kill(watch: RunStatus) -> None:
        if not when and watch.nodes[0].step >= 1:
            victims = processes()  # in the order of their ranks
            when.append(time.monotonic())
            victims[workers].kill()

    with pytest.raises(WorkerLost, match="server 0 died: killed by SIGKILL"):
        train(strategy, tmp_path / "run", workers=workers, model=Jittery, budget=Steps(100_000), progress=kill)
    assert time.monotonic() - when[0] < 2
    assert processes() == []


def test_long_words_outside_ascii_still_arrive(tmp_path: Path) -> None:
    trap = Trap.at(0, 1, partial(tell, "ä" * 200_000), size=2)
    with pytest.raises(WorkerFailed, match="worker 0 failed"):
        train(AllReduce(), tmp_path / "run", workers=2, model=trapped(trap))


def test_a_worker_that_exits_without_a_word_is_lost(tmp_path: Path) -> None:
    trap = Trap.at(1, 1, partial(os._exit, 0), size=2)
    with pytest.raises(WorkerLost, match="worker 1 died: it exited with code 0 without a word"):
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
    assert WORKERS > 2
    assert orchestra.__version__
