# SPDX-License-Identifier: Apache-2.0
"""A start that fails leaves a folder. The next may have it, unless something was trained there or put there."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes import environ_of, free_port, together
from tests.zoo import make_data, train

import orchestra
from orchestra import AllReduce, Attached, Steps
from orchestra.errors import ClusterError, ConfigError, WorkerFailed
from orchestra.runs import run_lock
from orchestra.runs.events import Stepped, encode


def fail_in_another_process(parent: int) -> Any:
    if os.getpid() != parent:
        raise ValueError("no such file on this machine")
    return make_data()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a start that failed before the first step."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for name in ("scores.jsonl", "topology.json", "events-0.jsonl", "running", ".launch-1"):
        (tmp_path / "run" / name).touch()
    (tmp_path / "run" / "config.json").write_text('{"strategy": "allreduce"}')
    assert run_lock.never_began(tmp_path / "run")
    return tmp_path / "run"


def step(run: Path) -> None:
    event = Stepped(0.1, 0, 1, 0.1, 4, 0.5, 0.1, 0.0, 0.0, 0.0, 0, 0)
    (run / "events-0.jsonl").write_text(encode(event))


THINGS: dict[str, Callable[[Path], object]] = {
    "a step": step,
    "a checkpoint": lambda run: (run / "checkpoints" / "step-00000001").mkdir(),
    "a model": lambda run: (run / "model.safetensors").touch(),
    "a file of the user's": lambda run: (run / "notes.txt").touch(),
    "a folder of the user's": lambda run: (run / "data").mkdir(),
    "a link": lambda run: (run / "events-1.jsonl").symlink_to(run / "config.json"),
    "another's config": lambda run: (run / "config.json").write_text("[]"),
    "no word of a run": lambda run: (run / "running").unlink(),
}


@pytest.mark.parametrize("what", THINGS)
def test_what_is_more_than_a_failed_start_is_kept(what: str, folder: Path) -> None:
    THINGS[what](folder)
    before = {path for path in folder.rglob("*")}
    assert not run_lock.never_began(folder)
    run_lock.make_room(folder)
    assert {path for path in folder.rglob("*")} == before
    with pytest.raises(ConfigError, match="is not empty"):
        train(AllReduce(), folder, workers=2, budget=Steps(1))


def test_a_folder_that_a_run_holds_is_not_taken(folder: Path) -> None:
    with run_lock.holding(folder):
        assert not run_lock.never_began(folder)
        run_lock.make_room(folder)
        assert (folder / "config.json").exists()


def test_who_only_asks_does_not_keep_the_next_start_out(folder: Path) -> None:
    with (folder / "running").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        asking = threading.Timer(0.05, fcntl.flock, [file, fcntl.LOCK_UN])
        asking.start()
        run_lock.make_room(folder)
        asking.join()
    assert not any(folder.iterdir())


def test_a_start_that_could_not_even_say_what_it_was_leaves_room(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="full"), run_lock.holding(tmp_path):
        raise OSError("the disk is full")
    assert [path.name for path in tmp_path.iterdir()] == ["running"]
    assert run_lock.never_began(tmp_path)
    assert train(AllReduce(), tmp_path, workers=1, budget=Steps(1)).summary.steps == 1


def test_the_same_call_can_be_made_again(tmp_path: Path) -> None:
    parent, out = os.getpid(), tmp_path / "run"
    with pytest.raises(WorkerFailed, match="no such file on this machine"):
        train(AllReduce(), out, workers=2, budget=Steps(2), data=lambda: fail_in_another_process(parent))
    assert run_lock.ask(out).fate == "failed"
    (out / "topology.json").touch()  # as between machines
    assert train(AllReduce(), out, workers=2, budget=Steps(2)).summary.steps == 2
    assert run_lock.ask(out).alive is None
    assert not (out / "topology.json").exists()
    with pytest.raises(ConfigError, match="is not empty"):
        train(AllReduce(), out, workers=2, budget=Steps(2))


def test_a_call_can_be_repeated_after_a_failed_rendezvous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ_of(0, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        with pytest.raises(ClusterError, match="node 1 did not connect"):
            train(AllReduce(), tmp_path / "run", cluster=Attached(patience=0.2), budget=Steps(2))
        assert (tmp_path / "run" / "config.json").exists()


def test_a_loop_may_use_the_folder_of_a_failed_start(folder: Path) -> None:
    def loop() -> bool:
        model = torch.nn.Linear(2, 1)
        _, optimizer = orchestra.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), out=folder)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.finish()
        return (folder / "topology.json").exists()

    assert [outcome.value for outcome in together(1, loop)] == [False]
    assert (folder / "ending.json").exists()
