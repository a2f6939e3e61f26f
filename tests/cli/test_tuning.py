# SPDX-License-Identifier: Apache-2.0
"""Every strategy is tuned with equally many tries, on other seeds; the best setting is chosen."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.conftest import Orchestra
from tests.cli.tunings import QUICK, best_at, made

from orchestra.cli import compare, fairness, sources, tuning
from orchestra.cli.candidates import Setting, grid, settings
from orchestra.cli.options import Options
from orchestra.cli.tuning import Tuning
from orchestra.cli.tuning_results import TuningResult, is_lost, rank
from orchestra.errors import ConfigError
from orchestra.model.adjusted_optimizer import Adjusted
from orchestra.report import model
from orchestra.strategies.catalogue import ROWS

EVERY = sorted({text for row in ROWS for text in (*row.search_space, row.short or row.name)})


# What is tried.


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("fixed", [True, False])
def test_all_strategies_have_equally_many_different_tries(momentum: float, fixed: bool) -> None:
    tries = 12
    for text in EVERY:
        found = settings(text, fixed=fixed, own=0.1, momentum=momentum)
        assert len({*grid(found, tries)}) == tries, text
        for side in (-1, 1):
            assert len({*grid(found, tries, side)} - {*grid(found, tries)}) == tries // 2, text
        assert any(setting.rate == pytest.approx(0.1) and setting.momentum is None for setting in grid(found, tries))


def test_asynchronous_strategies_are_tried_without_momentum_as_well() -> None:
    asp = settings("ps(consistency=asp)", fixed=False, own=0.1, momentum=0.9)
    assert {setting.momentum for setting in asp} == {None, 0.0}
    assert all(s.momentum is None for s in settings("allreduce", fixed=False, own=0.1, momentum=0.9))
    assert all(s.momentum is None for s in settings("ps(consistency=asp)", fixed=False, own=0.1, momentum=0.0))


@pytest.mark.parametrize(
    ("text", "tuned"), [("localsgd", True), ("localsgd(tau=8)", False), ("slowmo(beta=0.5)", True)]
)
def test_an_option_that_was_given_stays(text: str, tuned: bool) -> None:
    race = compare.prepare(sources.find("digits"), [text], Options(workers=2, sim=True), 3, None, Path("nowhere"))
    (name,) = race.strategies
    found = settings(name, fixed=name in race.fixed, own=0.1, momentum=0.9)
    assert len({setting.strategy for setting in found}) == (3 if tuned else 1)


# Which is best.


def test_sooner_at_the_target_is_better_and_then_the_score_at_one_time() -> None:
    slow, fast, near, far, lost = (Setting(name) for name in ("slow", "fast", "near", "far", "lost"))
    found = {
        far: TuningResult(curve=((1.0, 0.3), (9.0, 0.9))),  # better in the end, but that is later than all others ended
        lost: TuningResult(failed="Diverged"),
        slow: TuningResult(seconds=4.0, curve=((1.0, 0.1), (4.0, 0.95))),
        near: TuningResult(curve=((1.0, 0.5), (3.0, 0.6))),
        fast: TuningResult(seconds=2.0, curve=((1.0, 0.1), (2.0, 0.95))),
    }
    assert rank(found, -1) == [fast, slow, near, far]
    assert rank(found, -1, whole=True) == [fast, slow, far, near]


def test_what_collapses_after_the_target_is_worse_than_what_never_reaches_it() -> None:
    wild, tame = Setting("wild"), Setting("tame")
    found = {wild: TuningResult(2.0, ((2.0, 0.95),), collapsed=True), tame: TuningResult(curve=((2.0, 0.5),))}
    assert rank(found, -1) == [tame, wild]


@pytest.mark.parametrize(
    ("scores", "lost"),
    [
        ((0.1, 0.9, 0.95, 0.92), False),
        ((0.1, 0.9, 0.6), False),
        ((0.1, 0.9, 0.4), True),
        ((0.1,), False),
        ((0.5, 0.4, 0.3), False),  # it has never gained anything
    ],
)
def test_a_run_that_loses_over_half_its_gain_counts_as_collapsed(scores: tuple[float, ...], lost: bool) -> None:
    assert is_lost([-score for score in scores]) is lost


@pytest.mark.parametrize(("largest", "rate"), [(1.5, 1.2814), (0.05, 0.5695)], ids=["some collapse", "all collapse"])
def test_the_last_rung_goes_on_after_the_target(largest: float, rate: float, tmp_path: Path) -> None:
    """The largest rate is the first at the target, and has lost it some epochs later."""
    tuned, asked = made(best_at(0.1), ("allreduce",), tmp_path), list[tuple[float, str | None]]()

    def one(setting: Setting, epochs: float, seed: int, *, whole: bool = False) -> TuningResult:
        asked.append((epochs, tuned._race_of(setting, epochs, whole=whole).shared.target))
        return TuningResult(1 / setting.rate, ((1.0, 0.9),), collapsed=whole and setting.rate > largest)

    tuned._one = one  # type: ignore[method-assign]
    chosen = tuned.run().settings["allreduce"]
    assert {*asked} == {(tuned.plan.first, "accuracy=0.95"), (3 * tuned.plan.first, None)}
    assert chosen.rate == pytest.approx(rate, rel=1e-3)  # of 2.88, 1.92, 1.28, 0.85 in the last rung, or below


def test_where_the_best_tries_collapse_or_fail_another_one_is_chosen(tmp_path: Path) -> None:
    tuned, last = made(best_at(0.1), ("allreduce",), tmp_path), list[Setting]()

    def one(setting: Setting, epochs: float, seed: int, *, whole: bool = False) -> TuningResult:
        if whole:
            last.append(setting)
            return (
                TuningResult(failed="Diverged") if len(last) == 1 else TuningResult(1.0, ((1.0, 0.9),), collapsed=True)
            )
        return best_at(0.1)(setting)

    tuned._one = one  # type: ignore[method-assign]
    chosen = tuned.run().settings["allreduce"]
    assert len(last) == tuned.plan.kept > 2
    assert chosen not in last


def test_the_best_rate_is_found_and_the_grid_widens_for_all(tmp_path: Path) -> None:
    near = made(best_at(0.06), ("allreduce", "ps(consistency=asp)"), tmp_path / "a").run()
    assert near.tries == 12
    assert not near.edges
    assert all(setting.rate == pytest.approx(0.06, rel=0.6) for setting in near.settings.values())
    far = made(best_at(1.5), ("allreduce", "ps"), tmp_path / "b").run()
    assert far.tries == 18
    assert all(setting.rate == pytest.approx(1.5, rel=0.3) for setting in far.settings.values())


def test_one_at_the_edge_widens_the_grid_of_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def found(setting: Setting) -> TuningResult:
        return best_at(1.5 if setting.strategy == "ps" else 0.05)(setting)

    tuned = made(found, ("allreduce", "ps"), tmp_path)
    seen: dict[str, set[Setting]] = {"allreduce": set(), "ps": set()}
    one = tuned._one
    tuned._one = lambda setting, *rest, **of: (seen[setting.strategy].add(setting), one(setting, *rest, **of))[1]  # type: ignore
    tuned.quiet = False
    race = tuned.run()
    assert len(seen["allreduce"]) == len(seen["ps"]) == 18
    assert race.settings["allreduce"].rate == pytest.approx(0.05)
    said = capfd.readouterr().err.splitlines()
    assert "the best rate of ps is the highest one tried: 6 higher ones for each strategy" in said


def test_where_every_rate_fails_lower_ones_are_tried(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def found(setting: Setting) -> TuningResult:
        return TuningResult(failed="no") if setting.strategy == "ps" else best_at(1e-6)(setting)

    tuned = made(found, ("allreduce", "ps"), tmp_path)
    tuned.quiet = False
    tuned.run()
    why = "the best rate of allreduce is the lowest one tried and every rate of ps failed"
    assert f"{why}: 6 lower ones for each strategy" in capfd.readouterr().err.splitlines()


def test_two_that_come_to_the_same_stay_two(tmp_path: Path) -> None:
    def found(setting: Setting) -> TuningResult:
        return TuningResult(
            curve=((1.0, 1.0 if setting.strategy == "localsgd(tau=16)" and setting.factor == 1 else 0.5),)
        )

    race = made(found, ("localsgd(tau=16)", "localsgd"), tmp_path).run()
    assert len(race.strategies) == 2
    assert race.strategies[0] == "localsgd(tau=16)"


def test_a_strategy_that_always_fails_races_as_it_is(tmp_path: Path) -> None:
    race = made(lambda setting: TuningResult(failed="Diverged"), ("allreduce",), tmp_path).run()
    assert race.settings["allreduce"].options == {}


@pytest.mark.parametrize(
    ("shared", "lab", "real", "said"),
    [
        (Options(workers=2, sim=True), None, False, "in simulation"),
        (Options(workers=2), None, False, "in simulation, hogwild on real processes"),
        (Options(workers=2), None, True, "on real processes"),
        (Options(workers=2), "10mbit,1ms", False, "in the lab"),
    ],
)
def test_where_it_takes_place_is_said(shared: Options, lab: str | None, real: bool, said: str, tmp_path: Path) -> None:
    """The words of the estimate and of the page, and what the tries do."""
    names = ("allreduce", "hogwild") if "hogwild" in said else ("allreduce",)
    tuned = made(best_at(0.06), names, tmp_path, sim=bool(shared.sim))
    tuned.race, tuned.real = replace(tuned.race, shared=shared, lab=lab), real
    assert f"12 tries each (6 more each if the best rate of one is at the edge), {said}, seeds" in tuned._estimate()
    race = tuned.run()
    assert fairness.rates(race).startswith(f"tuned {said}, each the best of 12 tries")
    tries = {name: tuned._race_of(Setting(name), 1.0) for name in tuned.race.strategies}
    assert {name: (race.shared.sim, race.lab) for name, race in tries.items()} == {
        name: (True if said.startswith("in simulation") and name == "allreduce" else None, lab) for name in tries
    }


# What it changes.


def test_an_optimizer_is_adjusted_in_every_group() -> None:
    def groups(parameters: Any) -> torch.optim.Optimizer:
        first, second = parameters
        made: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "lr": 0.5}]
        return torch.optim.SGD(made, lr=0.1, momentum=0.9, nesterov=True)

    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    found = Adjusted(groups, 2.0, 0.0)(parameters).param_groups
    assert [(g["lr"], g["momentum"], g["nesterov"]) for g in found] == [(0.2, 0.0, False), (1.0, 0.0, False)]
    adam = Adjusted(torch.optim.Adam, 0.5, 0.0)(parameters).param_groups
    assert [(g["lr"], "momentum" in g) for g in adam] == [(5e-4, False)]


@pytest.mark.parametrize("option", ["--lr-factor=-1", "--lr-factor=nan", "--momentum=1", "--momentum=-0.1"])
def test_what_is_no_rate_or_momentum_is_refused(option: str, orchestra: Orchestra) -> None:
    answer = orchestra("sim", "digits", option)
    assert answer.code == 2
    assert option.partition("=")[0].removeprefix("--") in answer.err


# Whole comparisons.


def test_compare_tunes_by_default(orchestra: Orchestra, monkeypatch: pytest.MonkeyPatch) -> None:
    said = orchestra("compare", "digits", "-s", "localsgd,ps(consistency=asp)", *QUICK)
    assert said.code == 0, said.err
    assert "tuning 2 strategies, 12 tries each (6 more each if " in said.err
    assert "), in simulation, seeds 1 and 2: about" in said.err
    assert re.search(r"^tuned localsgd: tau \d+ \(of 16, 4, 64\), lr ", said.err, re.M)
    assert re.search(r"^tuned ps\(consistency=asp\): lr ", said.err, re.M)
    assert "· tuned ·" in said.out
    record = json.loads(Path("out/table.json").read_text())
    assert record["tuned"] is True
    kept = json.loads(Path("out/tuning.json").read_text())
    assert {*kept["chosen"]} == {row["strategy"] for row in record["rows"]}
    assert not Path("out/tuning").exists()
    (asp,) = (run for run in Path("out").glob("ps-*/seed0/config.json"))
    setting = kept["chosen"]["ps(consistency=asp)"]
    assert f"'lr': {setting['lr']:.4g}"[:10] in json.loads(asp.read_text())["optimizer"]
    seeds = {json.loads(path.read_text())["seed"] for path in Path("out").rglob("config.json")}
    assert not seeds & {*kept["seeds"]}


@pytest.mark.parametrize("how", [("--no-tune",), ("--lr", "0.05")])
def test_untuned_is_said(how: tuple[str, ...], orchestra: Orchestra) -> None:
    said = orchestra("compare", "digits", "-s", "allreduce", *QUICK, *how)
    assert said.code == 0, said.err
    assert "tuning" not in said.err
    assert "· untuned ·" in said.out
    assert f"untuned ({how[0]}): the learning rate is" in " ".join(model.build([Path("out")])["fairness"])


def test_rates_that_were_given_are_not_widened(tmp_path: Path) -> None:
    tuned = made(best_at(9.0), ("allreduce",), tmp_path)
    tuned.rates = (0.1, 0.2)
    race = tuned.run()
    assert race.settings["allreduce"].rate == 0.2
    assert fairness.rates(race).endswith("allreduce lr 0.2 (at the edge of the rates tried)")
    with pytest.raises(ConfigError):
        tuning.read("0.1")


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
