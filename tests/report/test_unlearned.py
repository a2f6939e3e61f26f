# SPDX-License-Identifier: Apache-2.0
"""What tables and pages say of runs that did not learn, of the initial model, of ages and of names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_table import facts, table
from tests.report.folders import make_race, make_run

from orchestra.cli import summary, sweep
from orchestra.cli.lessons import verdict
from orchestra.cli.recommend import _missed
from orchestra.cli.table import Outcome, StrategyRow
from orchestra.live.follower import Follower
from orchestra.report import model, tables
from orchestra.runs import reading
from orchestra.runs.budget import Target
from orchestra.runs.events import Logged, Scored, encode

STALE = "did not learn (rate too large for stale gradients?)"
LABELS = {"classes": 10, "count": 360, "largest": 0.1}


def lost_row(strategy: str = "ps(consistency=asp)", seeds: int = 2, *, lost: int = 2) -> StrategyRow:
    """Some runs that did not learn, and others that came to the target."""

    def outcome(seed: int) -> Outcome:
        if seed >= lost:
            return Outcome(seed, Path("run"), 3.0, 2.9, 0.95, 0.95, facts(strategy, stale=2.5))
        told = replace(facts(strategy, stale=2.5), learned=False, unlearned=STALE, why_unlearned="It did not.")
        return Outcome(seed, Path("run"), None, 0.0, 0.1, 0.1, told)

    return StrategyRow(strategy, 2, 1, tuple(map(outcome, range(seeds))))


def good_row() -> StrategyRow:
    return StrategyRow(
        "allreduce", 2, 0, tuple(Outcome(s, Path("r"), 4.0, 3.9, 0.95, 0.95, facts("allreduce")) for s in (0, 1))
    )


def test_the_table_of_a_comparison_says_it_and_not_a_bare_score() -> None:
    made = table(good_row(), lost_row())
    cells = made.cells(made.ranked[-1])
    assert STALE in cells
    assert cells[-1] == "0.1 ‡"
    narrow = made.cells(made.ranked[-1], narrow=True)
    assert "did not learn" in narrow
    assert narrow[-1] == "0.1 ‡"
    assert f"‡ ps(consistency=asp) {STALE}." in made.notes()
    assert STALE.replace("(", r"\\(")[:13] in made.markdown()
    assert made.as_record()["rows"][-1]["unlearned"] == STALE
    assert made.as_record()["rows"][0]["unlearned"] is None
    words = " ".join(verdict(made, cores=8))
    assert f"ps(consistency=asp) {STALE}." in words
    assert "updates old on average" not in words, "said already"
    assert "0.1" not in words


def test_some_runs_that_did_not_learn_are_counted() -> None:
    made = table(good_row(), lost_row(lost=1))
    assert "‡ ps(consistency=asp) did not learn in 1 of 2 runs (rate too large for stale gradients?)." in made.notes()
    assert made.cells(made.ranked[-1])[3] == "3.00 s *"


def test_where_nothing_learned_another_rate_is_advised() -> None:
    words = verdict(table(lost_row()), cores=8)
    assert words[:2] == ["No strategy reached accuracy ≥ 0.9, and none learned anything.", "Give another --lr."]


def test_sweeps_recommendations_and_summaries_say_it(tmp_path: Path) -> None:
    made = table(good_row(), lost_row())
    assert sweep.Condition((("workers", "2"),), made).cell("ps(consistency=asp)") == "did not learn"
    assert _missed(made, made.ranked[-1]) == STALE
    lost = made.ranked[-1].done[0]
    assert f" · {STALE}" in summary.describe(make_run(tmp_path), lost)


def unlearned_run(path: Path, strategy: str = "ps(consistency=asp)", **more: Any) -> Path:
    return make_run(path, strategy, servers=1, steps=60, accuracy=0.1, labels=LABELS, **more)


@pytest.mark.parametrize("target", [Target("accuracy", 0.5), None])
def test_the_page_says_it_in_the_table_the_doubts_and_the_exports(target: Target | None, tmp_path: Path) -> None:
    unlearned_run(tmp_path / "a")
    make_run(tmp_path / "b", steps=60, labels=LABELS)
    told = model.build([tmp_path], target=target)
    words = "did not learn (rate too small, or too few steps?)"  # its made-up loss never rose
    assert {run["strategy"]: run["learned"] for run in told["runs"]} == {
        "ps(consistency=asp)": False,
        "allreduce": True,
    }
    line = next(line for line in told["table"]["lines"] if line[0].startswith("ps"))
    assert any(words in cell for cell in line)
    assert "0.1" not in line
    assert f"ps(consistency=asp) {words}." in told["verdict"]["doubts"]
    assert "did not learn" in tables.markdown(told)
    head, *lines = (line.split(",") for line in tables.runs_csv(told).splitlines())
    assert [line[head.index("learned")] for line in lines] == ["False", "True"]


# The initial model.


def test_the_score_of_the_initial_model_is_no_result(tmp_path: Path) -> None:
    make_run(tmp_path / "run", over=False)
    initial = encode(Scored(0.0, 0, 0, 0, {"accuracy": 0.07, "loss": 2.3}))
    (tmp_path / "run" / "scores.jsonl").write_text(initial, encoding="utf-8")
    for target in (None, Target("accuracy", 0.9)):
        told = model.build([tmp_path], target=target)
        assert told["runs"][0]["metrics"] == {}
        assert told["runs"][0]["best"] is None
        assert told["runs"][0]["final"] is None
        assert told["verdict"]["sentence"].startswith("So far: no trained model was scored yet; allreduce went through")
        assert "0.07" not in str(told["table"]) + str(told["verdict"])
        assert told["runs"][0]["scores"]["metrics"]["accuracy"] == [0.07], "where the curve begins"


# Two figures with two units.


def test_reports_do_not_call_two_figures_staleness(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "ps(consistency=ssp(staleness=2))", servers=1)
    told = model.build([tmp_path])
    assert "gradient age (updates)" in told["table"]["head"]
    page = tables.markdown(told)
    assert "taleness" not in page.replace("staleness=2", "").replace("ssp\\(staleness", "")
    made = table(good_row(), lost_row())
    assert "age (updates)" in made.columns()
    assert "taleness" not in made.markdown()
    assert "  gradients were 1.0 updates old on average, 2 at most" in summary.describe(
        tmp_path / "run", reading.load(tmp_path / "run").facts
    )


def test_the_age_of_gradients_is_not_mixed_with_steps_ahead(tmp_path: Path) -> None:
    run = make_run(tmp_path, "ps(consistency=ssp(staleness=2))", servers=1)
    with (run / "events-2.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(encode(Logged(3.0, 2, 40, name, 7.0)) for name in ["staleness"] + ["gap"] * 40)
    follower = Follower(run)
    follower.look()
    seen = [*follower.nodes[2].stale]
    assert seen[-1] == 7.0
    assert seen.count(7.0) == 1


# Names.


def test_a_title_holds_no_path(tmp_path: Path) -> None:
    script = str(tmp_path / "train.py")
    make_run(tmp_path / "mine", note={"recipe": script, "args": [], "options": {}})
    assert model.build([tmp_path / "mine"])["title"] == "train.py: allreduce, 2 workers"
    make_run(tmp_path / "own", note={})
    assert model.build([tmp_path / "own"])["title"] == "own: allreduce, 2 workers"
    race = make_race(tmp_path / "race", {"allreduce": [0.1], "slowmo": [0.2]})
    assert model.build([race])["title"] == "digits: 2 strategies, 2 workers"
    assert json.dumps(str(tmp_path))[1:-1] not in model.build([tmp_path / "mine"])["title"]
