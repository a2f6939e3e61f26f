# SPDX-License-Identifier: Apache-2.0
"""Two slow hosts in a lab: the server is put on a fast one, and every worker gains."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from orchestra.lab import Lab
from orchestra.worlds.sockets import auth

SCRIPT = """
import sys, torch, orchestra
from functools import partial
data = lambda: (torch.zeros(64, 1000), torch.zeros(64, 50))
orchestra.train(
    model=lambda: torch.nn.Linear(1000, 50), data=data, loss=torch.nn.functional.mse_loss,
    optimizer=partial(torch.optim.SGD, lr=0.1), strategy="ps", batch=1, budget=orchestra.Steps(4), out=sys.argv[1],
    cluster=orchestra.Attached(order=sys.argv[2]), progress=False,
)
"""


def test_the_server_goes_where_the_network_is_fast(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "token"
    secret.write_text(auth.new())
    secret.chmod(0o600)
    monkeypatch.setenv("ORCHESTRA_TOKEN_FILE", str(secret))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    slow = {3: {"rate": "10mbit"}, 4: {"rate": "10mbit"}}
    seconds = {}
    with Lab(name=name, hosts=4, rate="100mbit", latency="0.5ms", exceptions=slow) as lab:
        for order in ("given", "measured"):
            assert lab.run([sys.executable, str(script), str(tmp_path / order), order]) == 0
            seconds[order] = json.loads((tmp_path / order / "summary.json").read_text())["seconds"]
    found = json.loads((tmp_path / "measured" / "topology.json").read_text())
    assert found["order"] == [0, 2, 3, 1]
    megabits = [[rate and rate * 8e-6 for rate in row] for row in found["rate"]]
    assert 60 < megabits[0][1] < 105
    assert all(6 < megabits[i][j] < 11 for i in range(4) for j in (2, 3) if i != j)
    assert not (tmp_path / "given" / "topology.json").exists()
    # 3 vectors of 200 kB come and go over the server's link of 10 Mbit/s, or over three links at once.
    assert seconds["given"] > 1.7 * seconds["measured"]
