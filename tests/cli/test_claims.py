# SPDX-License-Identifier: Apache-2.0
"""Claims about a comparison, its fairness as the folders tell it, and rates tuned alike for all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.test_table import facts, row, table
from typer.testing import CliRunner

from orchestra.budget import Target
from orchestra.cli import claims, sources, tuning
from orchestra.cli.app import app
from orchestra.cli.compare import Race
from orchestra.cli.options import Options
from orchestra.cli.table import Outcome
from orchestra.errors import ConfigError
from orchestra.report import story

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
        ("ps.time <= localsgd(tau=16).time", False),  # nor did the other: nobody knows
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
        ("allreduce.time", "is no claim"),
        ("__import__('os').system('true') < 3", "neither a number nor"),
        ("", "is no claim"),
    ],
)
def test_what_is_no_claim_is_refused_before_anything_runs(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        claims.parse(text, NAMES)
    assert complaint in str(caught.value)


@pytest.mark.parametrize("text", ["", "0.1", "0.1,0.1", "0.1,zero", "0.1,-1", "0.1,inf"])
def test_rates_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="lrs"):
        tuning.read(text)


def tried(out: Path, metric: str, found: dict[float, Outcome], monkeypatch: pytest.MonkeyPatch) -> Race:
    """A race of which the outcomes are known beforehand, by rate."""
    monkeypatch.setattr(Race, "run_one", lambda race, strategy, *_, **__: found[race.rates[strategy]])
    source = sources.find("digits")
    return Race(source, sources.load(source), ("allreduce",), Options(workers=2), 1, Target(metric, 0.9), out)


FAILED = Outcome(0, Path(), failed="it burst")


@pytest.mark.parametrize(
    ("metric", "found", "best"),
    [
        ("accuracy", {0.1: FAILED, 0.2: Outcome(0, Path(), best=0.3), 0.3: Outcome(0, Path(), best=0.4)}, 0.3),
        ("accuracy", {0.1: Outcome(0, Path(), best=0.0), 0.2: Outcome(0, Path(), best=0.1)}, 0.2),
        ("loss", {0.1: FAILED, 0.2: Outcome(0, Path(), best=0.5), 0.3: Outcome(0, Path(), best=0.0)}, 0.3),
        ("loss", {0.1: Outcome(0, Path(), best=0.1), 0.2: Outcome(0, Path(), seconds=9.0, best=0.2)}, 0.2),
    ],
)
def test_a_rate_that_failed_is_not_the_best(
    metric: str, found: dict[float, Outcome], best: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    race = tried(tmp_path, metric, found, monkeypatch)
    assert tuning.tune(race, (*found,), quiet=True).rates == {"allreduce": best}


def test_where_every_rate_failed_there_is_none_to_race_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    race = tried(tmp_path, "loss", {0.1: FAILED, 0.2: FAILED}, monkeypatch)
    with pytest.raises(ConfigError, match="with none of them does allreduce come to a score: it burst"):
        tuning.tune(race, (0.1, 0.2), quiet=True)


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
    """A rate far too small loses to a good one, for everybody; the table, the page and the claims are there."""
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
    assert tuned["chosen"] == {"allreduce": 0.05, "localsgd(tau=4)": 0.05}
    assert tuned["seed"] == 2  # not one of those that are raced with
    record = json.loads((out / "table.json").read_text())
    fair = " ".join(record["fairness"])
    for point in (
        "same initial parameters",
        "same samples",
        "same budget: epochs=1",
        "0.05 for all, each the best of 2",
    ):
        assert point in fair
    assert not list(out.glob("tuning/*"))
    assert "localsgd" in (out / "report.html").read_text()
    told = story.tell([out])
    assert told["fairness"] == record["fairness"]
    assert [told["verdict"]["sentence"], *told["why"]] == [
        text for text in record["learned"] if text not in told["verdict"]["doubts"]
    ]
    assert told["why"]
    # Whoever tampers with a run is found out.
    config = out / "localsgd-tau-4" / "seed1" / "config.json"
    config.write_text(config.read_text().replace('"batch": ', '"batch": 1'))
    from orchestra.cli import fairness
    from orchestra.cli.table import Row, Table, judge

    assert isinstance(MADE, Table)
    rows = [
        Row(name, 2, 0, tuple(judge(out / slug / f"seed{k}", k, MADE.target) for k in range(2)))
        for name, slug in (("allreduce", "allreduce"), ("localsgd(tau=4)", "localsgd-tau-4"))
    ]
    assert "NOT THE SAME samples" in " ".join(fairness.examine(table(*rows), {}, 0))
