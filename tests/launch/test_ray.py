# SPDX-License-Identifier: Apache-2.0
"""Runs on Ray: for real where it is installed, on a cluster of one machine; and what is said where it is not."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.conftest import Orchestra
from tests.cli.conftest import orchestra as orchestra  # the fixture
from tests.launch.conftest import NODE, SOURCES, command_lines
from tests.waiting import wait_until

from orchestra.cli.on_ray import nodes_of
from orchestra.cli.options import Options
from orchestra.errors import ClusterError
from orchestra.launchers import ray

HAS_RAY = importlib.util.find_spec("ray") is not None
real = pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
TOKEN = "fedcba9876543210" * 4
START = f"""\
import sys
from orchestra.launchers import ray
sys.exit(ray.launch(["python", sys.argv[1], sys.argv[2]], 2, "{TOKEN}", address="local"))
"""


@pytest.mark.skipif(HAS_RAY, reason="ray is installed")
def test_without_ray(orchestra: Orchestra) -> None:
    said = orchestra("run", "digits", "--on", "ray")
    assert said.code == 3
    assert "pip install 'neural-orchestra[ray]'" in said.err


def test_what_is_no_cluster_is_told_with_all_else_that_is_wrong(orchestra: Orchestra) -> None:
    said = orchestra("run", "digits", "--on", "rya", "--strategy", "slomo", "--workers", "0")
    assert said.code == 2
    assert "3 problems" in said.err
    assert "did you mean 'ray'?" in said.err


def test_how_many_nodes_there_are() -> None:
    assert nodes_of(Options()) == 2
    assert nodes_of(Options(strategy="solo")) == 1
    assert nodes_of(Options(strategy="ps", workers=3)) == 4
    assert nodes_of(Options(strategy="ps", workers=3, servers=2)) == 5
    assert nodes_of(Options(strategy="one_of_the_script's(x=1)", workers=3, servers=1)) == 4


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:1"])
def test_an_address_where_nothing_listens_is_refused_at_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "_CONNECT", 0.5)
    with pytest.raises(ConnectionRefusedError):
        ray._connect(address)
    ray._connect("auto")
    ray._connect("ray://somewhere:10001")  # Ray's own client


@real
@pytest.mark.timeout(120)
def test_every_node_finds_its_place(tmp_path: Path) -> None:
    (tmp_path / "node.py").write_text(NODE)
    said = subprocess.run(
        [sys.executable, "-c", START, str(tmp_path / "node.py"), "show"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": SOURCES},
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    mine = json.loads(said.stdout.splitlines()[-1])
    (line,) = [line for line in said.stderr.splitlines() if "WORLD_SIZE" in line]
    other = json.loads(line.partition(" | ")[2])
    assert [(place["RANK"], place["LOCAL_RANK"]) for place in (mine, other)] == [("0", "0"), ("1", "1")]
    for place in (mine, other):
        assert (place["WORLD_SIZE"], place["LOCAL_WORLD_SIZE"]) == ("2", "2")
        assert (place["ORCHESTRA_TOKEN"], place["cwd"]) == (TOKEN, str(tmp_path))
        assert place["MASTER_ADDR"] == mine["MASTER_ADDR"] != ""
        assert place["MASTER_PORT"] == mine["MASTER_PORT"] != "0"


@real
@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_however_a_driver_ends_its_processes_save_and_end(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "node.py").write_text(NODE)
    driver = subprocess.Popen(
        [sys.executable, "-c", START.replace(TOKEN, "x" * 32), str(tmp_path / "node.py"), "family"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": SOURCES},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
    assert not [line for pid, line in command_lines().items() if "x" * 32 in line and pid != driver.pid]
    driver.send_signal(number)
    assert driver.wait(60) == (130 if number == signal.SIGINT else -9)
    wait_until(lambda: not [line for line in command_lines().values() if str(tmp_path) in line])
    saved = "SIGINT" if number == signal.SIGINT else "SIGTERM"
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)] == [saved] * 2


@real
def test_a_cluster_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "_CONNECT", 0.5)
    with pytest.raises(ClusterError, match="ray start --head"):
        ray.launch(["run", "digits"], 2, TOKEN, address="127.0.0.1:1")
