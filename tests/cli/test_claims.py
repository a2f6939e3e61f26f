# SPDX-License-Identifier: Apache-2.0
"""Claims about a comparison, its fairness as the folders tell it, and rates tuned alike for all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.test_table import facts, row, table
from typer.testing import CliRunner

from orchestra.cli import claims, fairness, sources, tuning, tuning_results
from orchestra.cli.app import app
from orchestra.cli.options import Options
from orchestra.cli.race import Race
from orchestra.cli.table import Outcome, StrategyRow, judge
from orchestra.errors import ConfigError
from orchestra.report import model
from orchestra.runs.budget import Target

NAMES = ("allreduce", "localsgd(tau=4)", "localsgd(tau=16)", "ps(consistency=asp)")
MADE = table(
    row("allreduce", 4.0, 4.4), row("localsgd(tau=4)", 2.0, 2.2, sent=1e5), row("localsgd(tau=16)", 3.0, None),
    row("ps(consistency=asp)", None, None, stale=2.5),
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("localsgd(tau=4).time < allreduce.time", True),
        ("localsgd(tau=4).time<0.4*allreduce.time", False),
        ("allreduce.time <= 4.2", True),
        ("0.5 * allreduce.bytes >= localsgd(tau=4).bytes", True),
        ("ps.staleness > 2", True),
        ("ps.time < 1000", False),  # it never got there
        ("1000 < ps.time", True),
        ("ps.time <= localsgd(tau=16).time", False),  # nor did the other: unknown
        ("ps.time >= 2 * ps.time", False),
        ("ps.time == localsgd(tau=16).time", False),
        ("allr.time < 5", True),
        ("localsgd(tau=16).time < allreduce.time", False),  # not in every run
        ("localsgd(tau=16).reached == 0.5", True),
        ("allreduce.staleness < 1", False),  # it has none: what is not known is not so
        ("ps(consistency=asp).final >= 8e-1", True),
    ],
)
def test_claims(text: str, holds: bool) -> None:
    claim = claims.parse(text, NAMES)
    assert claim.holds(MADE) is holds
    assert ("DOES NOT HOLD" in claim.told(MADE)) is not holds


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("slowmo.time < allreduce.time", "does not take part"),
        ("localsgd.time < 3", "may be localsgd(tau=4) or localsgd(tau=16)"),
        ("reduce.time < 3", "does not take part"),
        ("allreduce.tme < 3", "did you mean 'time'"),
        ("allreduce < 3", "neither a number nor"),
        ("allreduce.time", "is not a claim"),
        ("__import__('os').system('true') < 3", "neither a number nor"),
        ("", "is not a claim"),
    ],
)
def test_what_is_no_claim_is_refused_before_anything_runs(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        claims.parse(text, NAMES)
    assert complaint in str(caught.value)


@pytest.mark.parametrize("text", ["", "0.1", "0.1,0.1", "0.1,zero", "0.1,-1", "0.1,inf"])
def test_invalid_learning_rates_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="lrs"):
        tuning.read(text)


def tried(out: Path, metric: str, found: dict[float, Outcome], monkeypatch: pytest.MonkeyPatch) -> Race:
    """A race of which the outcomes are known beforehand, by rate."""
    monkeypatch.setattr(Race, "run_one", lambda race, strategy, *_, **__: found[race.settings[strategy].rate])
    monkeypatch.setattr(
        tuning_results, "_curve", lambda outcome, metric: () if outcome.best is None else ((1.0, outcome.best),)
    )
    source = sources.find("digits")
    return Race(source, sources.load(source), ("allreduce",), Options(workers=2), 1, Target(metric, 0.9), out)


FAILED = Outcome(0, Path("none"), failed="it burst")


def outcome(best: float, seconds: float | None = None) -> Outcome:
    return Outcome(0, Path("none"), best=best, seconds=seconds)


@pytest.mark.parametrize(
    ("metric", "found", "best"),
    [
        ("accuracy", {0.1: FAILED, 0.2: outcome(0.3), 0.3: outcome(0.4)}, 0.3),
        ("accuracy", {0.1: outcome(0.0), 0.2: outcome(0.1)}, 0.2),
        ("loss", {0.1: FAILED, 0.2: outcome(0.5), 0.3: outcome(0.0)}, 0.3),
        ("loss", {0.1: outcome(0.1), 0.2: outcome(0.2, 9.0)}, 0.2),
    ],
)
def test_a_rate_that_failed_is_not_the_best(
    metric: str, found: dict[float, Outcome], best: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    race = tried(tmp_path, metric, found, monkeypatch)
    tuned = tuning.Tuning(race, 1, (*found,), quiet=True).run()
    assert {name: setting.rate for name, setting in tuned.settings.items()} == {"allreduce": best}


def test_where_every_rate_failed_there_is_none_to_race_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    race = tried(tmp_path, "loss", {0.1: FAILED, 0.2: FAILED}, monkeypatch)
    with pytest.raises(ConfigError, match="allreduce has a score with none of them: it burst"):
        tuning.Tuning(race, 1, (0.1, 0.2), quiet=True).run()


def test_without_the_baseline_another_is_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison that was stopped early has no row of some."""
    race = replace(tried(tmp_path, "loss", {}, monkeypatch), strategies=("slowmo", "localsgd", "allreduce"))
    outcomes = {"localsgd": [Outcome(0, Path(), seconds=1.0)], "slowmo": [Outcome(0, Path(), seconds=2.0)]}
    assert race.table({**outcomes, "allreduce": []}).baseline == "localsgd"


def test_a_run_of_which_no_score_is_a_number_can_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    race = tried(tmp_path, "loss", {}, monkeypatch)
    assert "loss 0.9 not reached, no score is a number; " in race.told(Outcome(0, Path(), facts=facts("allreduce")))


@pytest.mark.timeout(180)
def test_a_comparison_tuned_alike_and_asserted(tmp_path: Path) -> None:
    """For every strategy a rate far too small loses to a good one; the table, the page and the claims are there."""
    out = tmp_path / "out"
    found = CliRunner().invoke(
        app,
        ["compare", "digits", "--sim", "-n", "2", "-s", "allreduce,localsgd(tau=4)", "--seeds", "2", "--epochs", "1",
         "--target", "accuracy=0.4", "--lrs", "0.0001,0.05", "--network", "5mbit,1ms", "--out", str(out), "-q",
         "--assert", "localsgd.time < allreduce.time", "--assert", "localsgd.bytes > allreduce.bytes"],
    )  # fmt: skip
    assert found.exit_code == 9, found.output
    assert "localsgd.time < allreduce.time: holds" in found.output
    assert "localsgd.bytes > allreduce.bytes: DOES NOT HOLD" in found.output
    tuned = json.loads((out / "tuning.json").read_text())
    assert {name: found["lr"] for name, found in tuned["chosen"].items()} == {
        "allreduce": 0.05,
        "localsgd(tau=4)": 0.05,
    }
    assert tuned["seeds"] == [2, 3]  # none of those that are raced with
    record = json.loads((out / "table.json").read_text())
    fair = " ".join(record["fairness"])
    for point in (
        "same initial parameters",
        "same samples",
        "same budget: 1 epoch",
        "tuned in simulation",
        "each the best of 2 tries, on seeds that no run of it uses",
        "allreduce lr 0.05 (at the edge of the rates tried); localsgd(tau=4) lr 0.05 (at the edge",
    ):
        assert point in fair
    assert not list(out.glob("tuning/*"))
    assert "localsgd" in (out / "report.html").read_text()
    told = model.build([out])
    assert told["fairness"] == record["fairness"]
    assert [told["verdict"]["sentence"], *told["why"]] == [
        text for text in record["learned"] if text not in told["verdict"]["doubts"]
    ]
    assert told["why"]
    # A run that was tampered with is found.
    config = out / "localsgd-tau-4" / "seed1" / "config.json"
    noted = json.loads(config.read_text())
    assert len(noted["samples"]) == 16
    config.write_text(json.dumps(noted | {"samples": "0123456789abcdef"}))
    rows = [
        StrategyRow(name, 2, 0, tuple(judge(out / slug / f"seed{k}", k, MADE.target) for k in range(2)))
        for name, slug in (("allreduce", "allreduce"), ("localsgd(tau=4)", "localsgd-tau-4"))
    ]
    assert "NOT THE SAME samples" in " ".join(fairness.examine(table(*rows)))


def test_what_no_run_says_is_not_called_the_same(tmp_path: Path) -> None:
    def points(**of_the_second: object) -> str:
        """A first run with everything, and a second in which some of it is otherwise, or missing."""
        whole = {
            "initial": "a1", "samples": "b2", "data": "9 samples", "partition": "IID()", "seed": 0, "batch": 8,
            "budget": ["epochs=1"], "optimizer": "SGD [{}]",
        }  # fmt: skip
        second = {name: value for name, value in (whole | of_the_second).items() if value is not None}
        for name, config in (("one", whole), ("two", second)):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
        outcomes = [replace(row(name, 1.0).outcomes[0], run=tmp_path / name) for name in ("one", "two")]
        rows = [StrategyRow(name, 2, 0, (o,)) for name, o in zip(("one", "two"), outcomes, strict=True)]
        return "; ".join(fairness.examine(table(*rows)))

    assert "same initial parameters: equal sums" in points()
    assert "same samples: a sum of some" in points()
    assert "not checked" not in points()
    assert "initial parameters not checked" in points(initial=None)
    assert "samples not checked" in points(samples=None)
    assert "NOT THE SAME samples" in points(samples="c3")
    assert "NOT THE SAME samples" in points(samples=None, batch=9), "one difference is enough"
    assert "budget not checked" in points(budget=None)
    assert "NOT THE SAME budget: 1 epoch; 1 epoch or 4.5 seconds" in points(budget=["epochs=1", "seconds=4.5"])
    assert "NOT THE SAME budget: 1 epoch; epochs=x" in points(budget=["epochs=x"])
    assert "budget not checked" in points(budget="all of it")
    limited = {"budget": ["epochs=1", "seconds=4.5"], "note": {"patience": 4.5}}
    assert "same budget: 1 epoch;" in points(**limited), "when a run is given up follows from the others"
    assert "NOT THE SAME optimizer: Adam, SGD" in points(optimizer="Adam [{}]")
    failed = replace(row("one", 1.0).outcomes[0], facts=None, failed="it broke")
    assert "initial parameters not checked" in "; ".join(fairness.examine(table(StrategyRow("one", 2, 0, (failed,)))))
    points()
    (tmp_path / "two" / "config.json").write_text("[]", encoding="utf-8")
    (tmp_path / "one" / "config.json").unlink()
    outcomes = [replace(row(name, 1.0).outcomes[0], run=tmp_path / name) for name in ("one", "two")]
    said = "; ".join(fairness.examine(table(StrategyRow("one", 2, 0, tuple(outcomes)))))
    assert "same samples" not in said
    assert "samples not checked" in said
