# SPDX-License-Identifier: Apache-2.0
"""A host is cut off for some seconds in the middle of a run, which goes on to the same result, or says who is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.zoo import flat, train

from orchestra import Attached, Simulated, Steps
from orchestra.lab import Lab
from orchestra.runs.events import Reconnected
from orchestra.runs.facts import events_of
from orchestra.worlds.sockets import auth

LIVE = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.lab.test_broken_links import live
live(sys.argv[2], sys.argv[3], float(sys.argv[4]))
"""
STEPS = 40


def live(strategy: str, folder: str, grace: float) -> None:
    """As a host of the lab."""
    cluster = Attached(order="given", threads=1, patience=30, grace=grace, compute_time="constant:0.2")
    result = train(strategy, Path(folder), cluster=cluster, budget=Steps(STEPS), progress=False)
    if cluster.is_coordinator:
        torch.save(flat(result.model), Path(folder) / "compared.pt")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the hosts run, but for its last arguments."""
    secret = tmp_path / "token"
    secret.touch(mode=0o600)
    secret.write_text(auth.new(), encoding="ascii")
    monkeypatch.setenv("ORCHESTRA_TOKEN_FILE", str(secret))
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(root) / "src"), root]))
    return [sys.executable, "-c", LIVE, root]


def cut_off(lab: Lab, host: int, folder: Path, seconds: float) -> None:
    """Once the run goes, take a host's only link down for a while."""
    while not (folder / "events-0.jsonl").exists():
        time.sleep(0.1)
    time.sleep(1.5)
    for state, pause in (("down", seconds), ("up", 0.0)):
        subprocess.run(lab.command(host, ["ip", "link", "set", "eth0", state]), check=True)
        time.sleep(pause)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", ["localsgd(tau=2)", pytest.param("ps()", marks=pytest.mark.nightly)])
def test_a_host_that_is_cut_off_comes_back(
    strategy: str, name: str, tmp_path: Path, command: list[str], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    out = tmp_path / "lab"
    with Lab(hosts=3, rate="100mbit", latency="1ms", name=name) as lab:
        cutting = threading.Thread(target=cut_off, args=(lab, 2, out, 5.0))
        cutting.start()
        assert lab.run([*command, strategy, str(out), "20"]) == 0
        cutting.join()
    assert b"reconnected to" in b"".join(capfdbinary.readouterr())
    parted = [e for e in events_of(out) if isinstance(e, Reconnected)]
    assert parted
    assert all(1 in (e.node, e.peer) and 0 < e.seconds < 25 for e in parted), "one end is at the second host"
    workers = 3 if strategy != "ps()" else 2
    alike = train(
        strategy, tmp_path / "virtual", cluster=Simulated(workers=workers), budget=Steps(STEPS), progress=False
    )
    assert torch.equal(torch.load(out / "compared.pt"), flat(alike.model))


@pytest.mark.nightly
@pytest.mark.timeout(60)
def test_a_host_that_does_not_come_back_is_named(
    name: str, tmp_path: Path, command: list[str], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    out = tmp_path / "lab"
    with Lab(hosts=2, rate="100mbit", latency="1ms", name=name) as lab:
        cutting = threading.Thread(target=cut_off, args=(lab, 2, out, 12.0))
        cutting.start()
        assert lab.run([*command, "localsgd(tau=2)", str(out), "2"]) != 0
        cutting.join()
    said = b"".join(capfdbinary.readouterr()).decode()
    assert "worker 1 has been unreachable since" in said
    assert "its connection to worker 0 broke" in said
