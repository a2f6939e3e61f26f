# SPDX-License-Identifier: Apache-2.0
"""`orchestra compare --lab`: each strategy as real processes on hosts of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def compare(*arguments: str, timeout: float = 150) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "orchestra", "compare", "digits", "--no-tune", "--seeds", "1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.usefixtures("name")  # where a lab can be built
def test_each_strategy_runs_in_a_lab_of_its_own(tmp_path: Path) -> None:
    done = compare(
        "--lab", "20mbit,1ms", "-n", "2", "-s", "allreduce,ps", "--epochs", "0.5", "--batch", "32", "--json",
        "--out", str(tmp_path / "out"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert {row["strategy"] for row in record["rows"]} == {"allreduce", "ps"}
    for strategy, nodes in (("allreduce", 2), ("ps", 3)):
        run = tmp_path / "out" / strategy / "seed0"
        assert json.loads((run / "config.json").read_text())["cluster"]["kind"] == "attached"
        assert len(list(run.glob("events-*.jsonl"))) == nodes
    # 12 steps of 2 x 69 kB over a link of 20 Mbit/s take a third of a second, and no time at all without it.
    summary = json.loads((tmp_path / "out" / "ps" / "seed0" / "summary.json").read_text())
    assert summary["seconds"] > 0.6


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--lab", "100mbit"), "must be RATE,LATENCY"),
        (("--lab", "100mbit,1ms", "--sim"), "is real, --sim is not"),
        (("--lab", "100mbit,1ms", "-s", "hogwild"), "a lab has a host for each"),
        (("--lab", "100mbit,1ms,cpu=some"), "must be RATE,LATENCY"),
    ],
)
def test_what_cannot_be_compared_there_is_refused_first(arguments: tuple[str, ...], told: str) -> None:
    done = compare(*arguments, timeout=60)
    assert done.returncode == 2
    assert told in done.stderr
