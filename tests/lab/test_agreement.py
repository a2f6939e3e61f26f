# SPDX-License-Identifier: Apache-2.0
"""Synchronous strategies: hosts of a lab, processes that share memory and a simulation agree, bit for bit."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.zoo import flat, train

from orchestra import Attached, Local, Simulated, Steps
from orchestra.engine import expression
from orchestra.engine.cluster import Cluster
from orchestra.lab import Lab
from orchestra.runs.events import Stepped, read
from orchestra.worlds.sockets import auth

STRATEGIES = (
    "allreduce",
    "allreduce(algorithm='ring')",
    "ps(servers=2)",
    "localsgd(tau=2)",
    "slowmo(tau=2)",
)
HOSTS = 4

LIVE = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.lab.test_agreement import live
live(sys.argv[2])
"""


def run(strategy: str, out: Path, cluster: Cluster) -> None:
    """Train, and leave what can be compared."""
    result = train(strategy, out, cluster=cluster, budget=Steps(7), progress=False)
    if cluster.is_coordinator:
        torch.save((flat(result.model), result.summary.sent_total), out / "compared.pt")


def live(folder: str) -> None:
    """As a host of the lab: take part in one run after the other."""
    for i, strategy in enumerate(STRATEGIES):
        run(strategy, Path(folder) / f"lab-{i}", Attached(order="given", threads=1, patience=20))


@pytest.mark.timeout(120)
def test_lab_local_and_simulation_agree(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "token"
    secret.touch(mode=0o600)
    secret.write_text(auth.new(), encoding="ascii")
    monkeypatch.setenv("ORCHESTRA_TOKEN_FILE", str(secret))
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(root) / "src"), root]))
    with Lab(hosts=HOSTS, rate="50mbit", latency="1ms", name=name) as lab:
        assert lab.run([sys.executable, "-c", LIVE, root, str(tmp_path)]) == 0
    for i, strategy in enumerate(STRATEGIES):
        workers = HOSTS - expression.parse(strategy).layout.servers
        run(strategy, tmp_path / f"local-{i}", Local(workers=workers, threads=1, patience=20))
        run(strategy, tmp_path / f"virtual-{i}", Simulated(workers=workers, network="50mbit,1ms"))
        found = [trajectory(tmp_path / f"{world}-{i}", workers) for world in ("lab", "local", "virtual")]
        for world, other in zip(("local", "virtual"), found[1:], strict=True):
            assert other == found[0], f"{strategy}: {world}"


def trajectory(folder: Path, workers: int) -> Any:
    """The parameters at the end, all bytes sent, and every worker's losses and bytes, step by step."""
    parameters, sent = torch.load(folder / "compared.pt")
    events = [read(folder / f"events-{worker}.jsonl") for worker in range(workers)]
    steps = [[(e.step, e.loss, e.sent, e.received) for e in mine if isinstance(e, Stepped)] for mine in events]
    assert all(len(mine) == 7 for mine in steps)
    return parameters.tolist(), sent, steps
