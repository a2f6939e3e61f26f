# SPDX-License-Identifier: Apache-2.0
"""What studies share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from experiments import common
from experiments.common import Spread, Study
from experiments.warmup import __main__ as warmup

from orchestra import Epochs, Simulated, recipes
from orchestra.errors import Diverged


def made(folder: Path) -> Study:
    study = Study("A study", folder)
    study.run(
        {"plain": lambda seed: {"score": 1.0 + seed, "curve": [1]}, "other": lambda seed: {"score": 9.0, "curve": []}},
        seeds=range(3),
    )
    return study


def test_rows_spreads_and_the_table(tmp_path: Path) -> None:
    study = made(tmp_path)
    assert [(row["variant"], row["seed"]) for row in study.rows][:3] == [("plain", 0), ("other", 0), ("plain", 1)]
    assert study["plain", "score"] == Spread((1.0, 2.0, 3.0))
    assert str(study["plain", "score"]) == "2 ± 1 (1 to 3)"
    assert Spread((4.0,)).deviation == 0
    assert study.table().splitlines() == [
        "| variant | score |", "|---|---|", "| plain | 2 ± 1 (1 to 3) |", "| other | 9 ± 0 (9 to 9) |",
    ]  # fmt: skip


def test_the_status_tells_whether_all_claims_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = made(tmp_path)
    study.expect("it is so", True, gap=0.5)
    assert study.conclude() == 0
    study.expect("it is otherwise", False)
    assert study.conclude() == 1
    said = capsys.readouterr().out
    assert "holds: it is so (gap 0.5)" in said
    assert "FAILS: it is otherwise" in said
    saved = json.loads((tmp_path / "results.json").read_text())
    assert [claim["holds"] for claim in saved["claims"]] == [True, False]
    assert saved["rows"][0] == {"variant": "plain", "seed": 0, "score": 1.0, "curve": [1]}
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_figures_of_several_kinds_make_several_tables(tmp_path: Path) -> None:
    study = Study("A study", tmp_path / "new" / "folder")
    study.run({"timed": lambda seed: {"seconds": 2.0}, "trained": lambda seed: {"score": 1.0 * seed}}, seeds=[1, 1])
    assert study.table().splitlines() == [
        "| variant | seconds |", "|---|---|", "| timed | 2 ± 0 (2 to 2) |", "",
        "| variant | score |", "|---|---|", "| trained | 1 ± 0 (1 to 1) |",
    ]  # fmt: skip
    study.conclude()
    assert (tmp_path / "new" / "folder" / "results.json").exists()


def test_a_run_that_diverges_has_the_figures_given_for_it(tmp_path: Path) -> None:
    def diverge(seed: int) -> dict[str, float]:
        raise Diverged("it did")

    study = Study("A study", tmp_path)
    study.run({"bad": diverge}, [0], diverged={"score": 0.1})
    assert study["bad", "score"].mean == 0.1
    with pytest.raises(Diverged):
        study.run({"bad": diverge}, [0])


def test_a_recipe_is_trained_with_other_arguments() -> None:
    result, scores = common.train(recipes.get("digits"), cluster=Simulated(workers=2), budget=Epochs(2), seed=3)
    assert result.summary.workers == 2
    assert result.summary.seed == 3
    assert len(scores) == 4  # at first, after each epoch, at the end
    assert scores[-1].metrics == result.metrics
    assert not result.run.exists()


# The studies: what they saved must be what they would judge today.


def test_warm_up_as_saved(tmp_path: Path) -> None:
    saved = json.loads((Path(warmup.__file__).parent / "results.json").read_text())
    study = Study(saved["title"], tmp_path, rows=saved["rows"])
    assert {row["variant"] for row in study.rows} == set(warmup.VARIANTS)
    warmup.judge(study)
    assert [vars(claim) for claim in study.claims] == saved["claims"]
    assert all(claim.holds for claim in study.claims)
    for row in study.rows:
        row["accuracy"] -= 8 * (row["variant"] in ("gradual", "LARS")) - 60 * (row["variant"] == "no warm-up")
        row["training loss"] *= 100 if row["variant"] == "gradual" else 1
    warmup.judge(study)
    assert not any(claim.holds for claim in study.claims[4:])  # each can fail


def test_warm_up_as_told() -> None:
    folder = Path(warmup.__file__).parent
    study = Study("as saved", folder, rows=json.loads((folder / "results.json").read_text())["rows"])
    text = (folder / "README.md").read_text()
    assert all(line in text for line in study.table().splitlines())
