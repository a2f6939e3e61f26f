# SPDX-License-Identifier: Apache-2.0
"""`orchestra demo`: the rates it uses were found by tuning, and its winner is the same everywhere."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import demo as figures
from tests.cli.test_table import row, table

from orchestra.cli import demo

SAVED = json.loads(figures.FIGURES.read_text(encoding="utf-8"))


def test_the_rates_are_those_that_tuning_found() -> None:
    assert SAVED["rates"] == demo._TUNED


def test_the_rates_were_tuned_for_the_cluster_of_the_demo() -> None:
    words = shlex.split(SAVED["tuned_by"])
    assert SAVED["tuned_by"] == figures.TUNING
    assert [words[words.index(name) + 1] for name in ("--network", "--compute-time", "--straggler")] == [
        *demo._SLOW.values()
    ]


@pytest.mark.timed
@pytest.mark.nightly
def test_the_demo_gives_the_ranking_that_is_on_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "orchestra", "demo", "--out", str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout + done.stderr
    assert "On a fast network" in done.stdout + done.stderr
    found = figures.ranking(tmp_path / "demo" / "slow")
    assert [entry["strategy"] for entry in found] == [entry["strategy"] for entry in SAVED["slow"]]
    for entry, saved in zip(found, SAVED["slow"], strict=True):
        assert entry["seconds_to_target"] == pytest.approx(saved["seconds_to_target"], rel=0.2)


def test_the_clock_of_a_ratio_is_named() -> None:
    slow = table(row("allreduce", 8.0, 8.0, 2.0), row("slowmo", 2.0, 2.0, 2.0))
    fast = table(row("allreduce", 1.0, 1.0, 4.0), row("slowmo", 2.0, 2.0, 2.0))
    said = demo._contrast(slow, fast)
    assert "slowmo 2 virtual s (medians of the seeds): 0.79 times as fast in pairs of equal seeds, not 2.52" in said
