# SPDX-License-Identifier: Apache-2.0
"""The study of Strategy-Switch: what it saved is what it would judge today, and its parts do what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.common import Study
from experiments.strategy_switch import __main__ as switching
from experiments.strategy_switch import choose, papers, setting, tune

from orchestra import AtShare, Plateau

FOLDER = Path(switching.__file__).parent
SHOWN = ("accuracy", "seconds")


def saved(folder: str = "papers") -> dict[str, Any]:
    record: dict[str, Any] = json.loads((FOLDER / folder / "results.json").read_text())
    return record


# The worst of twenty.


def made(behind: list[float], *, seconds: float = 600.0, switched: float | None = 30.0) -> Study:
    """All-reduce at 90 %, and runs that end so many points behind it, seen at their end only."""
    study = Study("made up", FOLDER)
    for seed, points in enumerate(behind, start=switching.FIRST):
        for variant, accuracy, end in (("all-reduce", 90.0, 1200.0), ("rule", 90.0 - points, seconds)):
            figures = {"accuracy": accuracy, "seconds": end, "curve": [[end, 480_000, accuracy]]}
            study.rows.append({"variant": variant, "seed": seed, "synchronous": switched, **figures})
    switching.judge(study)
    return study


def test_a_single_run_that_collapses_fails_it() -> None:
    assert all(claim.holds for claim in made([0.3] * 20).claims)
    study = made([0.1] * 19 + [6.3])
    (failed,) = (claim for claim in study.claims if not claim.holds)
    assert failed.words.startswith("no run ends more than 1 point behind")
    assert failed.figures["worst"] == 6.3
    assert "| 219 | 90.00 | 83.70 | 6.30 | 2.00 | 30 % |" in switching.seed_by_seed(study)


def test_a_median_a_slow_and_a_late_run_fail_it() -> None:
    assert [claim.holds for claim in made([0.5] * 20).claims] == [True, False, True, True, True]
    assert [claim.holds for claim in made([0.0] * 20, seconds=900.0).claims] == [True, True, False, False, True]
    assert [claim.holds for claim in made([0.0] * 20, switched=None).claims] == [True, True, True, True, False]


def test_the_judgement_is_as_saved_and_as_told() -> None:
    record = saved(".")
    study = Study(record["title"], FOLDER, rows=record["rows"])
    assert {(row["variant"], row["seed"]) for row in study.rows} == {
        (variant, seed) for variant in switching.VARIANTS for seed in range(switching.FIRST, switching.FIRST + 20)
    }
    switching.judge(study)
    assert [vars(claim) for claim in study.claims] == record["claims"]
    text = (FOLDER / "README.md").read_text()
    assert all(line in text for line in switching.seed_by_seed(study).splitlines())


def test_the_choice_was_made_on_other_seeds() -> None:
    record = saved("choosing")
    assert {row["variant"] for row in record["rows"]} <= {*choose.VARIANTS}
    assert {row["seed"] for row in record["rows"]} <= {*choose.SEEDS}
    assert not {*choose.SEEDS} & {*range(switching.FIRST, switching.FIRST + 20)}


# What the papers compare.


def test_papers_study_gives_the_saved_claims() -> None:
    record = saved()
    study = Study(record["title"], FOLDER, rows=record["rows"])
    assert {row["variant"] for row in study.rows} == {*papers.VARIANTS, *papers.NEVER}
    papers.judge(study)
    assert [vars(claim) for claim in study.claims] == record["claims"]
    (failed,) = (claim for claim in study.claims if not claim.holds)  # told in the README
    assert failed.words.startswith("the rule fires in every run")


def worse(row: dict[str, Any], figure: str, by: float, *variants: str) -> None:
    row[figure] += by * (row["variant"] in variants)


def test_every_claim_can_fail() -> None:
    study = Study("otherwise", FOLDER, rows=saved()["rows"])
    for row in study.rows:
        worse(row, "accuracy", -20, "rule", "rule, momenta reset", "25 %", "50 %", "promoted")
        worse(row, "accuracy", 5, "asynchronous")
        worse(row, "accuracy", 80, "rate kept")
        worse(row, "accuracy", 1, *papers.NEVER)
        worse(row, "seconds", 500, "25 %")
        if row["variant"] in ("rule", "rule, momenta reset"):
            row["curve"] = []
        row["synchronous"] = 3.0
    papers.judge(study)
    assert not any(claim.holds for claim in study.claims), [str(claim) for claim in study.claims if claim.holds]


def test_every_claim_can_hold() -> None:
    study = Study("as the papers have it", FOLDER, rows=saved()["rows"])
    scored = {"asynchronous": 86.0, "asynchronous first": 86.0, "5 %": 87.0, "rate kept": 10.0}
    for row in study.rows:
        row["accuracy"] = scored.get(row["variant"], 90.0)
        row["seconds"] = 40 + 60 * papers.SWEEP.get(row["variant"], 0.3)
        row["curve"] = [[100 if row["variant"] == "all-reduce" else 60, 1, 90.0]]
        row["synchronous"] = 25.0
    papers.judge(study)
    assert all(claim.holds for claim in study.claims), [str(claim) for claim in study.claims if not claim.holds]


def test_papers_readme_quotes_the_saved_tables() -> None:
    study = Study("as saved", FOLDER, rows=saved()["rows"])
    text = (FOLDER / "README.md").read_text()
    assert all(line in text for line in [*study.table(SHOWN).splitlines(), *papers.sweep(study).splitlines()])
    tuned = Study("tuned", FOLDER, rows=json.loads((FOLDER / "tuning" / "results.json").read_text())["rows"])
    for name, (_, _, rates) in tune.GRID.items():
        figures = [f"{lr:g}: {tuned[f'{name}, {lr:g}', 'accuracy'].mean:.2f}" for lr in rates]
        assert f"| {name} | {' | '.join(figures)} |" in text


def test_the_rates_are_the_best_of_those_tried() -> None:
    tuned = Study("tuned", FOLDER, rows=json.loads((FOLDER / "tuning" / "results.json").read_text())["rows"])
    chosen = (setting.GAMMA, setting.ALONE, setting.PLAIN)
    for (name, (_, _, rates)), lr in zip(tune.GRID.items(), chosen, strict=True):
        assert max(rates, key=lambda r: tuned[f"{name}, {r:g}", "accuracy"].mean) == pytest.approx(lr), name


def test_race_counts_the_first_to_reach_the_accuracy_by_the_mean() -> None:
    """By the mean of the seeds: b is there on average only, c with one seed of two, d was lost once."""
    ar = [[0, 0, 10], [8, 1, 79.5], [10, 2, 80]]
    curves = {"rule": ([[4, 1, 79.0]], [[4, 1, 80.0]]), "5 %": ([[9, 1, 79.6]], [[9, 1, 79.3]]), "10 %": ([], ar)}
    rows = [{"variant": v, "seed": s, "curve": curves.get(v, (ar, ar))[s]} for v in papers.VARIANTS for s in (0, 1)]
    sooner = setting.race(Study("a race", FOLDER, rows=rows), papers.VARIANTS)
    assert (sooner["rule"], sooner["5 %"], sooner["10 %"], sooner["all-reduce"]) == (2.0, 0.0, 0.0, 1.0)


def test_a_run_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On noise: Fashion-MNIST may not be there."""

    def noise(split: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        g = torch.Generator().manual_seed(count)
        return torch.randn(256, 1, 28, 28, generator=g), torch.randint(10, (256,), generator=g)

    monkeypatch.setattr(setting, "images", noise)
    halved = setting.measure(0, strategy=setting.Switch(when=AtShare(share=0.5)))
    assert halved["synchronous"] == 50.0
    assert halved["missing"] is None
    assert halved["staleness"] > 0
    assert [samples for _, samples, _ in halved["curve"]][-1] == 8 * 256
    rounds = setting.measure(0, strategy=setting.Switch(when=Plateau(window=2, threshold=0.0)))
    assert rounds["synchronous"] is None
    assert "NEVER SWITCHED" in rounds["missing"]
    assert len(rounds["s"]) == 7  # eight epochs
