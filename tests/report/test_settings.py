# SPDX-License-Identifier: Apache-2.0
"""What runs have in common, and how to have them again."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from tests.report.folders import make_race, make_run

from orchestra.report import model, settings
from orchestra.runs import reading
from orchestra.runs.budget import Target
from orchestra.worlds.simulated import networks


def test_a_run_alone_has_the_condition_of_its_comparison(tmp_path: Path) -> None:
    def settings_of(strategy: str, own: str, straggler: str) -> dict[str, str]:
        note = {"options": {"straggler": own}, "race": {"straggler": straggler}}
        path = make_run(tmp_path / f"{strategy}-{straggler}", strategy=strategy, note=note)
        return settings.settings_of(reading.load(path))

    runs = [settings_of(*found) for found in (("ps", "1x1", "1x1"), ("ps", "1x5", "1x5"), ("solo", "1x1", "1x5"))]
    assert settings.conditions(runs) == ["straggler 1x1", "straggler 1x5", "straggler 1x5"]


def test_equal_settings_are_told_once(tmp_path: Path) -> None:
    told = model.build([make_race(tmp_path / "race", {"allreduce": [0.1, 0.1], "ps": [0.2, 0.2]})])
    assert told["settings"]["equal"]["batch"] == "8"
    assert told["settings"]["different"] == ["strategy", "servers", "seed"]
    assert told["settings"]["of"][0] == {"strategy": "allreduce", "servers": "0", "seed": "0"}
    assert told["conditions"] == [""]


def test_what_varies_within_a_strategy_is_a_condition() -> None:
    alone = {"strategy": "solo", "workers": "1"}
    four = {"strategy": "ps", "workers": "4"}
    assert settings.conditions([alone, four]) == ["", ""], "that one runs alone is none"
    eight = {"strategy": "ps", "workers": "8"}
    assert settings.conditions([four, eight]) == ["workers 4", "workers 8"]


def test_how_long_a_slow_run_was_waited_for_is_no_condition(tmp_path: Path) -> None:
    def settings_of(seconds: float, **note: object) -> dict[str, str]:
        run = make_run(tmp_path / f"run{seconds}", budget=["epochs=3", f"seconds={seconds}"], note=note)
        return settings.settings_of(reading.load(run))

    assert settings_of(1.5, patience=1.5)["budget"] == "3 epochs"
    assert settings.conditions([settings_of(2.5, patience=2.5), settings_of(3.5, patience=3.5)]) == ["", ""]
    asked = settings.conditions([settings_of(4.5, patience=None), settings_of(5.5, patience=None)])
    assert asked == ["budget 4.5 seconds", "budget 5.5 seconds"]


@pytest.mark.parametrize("name", ["compute_time", "delay"])
def test_the_compute_time_is_read_from_older_run_folders_as_well(name: str, tmp_path: Path) -> None:
    places: tuple[dict[str, Any], ...] = (
        {"cluster": {"kind": "local", name: "constant:2"}},
        {"note": {"options": {name: "constant:2"}}},
    )
    for place in places:
        run = make_run(tmp_path / next(iter(place)), **place)
        assert settings.settings_of(reading.load(run))["compute time"] == "constant:2"


def test_a_network_is_the_one_that_was_read_however_it_was_typed(tmp_path: Path) -> None:
    def settings_of(name: str, read: str, **options: object) -> dict[str, str]:
        cluster = {"kind": "simulated", "network": str(networks.parse(read))}
        run = make_run(tmp_path / name, cluster=cluster, note={"options": options})
        return settings.settings_of(reading.load(run))

    of_python = settings_of("a", "100mbit,1ms")
    assert of_python["network"] == "100mbit,1ms"
    typed = settings_of("b", "0.1gbit,1ms", network="0.1gbit,1ms")
    assert settings.conditions([of_python, typed]) == ["", ""]


def test_how_gradients_were_computed_is_no_condition_but_that_they_were_is() -> None:
    two, eight = ({"strategy": "ps", "workers": "2", "numerics": n} for n in ("real", "batched"))
    assert settings.conditions([two, eight]) == ["", ""]
    assert settings.conditions([two, two | {"numerics": "off"}]) == ["numerics real", "numerics off"]


def test_conditions_are_in_order_of_size() -> None:
    texts = ["network 1gbit · straggler 1x5", "network 100mbit · straggler 1x1", "network 10mbit · straggler 1x1"]
    assert sorted([*texts, "network 10mbit"], key=settings.natural) == ["network 10mbit", texts[2], texts[1], texts[0]]
    assert sorted(["2tbit,1us", "3gbit,2us", "3gbit,900ns", "500bit"], key=settings.natural) == [
        "500bit", "3gbit,900ns", "3gbit,2us", "2tbit,1us",
    ]  # fmt: skip


def test_texts_are_told_by_the_words_in_which_they_differ() -> None:
    assert settings.shortened(["10mbit,1ms", "1gbit,1ms"]) == ["10mbit", "1gbit"]
    assert settings.shortened(["a", "a b"]) == ["a", "b"]


def test_the_command_of_a_comparison_is_what_its_folder_says(tmp_path: Path) -> None:
    race = make_race(tmp_path / "sweep" / "workers-2", {"allreduce": [0.1, 0.1], "ps(servers=1)": [0.2, 0.2]})
    assert len(model.build([race])["commands"]) == 4, "run by run"
    typed = ["orchestra", "sweep", "digits", "--grid", "workers=2,4", "-s", "allreduce, ps(servers=1)"]
    (tmp_path / "sweep" / "command.json").write_text(json.dumps({"command": typed}), encoding="utf-8")
    (command,) = model.build([race])["commands"]
    assert shlex.split(command) == typed
    (race / "command.json").write_text("half of it", encoding="utf-8")
    assert model.build([race])["commands"] == [command]


def test_the_command_of_a_run_is_safe_to_paste(tmp_path: Path) -> None:
    figures = {"epochs": 3.25, "lr": 0.012345678, "trace": True}
    options = {"strategy": "slowmo(tau=4)", **figures, "out": "gone", "compute_time": "x; rm -rf $HOME"}
    note = {"recipe": "my recipe.py", "args": ["--fast"], "options": options}
    run = reading.load(make_run(tmp_path / "run", note=note))
    (command,) = settings.commands([run])
    assert shlex.split(command) == [
        "orchestra", "run", "my recipe.py", "--strategy", "slowmo(tau=4)", "--epochs", "3.25",
        "--lr", "0.012345678", "--trace", "--compute-time", "x; rm -rf $HOME", "--", "--fast",
    ]  # fmt: skip


def test_a_run_of_a_script_has_no_command(tmp_path: Path) -> None:
    assert settings.commands([reading.load(make_run(tmp_path / "run", note={}))]) == []


def test_a_target_is_found_in_the_comparison_or_in_the_budget(tmp_path: Path) -> None:
    race = make_race(tmp_path / "race", {"allreduce": [0.1]})
    assert model.build([race])["target"]["value"] == 0.5
    assert model.build([race], target=Target("loss", 1.5))["target"]["text"] == "loss ≤ 1.5"
    run = make_run(tmp_path / "run", budget=["epochs=3", "target=accuracy:0.7"])
    assert model.build([run])["target"] == {
        "metric": "accuracy",
        "value": 0.7,
        "lower": False,
        "text": "accuracy ≥ 0.7",
    }
    (race / "table.json").write_text(json.dumps({"target": 3}), encoding="utf-8")
    assert model.build([race])["target"] is None


def test_before_there_is_a_table_runs_know_what_they_race_to(tmp_path: Path) -> None:
    """And whom the others are compared with, whatever their folders are called."""
    note = {"recipe": "digits", "race": {"target": {"metric": "accuracy", "value": 0.4}, "baseline": "ps"}}
    for strategy in ("localsgd", "ps"):
        make_run(tmp_path / strategy / "seed0", strategy, servers=int(strategy == "ps"), note=note)
    told = model.build([tmp_path])
    assert told["target"]["value"] == 0.4
    assert told["verdict"]["baseline"] == "ps"
