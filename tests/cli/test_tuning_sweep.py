# SPDX-License-Identifier: Apache-2.0
"""A sweep tunes once or at each point; tuning that was stopped goes on."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Orchestra, story
from tests.cli.tunings import AS_RECIPE, QUICK, STREAM

from orchestra.cli import compare, sources, tuning
from orchestra.cli.candidates import Setting
from orchestra.cli.options import Options
from orchestra.cli.race import Race
from orchestra.cli.table import Outcome
from orchestra.cli.tuning import Tuning


def test_tries_are_kept_where_tuning_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    race = compare.prepare(
        sources.find("digits"), ["allreduce"], Options(workers=2, sim=True, epochs=1.0), 1, "accuracy=0.5", tmp_path
    )
    real, runs = Race.run_one, list[float]()

    def stopping(race: Race, strategy: str, *rest: Any, **more: Any) -> Outcome:
        if len(runs) == 3:
            raise KeyboardInterrupt
        runs.append(race.settings[strategy].rate)
        return real(race, strategy, *rest, **more)

    monkeypatch.setattr(Race, "run_one", stopping)
    with pytest.raises(KeyboardInterrupt):
        Tuning(race, 1, quiet=True).run()
    assert len(runs) == 3
    again: list[float] = []

    def going_on(race: Race, strategy: str, *rest: Any, **more: Any) -> Outcome:
        again.append(race.settings[strategy].rate)
        return real(race, strategy, *rest, **more)

    monkeypatch.setattr(Race, "run_one", going_on)
    tuned = Tuning(race, 1, quiet=True).run()
    assert not {*runs} & {*again[:3]}
    kept = again.copy()
    assert Tuning(race, 1, quiet=True).run().settings == tuned.settings
    assert again == kept  # everything was known


SWEEP = ("sweep", "--grid", "bandwidth=10mbit,1gbit", "--tune-each")


@pytest.mark.parametrize("verb", [("compare",), pytest.param(SWEEP, marks=pytest.mark.nightly)])
def test_tuning_that_is_stopped_says_how_to_go_on(
    verb: tuple[str, ...], orchestra: Orchestra, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Typed as it is said, the command makes no try again."""
    real, runs, stops = Race.run_one, list[Any](), [3]

    def stopping(race: Race, strategy: str, *rest: Any, **more: Any) -> Outcome:
        if race.out.name == "tuning":
            if len(runs) in stops:
                begun = race.out / "allreduce" / "seed1"
                begun.mkdir(parents=True)
                (begun / "config.json").touch()
                raise KeyboardInterrupt
            runs.append((race.settings[strategy].rate, race.shared.epochs, race.out.parent.name))
        return real(race, strategy, *rest, **more)

    monkeypatch.setattr(Race, "run_one", stopping)
    Path("mine.py").write_text(f"{STREAM}\n{AS_RECIPE.replace('accuracy=0.8', '')}\n")
    said = orchestra(*verb, "mine.py", "--sim", "-s", "allreduce", "--seeds", "1", "--", "--out", "of the script")
    assert said.code == 130
    assert "The 3 tries so far are kept; to go on: orchestra " in said.err
    words = shlex.split(said.err.rpartition("to go on: orchestra ")[2])
    assert words[-3:] == ["--", "--out", "of the script"]
    assert ("--target" in words, words[words.index("--out") + 1][:5]) == (True, "runs/")
    stops.clear()
    said = orchestra(*words)
    assert said.code == 0, said.err
    assert len(runs) > 16
    assert len({*runs}) == len(runs)


def test_a_sweep_tunes_once(orchestra: Orchestra, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned: list[Path] = []

    def once(self: Tuning) -> Race:
        tuned.append(self.race.out)
        setting = Setting("allreduce", own=0.05, factor=0.5 * len(tuned))
        return replace(self.race, settings={"allreduce": setting}, tries=12, tuning="in simulation")

    monkeypatch.setattr(tuning.Tuning, "run", once)
    grid = ("--grid", "bandwidth=10mbit,1gbit", "-s", "allreduce")
    said = orchestra("sweep", "digits", *QUICK, *grid)
    assert said.code == 0, said.err
    assert tuned == [Path("out")]
    optimizers = {json.loads(path.read_text())["optimizer"] for path in Path("out").rglob("config.json")}
    assert len(optimizers) == 1
    assert "'lr': 0.025" in optimizers.pop()
    words = "tuned in simulation, each the best of 12 tries, on seeds that no run of it uses: allreduce lr 0.025"
    assert story("out/report.html")["fairness"][-1] == words
    assert words in Path("out/sweep.md").read_text()
    assert words in " ".join(said.out.split())
    assert json.loads(Path("out/sweep.json").read_text())["rates"] == [words]
    tuned.clear()
    assert orchestra("sweep", "digits", *QUICK[:-1], "each", *grid, "--tune-each").code == 0
    assert len(tuned) == 2
    points = story("each/report.html")["fairness"]
    assert f"bandwidth-10mbit: {words}" in points
    assert f"bandwidth-1gbit: {words.replace('0.025', '0.05')}" in points
    assert "same initial parameters: equal sums for equal seeds" in points
    rates = json.loads(Path("each/sweep.json").read_text())["rates"]
    assert rates == [f"bandwidth 10mbit: {words}", f"bandwidth 1gbit: {words.replace('0.025', '0.05')}"]


def test_a_sweep_says_why_it_is_untuned(orchestra: Orchestra) -> None:
    said = orchestra("sweep", "digits", *QUICK, "--grid", "lr=0.02,0.05", "-s", "allreduce")
    assert said.code == 0, said.err
    points = story("out/report.html")["fairness"]
    for rate in ("0.02", "0.05"):
        assert f"lr-{rate}: untuned (--grid lr=...): the learning rate is {rate} for all" in "\n".join(points)
        assert f"lr {rate}: untuned (--grid lr=...)" in " ".join(said.out.split())


@pytest.mark.parametrize("fixed", [("--no-tune",), ("--lr", "0.1"), ("--grid", "lr=0.1,0.2")])
def test_tuning_that_is_asked_for_and_forbidden_is_refused(fixed: tuple[str, ...], orchestra: Orchestra) -> None:
    said = orchestra("sweep", "digits", *QUICK, "--grid", "bandwidth=10mbit,1gbit", "--tune-each", *fixed)
    assert said.code == 2
    assert f"tunes learning rates, and {fixed[0]}" in said.err
    assert "tune-each = True" in said.err
    if fixed[0] == "--grid":
        return
    for option in (("--lrs", "0.1,0.2"), ("--tune-real",)):
        said = orchestra("compare", "digits", *QUICK, *option, *fixed)
        assert said.code == 2
        assert f"{fixed[0]} fixes them" in said.err
    assert not Path("out").exists()
