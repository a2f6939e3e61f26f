# SPDX-License-Identifier: Apache-2.0
"""What studies share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from experiments import common
from experiments.bounded_delay import __main__ as bounded_delay
from experiments.common import Spread, Study
from experiments.reduction import __main__ as reduction
from experiments.slow_and_stale import __main__ as slow_and_stale
from experiments.slow_and_stale import theory
from experiments.warmup import __main__ as warmup

from orchestra import Epochs, KAsync, KSync, Simulated, recipes
from orchestra.engine.compute_times import ConstantTime, Exponential
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
    record = json.loads((tmp_path / "results.json").read_text())
    assert [claim["holds"] for claim in record["claims"]] == [True, False]
    assert record["rows"][0] == {"variant": "plain", "seed": 0, "score": 1.0, "curve": [1]}
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


# The studies: what they saved must be what they would judge today, and what their pages tell.

Rows = list[dict[str, Any]]


def spoil_warmup(rows: Rows) -> None:
    for row in rows:
        row["accuracy"] -= 8 * (row["variant"] in ("gradual", "LARS")) - 60 * (row["variant"] == "no warm-up")
        row["training loss"] *= 100 if row["variant"] == "gradual" else 1


def spoil_bounded_delay(rows: Rows) -> None:
    for row in rows:
        kind, bound = row["variant"].rsplit(" ", 1)
        row |= {"waiting %": float(bound), "iterations": 99.0 - float(bound), "seconds": 99.0 - float(bound)}
        row |= {"waiting %": 50.0, "iterations": 999.0} if kind == "SSP" else {}


def spoil_reduction(rows: Rows) -> None:
    for row in rows:
        if "apart at most" in row:
            row["apart at most"] = 1.0
        else:
            row |= {"R² mean": 0.7, "R² pooled": 0.8 if row["variant"] == "server 4" else 0.7, "R² worst": 0.7}
            row["R² by room"] = dict.fromkeys(row["R² by room"], 0.1 if row["variant"] == "one_device 2" else 0.7)


def spoil_slow_and_stale(rows: Rows) -> None:
    for row in rows:
        if row["variant"].startswith("race"):
            row |= {figure: 2.0 - (row["variant"] == "race, K = 8") for figure in row if figure.startswith("at ")}
            row |= {"at 1280": 0.5} if row["variant"] == "race, K = 1" else {}
        elif "measured" in row:
            row |= {"measured": 1.03 * row["E[T] at most"], "standard error": row["measured"]}
        else:
            row["apart at most"] = 0.01


STUDIES = [
    pytest.param(study, spoil, id=study.__package__)
    for study, spoil in [
        (warmup, spoil_warmup),
        (bounded_delay, spoil_bounded_delay),
        (reduction, spoil_reduction),
        (slow_and_stale, spoil_slow_and_stale),
    ]
]


def saved(module: ModuleType) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((Path(str(module.__file__)).parent / "results.json").read_text())
    return record


@pytest.mark.parametrize(("module", "spoil"), STUDIES)
def test_a_study_as_saved(module: Any, spoil: Callable[[Rows], None], tmp_path: Path) -> None:
    record = saved(module)
    study = Study(record["title"], tmp_path, rows=record["rows"])
    assert {row["variant"] for row in study.rows} == set(module.VARIANTS)
    module.judge(study)
    assert [vars(claim) for claim in study.claims] == record["claims"]
    assert all(claim.holds for claim in study.claims)
    study.claims.clear()
    spoil(study.rows)
    module.judge(study)
    assert not [claim.words for claim in study.claims if claim.holds]  # each can fail


@pytest.mark.parametrize(("module", "spoil"), STUDIES)
def test_a_study_as_told(module: Any, spoil: Callable[[Rows], None]) -> None:
    folder = Path(module.__file__).parent
    study = Study("as saved", folder, rows=saved(module)["rows"])
    text = (folder / "README.md").read_text()
    assert [line for line in study.table().splitlines() if line not in text] == []
    studies = (folder.parents[1] / "docs" / "studies.md").read_text()
    assert f"[{folder.name}](../experiments/{folder.name}/README.md)" in studies


# What they are made of.


def test_one_worker_at_a_time_is_slow_and_not_always_the_same() -> None:
    delay = bounded_delay.Roaming(ConstantTime(1.0), 8, 3.0, 5)
    slow = [[worker for worker in range(8) if delay.seconds(0, worker, step) == 3.0] for step in range(40)]
    assert all(len(workers) == 1 for workers in slow)
    assert all(slow[step] == slow[step // 5 * 5] for step in range(40))
    assert len({workers[0] for workers in slow}) > 3


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_the_formulas_where_they_are_known_by_other_means(k: int) -> None:
    exponential, shifted = Exponential(0.0, 2.0), Exponential(1.0, 0.5)
    assert theory.kth_end(exponential, k, 8) == pytest.approx(2.0 * k / 8, rel=1e-5)
    assert theory.bounds(KAsync(k=k), exponential, 8) == theory.bounds(KSync(k=k), exponential, 8)
    assert theory.kth_end(shifted, k, 8) <= theory.ordered(shifted, k, 8) + 1e-6  # who may go on is no slower
    drawn = 1.0 - 0.5 * torch.rand(20_000, 8, k, generator=torch.Generator().manual_seed(0)).log()
    ends = drawn.cumsum(2).flatten(1).kthvalue(k).values
    assert theory.kth_end(shifted, k, 8) == pytest.approx(float(ends.mean()), rel=0.01)


def test_an_update_of_k_sync_draw_by_draw() -> None:
    figures = slow_and_stale.measure_draws(3, compute_time=Exponential(0.1, 1.0))
    assert figures["updates"] > 200
    assert figures["apart at most"] < 1e-6


def test_r2_in_three_ways() -> None:
    """Two outputs, one of them ten times as large and nine tenths right."""
    target = torch.tensor([[1.0, 10.0], [-1.0, -10.0]]).repeat(1, 5)[:, :9]
    model = torch.nn.Linear(9, 9, bias=False)
    model.load_state_dict({"weight": torch.diag(torch.tensor([0.0, 0.9] * 5)[:9])})
    found = reduction.scores(model, (target, target))
    assert found["T1"] == pytest.approx(0.0)
    assert found["T2"] == found["R² mean"] * 9 / 4 == pytest.approx(0.99)
    assert found["R² pooled"] == pytest.approx(1 - (5 * 1 + 4 * 1) / (5 * 1 + 4 * 100))
    assert found["R² worst"] == pytest.approx(0.0)


def test_uneven_shards_are_all_there_is() -> None:
    shards = reduction.Uneven().shards(torch.zeros(1001, 9), 4, seed=0)
    assert torch.cat(shards).tolist() == list(range(1001))
    assert [round(len(shard) / 1001 * 15) for shard in shards] == [8, 4, 2, 1]
