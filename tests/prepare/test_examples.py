# SPDX-License-Identifier: Apache-2.0
"""Every example does what it says, in two processes as torchrun would start them."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from tests.processes import together

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, *args: str) -> str:
    """What an example prints. None may clip by torch: that sees one worker's gradient, not the mean."""
    printed = io.StringIO()
    sys.argv = [name, *args]
    by_torch = mock.patch.object(torch.nn.utils, "clip_grad_norm_", side_effect=AssertionError("clips by torch"))
    with contextlib.redirect_stdout(printed), by_torch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other packages
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue()


def prints(name: str, *args: str) -> str:
    """What worker 0 prints; the other one is silent."""
    first, second = together(2, partial(run, name, *args))
    assert not first.kind, first.error
    assert not second.kind, second.error
    assert second.value == ""
    return str(first.value)


@pytest.mark.parametrize("strategy", ["slowmo(tau=8)", "allreduce"])
def test_own_loop(strategy: str) -> None:
    printed = prints("own_loop.py", "--epochs", "3", "--strategy", strategy)
    found = re.fullmatch(r"accuracy (\S+), workers: 2\n", printed)
    assert found is not None
    assert float(found[1]) > 0.8


def test_three_lines_are_marked() -> None:
    text = (EXAMPLES / "own_loop.py").read_text(encoding="utf-8")
    assert re.findall(r"# (\d)$", text, re.MULTILINE) == ["1", "2", "3"]


@pytest.mark.parametrize("strategy", ["localsgd(tau=4)", "allreduce"])
def test_own_samples(strategy: str) -> None:
    printed = prints("own_samples.py", "--epochs", "4", "--strategy", strategy)
    found = re.fullmatch(r"accuracy (\S+), workers: 2\n", printed)
    assert found is not None
    assert float(found[1]) > 0.8


def test_accelerate_style() -> None:
    losses = re.findall(r"epoch \d: loss (\S+)", prints("accelerate_style.py", "--epochs", "3"))
    assert len(losses) == 3
    assert float(losses[2]) < 0.7 * float(losses[0])


@pytest.mark.nightly
def test_under_torchrun() -> None:
    """The command at the top of the example."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(EXAMPLES / "own_loop.py"), "--epochs", "1"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, *script], capture_output=True, text=True, timeout=55, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"accuracy \S+, workers: 2\n", done.stdout)
