# SPDX-License-Identifier: Apache-2.0
"""Real processes, from scripts, from standard input, from functions that no module holds; and what ends them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.waiting import wait_until
from tests.zoo import INPUTS, assert_close, make_data, make_model, plain, sgd, train

from orchestra import AllReduce, Attached, Local, ParameterServer, SlowMo, Steps, Strategy

Promised = Callable[[float], float]
SOURCE = Path(__file__).resolve().parents[2] / "src"

SCRIPT = """
    import functools, sys, torch
    import orchestra

    class Net(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 1))

        def forward(self, x):
            return self.layers(x)

    width = 4
    print("main once")
    result = orchestra.train(
        model=lambda: Net(width),
        data=lambda: (torch.ones(40, 3), torch.ones(40, 1)),
        loss=torch.nn.functional.mse_loss,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        strategy="ps(servers=2)",
        cluster=orchestra.Local(workers=2),
        batch=4,
        budget=orchestra.Steps(%s),
        out=sys.argv[1],
        checkpoint_every=orchestra.Steps(5),
    )
    print("steps", result.summary.steps, type(result.model).__name__)
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1"}


def text(steps: int = 6) -> str:
    return textwrap.dedent(SCRIPT) % steps


@pytest.mark.parametrize("way", ["script", "stdin", pytest.param("command", marks=pytest.mark.nightly)])
def test_from_a_program_without_a_guard(way: str, tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    if way == "script":
        (tmp_path / "program.py").write_text(text())
        command = [sys.executable, str(tmp_path / "program.py"), out]
    elif way == "stdin":
        command = [sys.executable, "-", out]
    else:
        command = [sys.executable, "-c", text(), out]
    done = subprocess.run(
        command, input=text() if way == "stdin" else "", env=environment(), capture_output=True, text=True, timeout=50
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["main once", "steps 6 Net"]
    assert done.returncode == 0


def start(tmp_path: Path) -> subprocess.Popen[str]:
    """A long run in a process of its own, a few steps old."""
    (tmp_path / "program.py").write_text(text(10_000_000))
    program = subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "run")],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def has_saved() -> bool:
        assert program.poll() is None, program.communicate()
        return (tmp_path / "run" / "checkpoints" / "latest").exists()

    wait_until(has_saved)
    return program


def descendants(program: subprocess.Popen[str]) -> list[psutil.Process]:
    found: list[psutil.Process] = psutil.Process(program.pid).children(recursive=True)
    assert len(found) == 1 + 4  # the fork server; two workers, two servers
    return found


def all_gone(processes: list[psutil.Process], seconds: float) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not alive


@pytest.mark.usefixtures("also_alone")
@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "SIGINT"), (signal.SIGTERM, "SIGTERM")])
def test_one_signal_stops_with_a_checkpoint(
    number: signal.Signals, name: str, tmp_path: Path, promised: Promised
) -> None:
    program = start(tmp_path)
    others = descendants(program)
    program.send_signal(number)
    stdout, stderr = program.communicate(timeout=20)
    assert program.returncode != 0
    assert f"stopped by {name}. A checkpoint of step" in stderr
    assert "steps" not in stdout
    assert all_gone(others, promised(2))


@pytest.mark.usefixtures("also_alone")
def test_two_signals_stop_at_once(tmp_path: Path, promised: Promised) -> None:
    program = start(tmp_path)
    others = descendants(program)
    for worker in others[1:]:
        worker.suspend()  # no worker can end its step
    program.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert program.poll() is None
    program.send_signal(signal.SIGINT)
    program.communicate(timeout=promised(3))
    assert program.returncode not in (0, None)
    assert all_gone(others, promised(2))


@pytest.mark.usefixtures("also_alone")
def test_nothing_outlives_a_killed_program(tmp_path: Path, promised: Promised) -> None:
    program = start(tmp_path)
    others = descendants(program)
    program.kill()
    program.communicate()
    assert all_gone(others, promised(2))


@pytest.mark.usefixtures("also_alone")
def test_nothing_outlives_a_killed_fork_server(tmp_path: Path, promised: Promised) -> None:
    program = start(tmp_path)
    server, *nodes = descendants(program)
    server.kill()
    _, stderr = program.communicate(timeout=20)
    assert program.returncode not in (0, None)
    assert "the process that starts workers died" in stderr
    assert all_gone(nodes, promised(2))


def test_more_workers_than_cores(tmp_path: Path) -> None:
    result = train(AllReduce(), tmp_path, workers=8, batch=3, budget=Steps(6))
    assert_close(result.model, plain(size=8, batch=3, steps=6))
    assert json.loads((tmp_path / "config.json").read_text())["threads"] == 1


@pytest.mark.parametrize("strategy", [AllReduce(), ParameterServer(), SlowMo(tau=2)], ids=lambda s: type(s).__name__)
def test_closures_and_lambdas_are_handed_over(strategy: Strategy[Any], tmp_path: Path) -> None:
    width, factor, seen = 5, torch.tensor(2.0), {"scale": 0.5}

    class Local_(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(INPUTS, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.a(x).sum(1, keepdim=True) * factor
            return y

    result = train(
        strategy,
        tmp_path,
        workers=2,
        model=lambda: Local_(),
        data=lambda: make_data(),
        loss=lambda y, t: ((y - t) ** 2).mean() * seen["scale"],
        optimizer=lambda params: torch.optim.SGD(params, lr=0.001),
        schedule=lambda epochs: 1.0,
    )
    assert isinstance(result.model, Local_)


def test_from_another_thread(tmp_path: Path) -> None:
    import threading

    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(train(AllReduce(), tmp_path, workers=2, optimizer=sgd)))
    thread.start()
    thread.join()
    assert_close(found[0].model, plain(optimizer=sgd, size=2))


def test_between_machines_threads_are_as_the_user_says_not_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    cores = len(os.sched_getaffinity(0))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert Attached().resources(4).threads == cores
    monkeypatch.setenv("OMP_NUM_THREADS", str(cores + 2))
    assert Attached().resources(4).threads == cores + 2
    assert Attached(threads=3).resources(4).threads == 3
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")  # torchrun sets one thread for every process
    assert Attached().resources(4).threads == cores


def test_threads_are_shared_out(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    assert Local().resources(1).threads == cores
    assert Local().resources(2 * cores).threads == 1
    assert Local(threads=3).resources(8).threads == 3

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if os.getpid() != here:
                (tmp_path / f"{os.getpid()}").write_text(str(torch.get_num_threads()))
            y: torch.Tensor = self.inner(x)
            return y

    here = os.getpid()
    train(AllReduce(), tmp_path / "run", workers=3, model=Counting, cluster=Local(workers=3, threads=2))
    told = [p.read_text() for p in tmp_path.iterdir() if p.is_file()]
    assert told == ["2"] * 3
