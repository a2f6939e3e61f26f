# SPDX-License-Identifier: Apache-2.0
"""A launched run of real nodes: one voice, one cause, and what it says to do does go on with it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys

import pytest
from tests.launch.conftest import SOURCES, Ground
from tests.waiting import wait_until


def start(ground: Ground, line: str) -> subprocess.Popen[str]:
    ground.started.append(
        subprocess.Popen(
            [sys.executable, "-m", *shlex.split(line)],
            cwd=ground.folder,
            env=os.environ | {"PYTHONPATH": SOURCES},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    )
    return ground.started[-1]


def launching(ground: Ground) -> str:
    (ground.folder / "hosts.txt").write_text("".join(f"{host}\n" for host in ground.hosts))
    return f"orchestra launch --hosts hosts.txt --master 127.0.0.1 --ssh {shlex.quote(ground.ssh)} --"


@pytest.mark.nightly
def test_a_run_over_a_real_ssh(far: Ground) -> None:
    """From start to end: two hosts, one model, and no process left."""
    launcher = start(far, f"{launching(far)} run digits --strategy allreduce --steps 5 --out run --quiet")
    out, err = launcher.communicate(timeout=90)
    assert launcher.returncode == 0, err
    assert "allreduce · 2 workers" in out
    assert (far.folder / "run" / "model.safetensors").exists()
    assert not far.left()


@pytest.mark.nightly
def test_what_an_interrupted_run_says_to_do_goes_on_with_it(ground: Ground) -> None:
    run, line = ground.folder / "run", launching(ground)
    launcher = start(ground, f"{line} run digits --epochs 100 --out run --quiet")
    wait_until(lambda: (run / "events-1.jsonl").exists() and (run / "events-1.jsonl").stat().st_size > 0)
    os.killpg(launcher.pid, signal.SIGINT)
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 130, err
    assert err.count("SIGINT") == 1  # by process 0, with what to do
    assert err.count("asked all to stop, and waits for those that save first") == 1
    advice = err.partition("go on with ")[2].splitlines()[0]
    assert advice.startswith("orchestra launch --hosts hosts.txt ")
    again = start(ground, f"{advice} --steps 10000 --seconds 1 --quiet")
    assert again.wait(60) == 0, again.communicate()[1]
    assert (run / "ending.json").exists()


@pytest.mark.nightly
def test_what_is_wrong_with_the_command_is_said_once_a_host(near: Ground) -> None:
    near.hosts = ("one slots=3",)
    launcher = start(near, f"{launching(near)} run digits --batch -1")
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 2
    assert err.count("batch = -1") == 2  # and once more among the last lines of who failed first
