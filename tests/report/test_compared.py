# SPDX-License-Identifier: Apache-2.0
"""What a comparison wrote down is on its page: its baseline, its failures, why, and what was the same for all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.report.folders import make_race, make_run

from orchestra.report import comparison_file, model, tables
from orchestra.runs.budget import Target

RACE = {"localsgd": [0.05, 0.06, 0.05], "slowmo": [0.08, 0.09, 0.07]}
MISSED = "The target was reached in only 2 of 3 runs of slowmo."


def failed(strategy: str, seed: int) -> dict[str, Any]:
    """A row as the table has it, of a comparison made elsewhere."""
    outcome = {"seed": seed, "run": f"/gone/out/{strategy}/seed{seed}", "failed": "it burst", "summary": None}
    return {"strategy": strategy, "outcomes": [{"seed": 0, "run": "x", "failed": None}, outcome]}


def lines(told: dict[str, Any]) -> dict[str, list[str]]:
    return {line[0]: line for line in told["table"]["lines"]}


def test_the_baseline_is_that_of_the_comparison(tmp_path: Path) -> None:
    """And not the first folder by name."""
    told = model.build([make_race(tmp_path / "race", RACE, baseline="slowmo")])
    assert "localsgd reached accuracy ≥ 0.5" in told["verdict"]["sentence"]
    assert "times as fast as slowmo" in told["verdict"]["sentence"]
    assert lines(told)["slowmo"][2] == "1"
    assert "times as fast as slowmo" in tables.legend(told)


def test_between_runs_of_different_things_nothing_is_judged(tmp_path: Path) -> None:
    race = make_race(tmp_path / "race", RACE)
    make_run(tmp_path / "own", note={}, data="1500 samples")
    told = model.build([tmp_path])
    assert told["target"] is None
    assert told["verdict"]["sentence"] == (
        "No verdict, since the runs train different things. Give the folders of one of them. 1500 samples: 1 run, "
        f"such as {tmp_path / 'own'}; digits (data unknown): 6 runs, such as {race / 'localsgd' / 'seed0'}."
    )
    make_run(tmp_path / "own", note={})  # of the same data, by a script's own call
    assert "No verdict" not in model.build([tmp_path])["verdict"]["sentence"]


def test_a_run_that_left_nothing_counts_as_failed(tmp_path: Path) -> None:
    race = make_race(tmp_path / "race", RACE, rows=[failed("slowmo", 2), failed("ps", 1)])
    shutil.rmtree(race / "slowmo" / "seed2")
    told = model.build([race])
    assert told["verdict"]["sentence"].endswith("; no other did in every run.")
    assert told["verdict"]["doubts"] == ["The target was reached in only 0 of 1 run of ps and 2 of 3 runs of slowmo."]
    assert [lines(told)[name][4] for name in ("localsgd", "slowmo", "ps")] == ["3/3", "2/3", "0/1"]
    assert lines(told)["ps"][1] == "failed"
    assert len({len(line) for line in [told["table"]["head"], *told["table"]["lines"]]}) == 1
    assert {r["name"]: r["why"] for r in told["refused"]} == {
        str(race / "slowmo" / "seed2"): "it failed: it burst",
        str(race / "ps" / "seed1"): "it failed: it burst",
    }
    assert {s["name"] for s in told["strategies"]} == {"localsgd", "slowmo", "ps"}
    part = model.build([race / "localsgd"])
    assert part["refused"] == []
    assert "nothing to compare" in part["verdict"]["sentence"]


def test_what_failed_after_the_target_failed_and_is_no_longer_going_on(tmp_path: Path) -> None:
    race = make_race(tmp_path / "race", RACE, rows=[failed("slowmo", 2)])
    ending = race / "slowmo" / "seed2" / "ending.json"
    ending.unlink()
    told = model.build([race])
    assert not told["verdict"]["sentence"].startswith("So far")
    assert told["verdict"]["doubts"] == [MISSED]
    (run,) = [run for run in told["runs"] if run["failed"]]
    assert (run["failed"], run["reached"]) == ("it burst", None)
    # Once it is resumed to its end it is a run like any other.
    ending.write_text(json.dumps({"stopped_by": "budget"}), encoding="utf-8")
    assert model.build([race])["verdict"]["doubts"] == []


def test_the_page_ranks_as_the_terminal_does(tmp_path: Path) -> None:
    """Reached sometimes comes before never."""
    race = make_race(tmp_path / "race", RACE | {"allreduce": [0.1, 0.1, 0.1]})
    for folder in ("allreduce/seed0", "allreduce/seed1", "allreduce/seed2", "localsgd/seed1"):
        (race / folder / "scores.jsonl").write_text("", encoding="utf-8")
    told = lines(model.build([race]))
    assert list(told) == ["slowmo", "localsgd", "allreduce"]
    assert told["allreduce"][2] == "-", "who never came is no measure for the others"


def test_why_and_what_was_fair_are_told_once(tmp_path: Path) -> None:
    words = {"learned": ["localsgd won.", "It sent less.", MISSED], "fairness": ["same samples: all"]}
    race = make_race(tmp_path / "race", RACE, **words)
    (race / "slowmo" / "seed2" / "scores.jsonl").write_text("", encoding="utf-8")
    told = model.build([race])
    assert told["verdict"]["doubts"] == [MISSED]
    assert (told["why"], told["fairness"]) == (["It sent less."], ["same samples: all"])
    assert "## Why\n\n- It sent less.\n\n## Fairness\n\n- same samples: all" in tables.markdown(told)
    for other in (
        model.build([race], target=Target("accuracy", 0.4)),
        model.build([race / "localsgd"]),
    ):
        assert (other["why"], other["fairness"]) == ([], []), "of other runs, or of another target"
    both = model.build([race, make_race(tmp_path / "more", {"ps": [0.1]}, **words)])
    assert (both["why"], both["fairness"]) == ([], ["same samples: all"]), "what holds for both comparisons"


@pytest.mark.parametrize(
    "record",
    [
        {"rows": 3, "learned": "x", "fairness": {"a": 1}, "baseline": []},
        {"rows": [3, {}, {"outcomes": [None, {"failed": 3}]}], "learned": [None], "fairness": [[]]},
        {"rows": [{"strategy": "ps", "outcomes": [{"failed": "so", "seed": "1", "run": "r"}]}]},
    ],
)
def test_a_table_may_hold_anything(record: dict[str, Any], tmp_path: Path) -> None:
    race = make_race(tmp_path / "race", RACE, **record)
    races = comparison_file.ComparisonFiles([race], [race / "allreduce" / "seed0"])
    found = races.whole(races.target)
    assert found is not None
    assert (found.learned, found.fairness, found.failures) == ((), (), ())
    assert races.baseline is None
    assert model.build([race])["refused"] == []
