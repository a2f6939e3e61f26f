# SPDX-License-Identifier: Apache-2.0
"""The file of scores stays small however many there are, and keeps those that matter."""

from __future__ import annotations

import math
import os
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tests.core.test_scoring import SCORED
from tests.zoo import train

from orchestra import AllReduce, Steps
from orchestra.runs import score_file
from orchestra.runs.events import Scored
from orchestra.runs.facts import scores_of


def scores(count: int) -> list[Scored]:
    """Losses that fall and accuracies that rise, with one of each out of line."""
    found = [Scored(k / 10, k, 8 * k, k, {"loss": 1 / (k + 1), "accuracy": 1 - 1 / (k + 1)}) for k in range(count)]
    found[count // 3].metrics["loss"] = 1e-9
    found[count // 2].metrics["accuracy"] = 0.9999999
    found[count // 5].metrics["loss"] = math.nan
    return found


def test_scores_stay_below_their_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the last stay, the best of each figure, and samples between them."""
    monkeypatch.setattr(score_file, "LIMIT", 50_000)
    file, given, sizes = score_file.ScoreFile(tmp_path), scores(3000), []
    for score in given:
        file.append(score)
        sizes.append((tmp_path / "scores.jsonl").stat().st_size)
    assert max(sizes) <= 50_000
    assert sum(a > b for a, b in pairwise(sizes)) > 3
    kept = scores_of(tmp_path)
    assert (kept[0], kept[-1]) == (given[0], given[-1])
    assert {1000, 1500} <= {score.number for score in kept}
    assert {*(score.number // 300 for score in kept)} == {*range(10)}  # no tenth of the run is without samples
    assert not (tmp_path / "scores.jsonl.tmp").exists()


def test_scores_of_kept_snapshots_all_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_file, "LIMIT", 1000)
    file = score_file.ScoreFile(tmp_path, thin=False)
    for score in scores(100):
        file.append(score)
    assert len(scores_of(tmp_path)) == 100


def test_without_room_for_a_second_file_all_scores_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_file, "LIMIT", 2000)
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(28, "No space left on device")))
    file = score_file.ScoreFile(tmp_path)
    for score in scores(100):
        file.append(score)
    assert [score.number for score in scores_of(tmp_path)] == [*range(100)]
    assert os.fsync.call_count < 20  # type: ignore[attr-defined]


def test_a_run_thins_its_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_file, "LIMIT", 3000)
    given: dict[str, Any] = {"evaluate_every": Steps(1), "checkpoint_every": Steps(20), "workers": 2, **SCORED}
    result = train(AllReduce(), tmp_path, budget=Steps(60), **given)
    assert (tmp_path / "scores.jsonl").stat().st_size <= 3000
    kept = scores_of(tmp_path)
    assert (kept[0].step, kept[-1].step) == (0, 60)
    assert 5 < len(kept) < 40
    assert result.summary.metrics == kept[-1].metrics
    resumed = train(AllReduce(), tmp_path, budget=Steps(70), resume=True, **given)
    assert resumed.summary.steps == 70
    assert (scores_of(tmp_path)[0].step, scores_of(tmp_path)[-1].step) == (0, 70)
