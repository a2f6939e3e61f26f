# SPDX-License-Identifier: Apache-2.0
"""Several processes with one loop: they begin, fail and end together."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.prepare.loops import equal, loop, make_loader
from tests.processes import Processes, together
from tests.zoo import adam, classifier, ended, make_model, momentum, sgd
from torch import nn

import orchestra
from orchestra.engine.fingerprint import parts_of_model, parts_of_optimizer
from orchestra.runs.events import EventLog
from orchestra.runs.facts import facts_of


def rank() -> int:
    return int(os.environ["RANK"])


@pytest.mark.parametrize("dies", [0, 2])
def test_a_worker_that_dies_is_named(dies: int) -> None:
    def die(optimizer: Any) -> None:
        if optimizer.orchestra.steps == 5 and rank() == dies:
            os.kill(os.getpid(), signal.SIGKILL)

    outcomes = together(3, partial(loop, "localsgd(tau=2)", each=die))
    assert outcomes.pop(dies).kind == "killed"
    for outcome in outcomes:
        assert outcome.code == 6
        assert f"worker {dies} died: its connection" in outcome.error


def smaller() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 2), nn.Linear(2, 1, bias=False))


def grouped(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.SGD([{"params": [first]}, {"params": others, "momentum": 0.5}], lr=0.05)


@pytest.mark.parametrize(
    ("different", "told"),
    [
        ({"model": smaller}, "parameter 2.weight is '3×7 float32' here and '2×7 float32' there"),
        ({"model": classifier}, "parameter 3.weight is here only"),
        ({"strategy": "slowmo"}, "strategy is"),
        ({"optimizer": partial(momentum, lr=0.2)}, "lr of the optimizer is 0.02 here and 0.2 there"),
        ({"optimizer": adam}, "optimizer is 'SGD' here and 'Adam' there"),
        ({"optimizer": grouped}, "groups of the optimizer is 1 here and 2 there"),
        ({"loader": partial(make_loader, 96)}, "data is '108 samples' here and '96 samples' there"),
    ],
)
def test_the_first_difference_is_named(different: dict[str, Any], told: str) -> None:
    with Processes([loop, partial(loop, **different)]) as processes:
        for outcome in processes.outcomes():
            assert outcome.code == 4
            assert told in outcome.error or _seen_from_the_other_side(told) in outcome.error


def _seen_from_the_other_side(told: str) -> str:
    return re.sub(r"is (.*) here and (.*) there", r"is \2 here and \1 there", told).replace("here only", "there only")


@pytest.mark.nightly
def test_a_large_model_can_be_introduced() -> None:
    def many(last: int) -> nn.Module:
        return nn.Sequential(*(nn.Linear(1, 1) for _ in range(2000)), nn.Linear(1, last))

    def optimizer(rate: float, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [p], "lr": rate - i / 1e6} for i, p in enumerate(parameters)])

    about = parts_of_model(many(1)) | parts_of_optimizer(optimizer(0.1, many(1).parameters()))
    assert len(json.dumps(about)) < 50_000
    assert about["parameter 100.bias"] == "1 float32"
    assert about["lr of group 100 of the optimizer"] == 0.0999
    assert parts_of_model(many(1)) != parts_of_model(many(2))
    assert parts_of_optimizer(optimizer(0.1, many(1).parameters())) != parts_of_optimizer(
        optimizer(0.2, many(1).parameters())
    )


@pytest.mark.parametrize("strategy", ["allreduce", "localsgd(tau=3)"])
def test_who_makes_fewer_steps_is_named(strategy: str) -> None:
    def call() -> Any:
        model = make_model()
        model, optimizer = orchestra.prepare(
            model, sgd(model.parameters()), strategy=strategy, cluster=orchestra.Attached(patience=20)
        )
        for _ in range(6 + rank()):
            optimizer.zero_grad()
            model(torch.ones(2, 7)).sum().backward()
            optimizer.step()
        optimizer.finish()

    for outcome, code in zip(together(2, call), (10, 4), strict=True):
        assert outcome.code == code, outcome.error
        assert "worker 0 finished after 6 steps, but worker 1 has begun step 7" in outcome.error


def test_the_run_folder_is_that_of_train(tmp_path: Path) -> None:
    def call() -> Any:
        means = []

        def each(optimizer: Any) -> None:
            handle = optimizer.orchestra
            handle.log("mine", handle.rank)
            means.append(handle.mean(handle.rank, weight=1 + handle.rank))
            assert handle.is_coordinator == (handle.rank == 0)

        loop("localsgd(tau=2)", out=tmp_path / "run", each=each, told=True)
        return means

    outcomes = together(2, call)
    assert outcomes[0].value == outcomes[1].value == [2 / 3] * 18
    facts = facts_of(tmp_path / "run")
    assert (facts.workers, facts.steps, facts.samples, facts.stopped_by) == (2, 18, 216, "loop")
    assert facts.loss is not None
    assert facts.loss > 0
    parameters = json.loads((tmp_path / "run" / "config.json").read_text())["parameters"]
    assert ended(tmp_path / "run", 0).sent == 9 * 4 * parameters  # a mean of two is x there and back, by halves
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "config.json", "events-0.jsonl", "events-1.jsonl", "ending.json", "summary.json", "model.safetensors",
    }  # fmt: skip
    with pytest.raises(orchestra.ConfigError, match="is not empty"):
        loop("localsgd(tau=2)", out=tmp_path / "run")


def test_a_run_folder_that_others_do_not_see_gets_their_files(tmp_path: Path) -> None:
    def call() -> None:
        place = tmp_path / f"machine-{rank()}"
        place.mkdir()
        os.chdir(place)
        read_text = Path.read_text

        def near(path: Path, *args: Any, **given: Any) -> str:
            if path.name.startswith(".mark") and rank():
                raise FileNotFoundError(path)  # as on another machine
            return read_text(path, *args, **given)

        with contextlib.suppress(SystemExit), mock.patch.object(Path, "read_text", near):
            loop("ps", out="run" if rank() == 0 else None)

    for outcome in together(3, call):
        assert not outcome.kind, outcome.error
    run = tmp_path / "machine-0" / "run"
    assert not [*(tmp_path / "machine-1").iterdir(), *(tmp_path / "machine-2").iterdir()]
    assert {path.name for path in run.iterdir()} == {
        "config.json", "events-0.jsonl", "events-1.jsonl", "events-2.jsonl", "ending.json", "summary.json",
        "model.safetensors",
    }  # fmt: skip
    assert len(facts_of(run).shares) == 3


def test_worker_0_waits_for_what_the_others_write(tmp_path: Path) -> None:
    def call() -> None:
        flush = EventLog.flush

        def late(log: EventLog) -> None:
            time.sleep(0.5 * rank())
            flush(log)

        with mock.patch.object(EventLog, "flush", late):
            loop("allreduce", out=tmp_path / "run", model=lambda: nn.Linear(7, 1))

    for outcome in together(2, call):
        assert not outcome.kind, outcome.error
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["samples"] == 216
    assert len(summary["shares"]) == 2


def test_a_folder_that_cannot_be_written_ends_it_for_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    mine, theirs = together(2, partial(loop, out=tmp_path / "file" / "run"))
    assert (mine.code, theirs.code) == (2, 10)
    assert "out = " in mine.error
    assert "cannot be written" in mine.error
    assert "cannot be written" in theirs.error


# What cannot be.


def test_servers_are_processes_of_their_own() -> None:
    """As many more as there are servers; how many, the message says."""
    for outcome in together(2, partial(loop, "ps(servers=2)")):
        assert outcome.code == 2
        assert "ParameterServer has 2 servers, each a process of its own" in outcome.error
        assert "torchrun --nproc-per-node 4 for 2 workers" in outcome.error
    with pytest.raises(orchestra.ConfigError, match="start more than 1 process, such as torchrun --nproc-per-node 3"):
        loop("ps")


@pytest.mark.parametrize("strategy", ["ps(servers=2)", "ps(servers=2, colocated=True)"])
def test_servers_in_extra_processes_give_the_same_model(strategy: str) -> None:
    def call() -> Any:
        with contextlib.suppress(SystemExit):
            return loop(strategy)
        return "a server"

    *workers, first, second = together(4, call)
    assert first.value == second.value == "a server"
    expected = together(2, loop)
    for outcome, other in zip(workers, expected, strict=True):
        assert not outcome.kind, outcome.error
        assert equal(outcome.value[1], other.value[1])


@pytest.mark.parametrize(
    ("cluster", "told"),
    [
        (orchestra.Attached(order=(0, 1)), "cluster.order = (0, 1)    a loop uses the ranks"),
        (orchestra.Local(workers=4), "start it with torchrun --nproc-per-node 4"),
    ],
)
def test_a_cluster_that_a_loop_cannot_have(cluster: Any, told: str) -> None:
    with pytest.raises(orchestra.ConfigError, match=re.escape(told)):
        loop(cluster=cluster)
