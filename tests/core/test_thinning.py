# SPDX-License-Identifier: Apache-2.0
"""Events of a long run: their files stay small, and every figure that is made of them stays right."""

from __future__ import annotations

import json
import math
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from tests.attached.test_control_messages import receiver_for
from tests.attached.test_runs import far_off
from tests.cases import few
from tests.core.test_scoring import slowly
from tests.prepare.loops import loop
from tests.processes import together
from tests.report.folders import make_run
from tests.zoo import make_model, train
from torch import Tensor, nn

from orchestra import ASP, AllReduce, ParameterServer, Simulated, Steps, Strategy
from orchestra.clusters.simulated import recorded
from orchestra.errors import WorkerLost
from orchestra.live.follower import Follower
from orchestra.report import model
from orchestra.runs import dropped_events, event_thinning, reading, score_file
from orchestra.runs import events as event_files
from orchestra.runs.events import (
    Event,
    EventLog,
    Logged,
    NodeEnded,
    NodeStarted,
    Sampled,
    Saved,
    Skipped,
    Stepped,
    Thinned,
    read,
)
from orchestra.runs.facts import events_of, facts_of
from orchestra.worlds.sockets.file_transfer import FileSender

LIMIT = 200_000  # bytes
SPREAD = random.Random(1)


def stepped(k: int, t: float, node: int = 0) -> Stepped:
    return Stepped(t, node, k, k / 100, 8 * k, 1.0 / k, 0.1, t / 2, t / 3, t / 6, 400 * k, 400 * k)


def a_long_run(steps: int, node: int = 0) -> list[Event]:
    """Steps of very different lengths, with a figure logged in each and something that happens once in a while."""
    found: list[Event] = [NodeStarted(0.0, node, "worker", 0.0)]
    t = 0.0
    for k in range(1, steps + 1):
        t += SPREAD.lognormvariate(-3, 0.7)
        found += [stepped(k, t, node), Logged(t, node, k, "staleness", float(k % 7))]
        if k % 1000 == 0:
            found += [Logged(t, node, k, "abandoned", 1.0), Skipped(t, node, k, 1)]
    return [*found, NodeEnded(t, node, steps, 8 * steps, t / 2, t / 3, t / 6, 400 * steps, 400 * steps)]


def write(path: Path, events: list[Event], limit: int | None = LIMIT) -> list[int]:
    """Log events a few hundred at a time, as a run does; gives the size of the file after each."""
    sizes = []
    with EventLog(path, limit=limit) as log:
        for i, event in enumerate(events):
            log.write(event)
            if i % 300 == 0:
                log.flush()
                sizes.append(path.stat().st_size)
    return sizes


def folders(tmp_path: Path, steps: int) -> tuple[Path, Path]:
    """The same run in full and thinned out."""
    full, thin = make_run(tmp_path / "full"), make_run(tmp_path / "thin")
    for node in (0, 1):
        events = a_long_run(steps, node)
        for run, limit in ((full, None), (thin, LIMIT)):
            (run / f"events-{node}.jsonl").unlink()
            write(run / f"events-{node}.jsonl", events, limit)
    return full, thin


def test_a_file_stays_below_its_limit_however_long_the_run_is(tmp_path: Path) -> None:
    events = a_long_run(30_000)
    sizes = write(tmp_path / "events-0.jsonl", events)
    assert max(sizes) < 1.5 * LIMIT  # what is flushed at once comes on top
    assert sum(a > b for a, b in pairwise(sizes)) > 5  # it was thinned out again and again
    assert not (tmp_path / "events-0.jsonl.tmp").exists()


@pytest.mark.parametrize("nodes", [1, 8, 100, 1000, 100_000])
def test_a_week_stays_below_a_gigabyte(nodes: int) -> None:
    """Whatever the number of steps, also while each file is rewritten. 100,000 nodes are the most."""
    assert nodes * event_thinning.limit(nodes) * 1.5 + score_file.LIMIT * 1.5 < 1e9


def test_a_node_of_very_many_keeps_its_limit(tmp_path: Path) -> None:
    limit = event_thinning.limit(20_000)
    write(tmp_path / "events-0.jsonl", a_long_run(8_000), limit)
    assert (tmp_path / "events-0.jsonl").stat().st_size < limit
    kept = [*read(tmp_path / "events-0.jsonl")]
    assert kept[0] == NodeStarted(0.0, 0, "worker", 0.0)
    assert isinstance(kept[-2], NodeEnded)
    steps = [e.step for e in kept if isinstance(e, Stepped)]
    assert (steps[0], steps[-1]) == (1, 8000)
    assert len(steps) + dropped_events.of(kept).kinds["stepped"] == 8000


def test_both_ends_stay_in_full_and_samples_lie_evenly_between(tmp_path: Path) -> None:
    events = a_long_run(30_000)
    write(tmp_path / "events-0.jsonl", events)
    kept = [e for e in read(tmp_path / "events-0.jsonl") if isinstance(e, Stepped)]
    steps = [e.step for e in kept]
    assert steps[:50] == [*range(1, 51)]
    assert steps[-50:] == [*range(29_951, 30_001)]
    assert sorted(steps) == steps
    assert len({*steps}) == len(steps)
    assert Counter(s // 3000 for s in steps).keys() >= {*range(10)}  # no tenth of the run is without samples
    original = {e.step: e for e in events if isinstance(e, Stepped)}
    assert all((e.t, e.loss, e.sent) == (o.t, o.loss, o.sent) for e in kept if (o := original[e.step]))


def test_no_figure_of_the_report_changes_but_for_rounding(tmp_path: Path) -> None:
    full, thin = folders(tmp_path, 12_000)
    assert any(isinstance(e, Sampled) for e in events_of(thin))
    a, b = facts_of(full), facts_of(thin)
    assert (b.staleness_counts, b.staleness_mean, b.staleness_max) == (
        a.staleness_counts, a.staleness_mean, a.staleness_max,
    )  # fmt: skip
    assert b.skipped == a.skipped == 24
    assert (b.samples, b.seconds, b.sent_total, b.steps, b.shares) == (
        a.samples, a.seconds, a.sent_total, a.steps, a.shares,
    )  # fmt: skip
    assert b.loss == pytest.approx(a.loss, rel=0.02)
    one, other = (model.describe_run(reading.load(run), None, 100) for run in (full, thin))
    assert other["counts"] == one["counts"]
    for exact, about in zip(one["step_times"], other["step_times"], strict=True):
        assert about["count"] == exact["count"] == 12_000
        assert np.allclose(about["seconds"], exact["seconds"], rtol=0.05)
    assert dropped_events.of(events_of(thin)).count("abandoned") + sum(
        isinstance(e, Logged) and e.name == "abandoned" for e in events_of(thin)
    ) == 24  # fmt: skip


def test_short_runs_are_kept_word_for_word(tmp_path: Path) -> None:
    events = a_long_run(500)
    write(tmp_path / "limited", events, event_thinning.limit(2))
    write(tmp_path / "unlimited", events, None)
    assert (tmp_path / "limited").read_bytes() == (tmp_path / "unlimited").read_bytes()


def test_figures_without_number_do_not_fill_the_file(tmp_path: Path) -> None:
    """A strategy that logs under another name in each step."""
    events: list[Event] = [Logged(k * 0.1, 0, k, f"figure {k}", 1.0) for k in range(20_000)]
    assert max(write(tmp_path / "events-0.jsonl", events)) < 1.5 * LIMIT
    lost = dropped_events.of(read(tmp_path / "events-0.jsonl"))
    assert len(lost.said) <= 201
    assert sum(f.count for f in lost.said.values()) + sum(
        isinstance(e, Logged) for e in read(tmp_path / "events-0.jsonl")
    ) == 20_000  # fmt: skip


def test_a_moment_of_virtual_time_may_hold_any_number_of_events(tmp_path: Path) -> None:
    events: list[Event] = [Logged(1.0, 0, 1, "staleness", float(k % 3)) for k in range(20_000)]
    assert max(write(tmp_path / "events-0.jsonl", events)) < 1.5 * LIMIT


def test_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events-0.jsonl"
    write(path, a_long_run(6_000))
    broken = '{"event":"thinned","t":1,"node":0,"dropped":7,"said":[],"times":{"x":{}}}\n{"t":"x"}\nnull\n{"event":"ste'
    path.write_bytes(broken.encode() + b"\n\xff\xfe\n" + path.read_bytes())
    before = Counter(type(e) for e in read(path))
    event_thinning.rewrite(path, 50_000).close()
    assert path.stat().st_size < 50_000
    found = [e for e in read(path) if reading.sound(e)]
    assert {type(e) for e in found} >= {NodeStarted, Stepped, Sampled, Logged, Thinned, NodeEnded}
    lost = dropped_events.of(found)
    # One of the lines `thinned` that were there was the broken one.
    assert lost.kinds["stepped"] + sum(isinstance(e, Stepped) for e in found) == 6_000
    assert before[Stepped] > 0


@pytest.mark.parametrize(
    "line",
    [
        {"dropped": {"skipped": 10**30}, "said": {}, "times": {}},
        {"dropped": {"skipped": -1}, "said": {}, "times": {}},
        {"dropped": {}, "said": {"staleness": {"count": 1, "sum": 1e999, "values": {}}}, "times": {}},
        {"dropped": {}, "said": {"staleness": {"count": 1, "sum": 1, "values": {"x": 1}}}, "times": {}},
        {"dropped": {}, "said": {"staleness": 3}, "times": {}},
        {"dropped": {}, "said": {}, "times": {"1000000": 1}},
        {"dropped": [], "said": {}, "times": {}},
    ],
)
def test_what_makes_no_sense_is_not_believed(line: dict[str, Any], tmp_path: Path) -> None:
    run = make_run(tmp_path)
    exact = model.describe_run(reading.load(run), None, 100)
    with (run / "events-0.jsonl").open("a") as file:
        file.write(json.dumps({"event": "thinned", "t": 0.1, "node": 0, **line}) + "\n")
    assert model.describe_run(reading.load(run), None, 100) == exact


def test_without_room_for_a_second_file_the_first_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "events-0.jsonl"
    events = a_long_run(2_000)
    with mock.patch.object(event_thinning, "rewrite", side_effect=OSError(28, "No space left on device")):
        write(path, events, 50_000)
    assert [*read(path)] == events


def test_a_follower_sees_a_file_that_is_replaced_under_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", workers=1, over=False)
    path = run / "events-0.jsonl"
    path.unlink()
    events = a_long_run(12_000)
    following = Follower(run, keep=True)
    with EventLog(path, limit=LIMIT) as log:
        for i, event in enumerate(events):
            log.write(event)
            if i % 900 == 0:
                log.flush()
                following.look()
    following.look()
    assert following.events == [*read(path)]
    assert following.nodes[0].step == 12_000
    assert [e.step for e in following.nodes[0].steps] == [*range(12_000 - 119, 12_001)]


def test_two_rewritings_between_two_looks_are_seen(tmp_path: Path) -> None:
    """The file may then have the number of the one that was read before."""
    run = make_run(tmp_path / "run", workers=1, over=False)
    path = run / "events-0.jsonl"
    before, after = a_long_run(3_000)[:-1], a_long_run(9_000)
    path.unlink()
    write(path, before, None)
    following = Follower(run, keep=True)
    following.look()
    with path.open("r+b") as file:  # the same file, with other contents
        file.truncate()
    write(path, after, LIMIT * 100)
    following.look()
    assert following.events == [*read(path)]


def test_files_of_far_off_nodes_are_replaced_as_well(tmp_path: Path) -> None:
    first, away = tmp_path / "home", tmp_path / "away"
    for folder in (first, away):
        folder.mkdir()
    earlier: list[Event] = [Saved(0.0, 2, 1)]  # of before the run was resumed
    write(first / "events-2.jsonl", earlier)
    files = receiver_for(first)
    files.largest = 1 << 24

    class Wire:
        def send_control(self, to: int, said: dict[str, Any]) -> None:
            files.expect(2, said)

        def send_file(self, to: int, data: bytes) -> None:
            files.take_in(2, data)

    sender = FileSender(Wire(), away, 0)  # type: ignore[arg-type]
    path = away / "events-2.jsonl"
    with EventLog(path, limit=LIMIT) as log:
        for i, event in enumerate(a_long_run(8_000, 2)):
            log.write(event)
            if i % 700 == 0:
                log.flush()
                sender.send_new()
    sender.send_new()
    assert any(isinstance(e, Thinned) for e in read(path))
    assert [*read(first / "events-2.jsonl")] == [*earlier, *read(path)]


# Whole runs.


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_thinning, "_ONE", 12_000)


def count(events: list[Event], name: str) -> int:
    return dropped_events.of(events).count(name) + sum(isinstance(e, Logged) and e.name == name for e in events)


@pytest.mark.parametrize("strategy", [AllReduce(), ParameterServer(consistency=ASP())], ids=str)
def test_simulated_runs_are_thinned_out(strategy: Strategy[Any], tmp_path: Path, small: None) -> None:
    result = train(strategy, tmp_path, cluster=Simulated(workers=2), budget=Steps(400), optimizer=slowly)
    assert result.summary.steps == 400
    for path in tmp_path.glob("events-*.jsonl"):
        assert path.stat().st_size < 20_000
    events = events_of(tmp_path)
    assert any(isinstance(e, Thinned) for e in events)
    assert sum(isinstance(e, Stepped) for e in events) + dropped_events.of(events).kinds["stepped"] == 800
    if strategy.layout.servers:
        assert sum(result.summary.staleness_counts.values()) == count(events, "staleness") == 800
    assert all(len(seconds) > 10 for seconds in recorded(tmp_path).times)


def test_a_trace_keeps_everything(tmp_path: Path, small: None) -> None:
    train(AllReduce(), tmp_path, cluster=Simulated(workers=2), budget=Steps(400), trace=True)
    assert sum(type(e) is Stepped for e in events_of(tmp_path)) == 800


class Limited:
    """Makes a model; in each process of the run it makes the limits small as well, before anything is written."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self.make = make

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        event_thinning._ONE = 12_000
        event_files._FLUSH = 0.0  # by size alone, however fast the machine is

    def __call__(self) -> nn.Module:
        return self.make()


class Mortal(nn.Module):
    """A model that kills its process after so many forward passes."""

    def __init__(self, passes: float = math.inf) -> None:
        super().__init__()
        self.inner, self.left = make_model(), passes

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        y: Tensor = self.inner(x)
        return y


@pytest.mark.parametrize(
    "strategy",
    few(
        [AllReduce(), ParameterServer(), ParameterServer(consistency=ASP())],
        [AllReduce(), ParameterServer(consistency=ASP())],
    ),
    ids=str,
)
def test_a_resumed_run_counts_everything_once(strategy: Strategy[Any], tmp_path: Path) -> None:
    """It is thinned out before the checkpoint, between that and the death of a worker, and afterwards."""
    given: dict[str, Any] = {"workers": 2, "budget": Steps(600), "checkpoint_every": Steps(200), "optimizer": slowly}
    with pytest.raises(WorkerLost):
        train(strategy, tmp_path, model=Limited(partial(Mortal, 380)), **given)
    cut = [e for e in events_of(tmp_path) if isinstance(e, Thinned)]
    times = [{e.t for e in cut if e.node == node} for node in (0, 1)]
    assert max(map(len, times)) > 1  # of the one that died: before the checkpoint and after it
    result = train(strategy, tmp_path, model=Limited(Mortal), resume=True, **given)
    assert result.summary.steps == 600
    events = events_of(tmp_path)
    assert max(path.stat().st_size for path in tmp_path.glob("events-*.jsonl")) < 20_000
    assert sum(isinstance(e, Stepped) for e in events) + dropped_events.of(events).kinds["stepped"] == 1200
    if not strategy.layout.updates.synchronous:
        assert sum(result.summary.staleness_counts.values()) == count(events, "staleness") == 1200


def small_limits() -> None:
    """In a process of a test's own."""
    event_thinning._ONE = 12_000


def test_files_that_others_send_are_thinned_out(tmp_path: Path) -> None:
    def call() -> Any:
        small_limits()
        given: dict[str, Any] = {"budget": Steps(300), "checkpoint_every": Steps(50), "optimizer": slowly}
        return far_off("localsgd(tau=2)", tmp_path / "run", **given)

    outcomes = together(2, call)
    assert not any(outcome.kind for outcome in outcomes), outcomes
    for node in (0, 1):
        assert (tmp_path / "run" / f"events-{node}.jsonl").stat().st_size < 20_000
    events = events_of(tmp_path / "run")
    assert sum(isinstance(e, Stepped) for e in events) + dropped_events.of(events).kinds["stepped"] == 600


def test_a_loop_of_ones_own_is_thinned_out(tmp_path: Path) -> None:
    def call() -> Any:
        small_limits()
        return len(loop("allreduce", epochs=40, optimizer=slowly, out=tmp_path / "run")[0])

    (outcome,) = together(1, call)
    assert not outcome.kind, outcome
    assert (tmp_path / "run" / "events-0.jsonl").stat().st_size < 20_000
    events = events_of(tmp_path / "run")
    assert (
        sum(isinstance(e, Stepped) for e in events) + dropped_events.of(events).kinds["stepped"] == outcome.value > 500
    )
    assert facts_of(tmp_path / "run").steps == outcome.value
