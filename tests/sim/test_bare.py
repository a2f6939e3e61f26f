# SPDX-License-Identifier: Apache-2.0
"""Machines with a GPU often have torch and little else: a simulation needs only torch, NumPy and safetensors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import functools
from importlib.machinery import PathFinder


HIDDEN = {"cloudpickle", "greenlet", "psutil", "rich", "typer", "yaml", "zmq"}
find = PathFinder.find_spec


def missing(name, path=None, target=None):
    return None if name.split(".")[0] in HIDDEN else find(name, path, target)


PathFinder.find_spec = missing
import importlib.util
import torch
import orchestra

assert importlib.util.find_spec("greenlet") is None

for strategy in ("slowmo(tau=2)", "ps(consistency=asp(), servers=2)"):
    result = orchestra.train(
        model=functools.partial(torch.nn.Linear, 4, 2),
        data=lambda: (torch.randn(64, 4), torch.randint(2, (64,))),
        loss=torch.nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        strategy=strategy,
        cluster=orchestra.Simulated(workers=8, network="1gbit,1ms", compute_time="lognormal:0.05,0.3"),
        batch=4,
        budget=orchestra.Steps(5),
        out=strategy[:2],
    )
    print(result.summary.steps)
"""


def test_torch_numpy_and_safetensors_suffice(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["5", "5"]
