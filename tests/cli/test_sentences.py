# SPDX-License-Identifier: Apache-2.0
"""What commands say around runs: advice that can be followed, equal rows, windows of figures, an end by Ctrl-C."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.cli.conftest import Orchestra
from tests.cli.test_table import row, table
from tests.zoo import make_model

from orchestra.cli import demo, repeat, watch
from orchestra.cli.lessons import verdict
from orchestra.cli.tuning import Tuning
from orchestra.engine import expression, warnings
from orchestra.report import model


def test_a_strategy_with_stale_gradients_is_advised_what_its_comparison_can_do() -> None:
    made = table(row("allreduce", 2.0, 2.0), row("ps(consistency=asp)", None, 2.0, stale=3.0))
    for changed, advice in (
        ({}, "Give a smaller --lr."),
        ({"tuned": True}, "Give smaller rates to tune with: --lrs."),
        ({"epochs": math.nan, "tuned": True}, "Set a smaller learning rate in the script."),
    ):
        words = " ".join(verdict(replace(made, **changed), cores=8))
        assert (
            f"gradients were 3.0 updates old on average, for which a smaller learning rate may be needed. {advice}"
            in (words)
        )


def test_nodes_with_equal_shares_are_one_row(orchestra: Orchestra) -> None:
    cluster = ("--network", "10mbit,1ms", "--compute-time", "constant:0.01", "--steps", "2", "--numerics", "off")
    said = orchestra("sim", "digits", "-n", "32", *cluster, "--out", "many")
    assert said.code == 0, said.err
    rows = [line for line in said.out.splitlines() if line.startswith("  worker")]
    assert len(rows) == 1
    assert rows[0].startswith("  workers 0-31 ")
    assert "samples/s on average" in said.out


def test_the_clock_of_a_ratio_is_named() -> None:
    slow = table(row("allreduce", 8.0, 8.0, 2.0), row("slowmo", 2.0, 2.0, 2.0))
    fast = table(row("allreduce", 1.0, 1.0, 4.0), row("slowmo", 2.0, 2.0, 2.0))
    said = demo._contrast(slow, fast)
    assert "slowmo 2 virtual s (medians of the seeds): 0.79 times as fast in pairs of equal seeds, not 2.52" in said


def test_ctrl_c_ends_watch_without_a_word(
    orchestra: Orchestra, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupt(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch, "read_target", interrupt)
    said = orchestra("watch", "--target", "accuracy=0.9")
    assert (said.code, said.out, said.err) == (130, "", "")


def test_a_folder_tuning_of_the_user_is_not_taken_for_tries(tmp_path: Path) -> None:
    (tmp_path / "tuning" / "ps" / "seed3").mkdir(parents=True)
    (tmp_path / "tuning" / "ps" / "seed3" / "config.json").write_text("{}")
    (tmp_path / "tuning.json").write_text("{}")
    assert not repeat.is_taken(tmp_path)
    (tmp_path / "tuning" / "notes.txt").write_text("mine")
    assert repeat.is_taken(tmp_path)


def test_a_warning_of_momentum_names_options_where_those_were_typed() -> None:
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)(make_model().parameters())
    asp = expression.parse("ps(consistency=asp)")
    typed = warnings.about_momentum(asp, optimizer, 2, options=True)
    assert typed is not None
    assert typed.startswith("ps(consistency=asp) applies gradients")
    assert "Use --momentum 0 --lr 0.5," in typed


def test_a_run_says_each_warning_once(orchestra: Orchestra) -> None:
    asp = ("-s", "ps(consistency=asp)", "--momentum", "0.9", "--steps", "2")
    said = orchestra("sim", "digits", "-n", "2", *asp, "--out", "warned")
    assert said.code == 0, said.err
    assert said.err.count("amplifies them") == 1
    assert json.loads(Path("warned/ending.json").read_text())["warnings"]
    raced = ("compare", "digits", "--sim", "-n", "2", *asp[:2], "--epochs", "1", "--seeds", "2", "--no-tune")
    said = orchestra(*raced, "--out", "raced")
    assert said.code == 0, said.err
    assert said.err.count("amplifies them") == 1


def test_tuning_tells_its_progress_once_a_minute_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    tuned = Tuning(None, 1, _told=0.0)  # type: ignore[arg-type]
    for _ in range(5):
        tuned._show("tuning ps: lr 0.1")
        now[0] += 30
    assert capsys.readouterr().err == 2 * "tuning ps: lr 0.1 (try 1)\n"


def test_how_a_target_was_found_and_how_long_the_race_takes_is_told(tmp_path: Path, orchestra: Orchestra) -> None:
    script = """
import torch, orchestra
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = orchestra.prepare(model, optimizer)
for step in range(6):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.orchestra.score(accuracy=0.1 + 0.1 * step)
optimizer.finish()
"""
    (tmp_path / "scored.py").write_text(script)
    said = orchestra("compare", str(tmp_path / "scored.py"), "-s", "allreduce", "--seeds", "1", "--out", "found")
    assert said.code == 0, said.err
    how = (
        "target accuracy ≥ 0.55, as none was given: 90 % of the way from the first score, 0.1, to the best, 0.6, of a "
        "first run of allreduce with seed 1"
    )
    assert how in said.err
    assert how in json.loads(Path("found/table.json").read_text())["fairness"]
    assert how in model.build([Path("found")])["fairness"]  # of the page
    assert "--seeds 2 or more allow for it. The race takes about " in said.err
