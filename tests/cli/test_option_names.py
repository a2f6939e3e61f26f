# SPDX-License-Identifier: Apache-2.0
"""Options have one name in the help, and the names that users of other programs and of the last release type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.cli.conftest import Orchestra

from orchestra.cli import resume
from orchestra.cli.app import app
from orchestra.cli.options import Options
from orchestra.cli.verb import OTHER_NAMES
from orchestra.clusters.local import Local
from orchestra.clusters.simulated import Simulated
from orchestra.engine.compute_times import ConstantTime, Slow, parse
from orchestra.errors import ConfigError

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
VALUES = {"--workers": "3", "--per-host": "3", "--batch": "3", "--compute-time": "constant:3"}
TRAINS = ("run", "sim", "compare", "recommend", "sweep")


@pytest.mark.parametrize(
    ("command", "option"),
    [
        *((name, option) for name in TRAINS for option in OTHER_NAMES if option != "--per-host"),
        ("launch", "--per-host"),
    ],
)
def test_other_names_reach_the_same_value(command: str, option: str) -> None:
    def given(*words: str) -> dict[str, Any]:
        grid = ["--grid", "lr=1"] if command == "sweep" else []
        first = [] if command == "launch" else ["digits"]
        context = COMMANDS[command].make_context(command, [*first, *grid, *words])
        return {name: value for name, value in context.params.items() if name != "command"}

    expected = given(option, VALUES[option])
    assert expected != given()
    for name in OTHER_NAMES[option]:
        assert given(name, VALUES[option]) == expected
        assert given(f"{name}={VALUES[option]}") == expected


def test_words_for_a_script_are_its_own() -> None:
    context = COMMANDS["run"].make_context("run", ["train.py", "--batch-size", "8", "--", "--batch-size", "16"])
    assert (context.params["batch"], context.params["args"]) == (8, ["--batch-size", "16"])


@pytest.mark.parametrize("command", TRAINS)
def test_help_has_one_spelling(command: str, orchestra: Orchestra) -> None:
    said = orchestra(command, "--help").out
    assert "--compute-time" in said
    assert "--straggler" in said
    assert not any(old in said for old in ("--delay", "slow:", "_per_node", "_size", "_processes"))


def test_a_straggler_slows_what_compute_times_the_cluster_has() -> None:
    def changed(old: Any = None, **given: Any) -> Any:
        return Options(straggler="1x5", **given).changes()["cluster"](old)

    assert changed() == Local(compute_time="constant:0.05 slow:1x5")
    assert changed(compute_time="constant:2") == Local(compute_time="constant:2 slow:1x5")
    assert changed(sim=True).compute_time == "constant:0.05 slow:1x5"
    assert changed(Simulated(compute_time=ConstantTime(2)), sim=True).compute_time == Slow(ConstantTime(2), 1, 5.0)
    assert parse(str(changed(Local(compute_time="exponential:1,1")).compute_time)) == parse("exponential:1,1 slow:1x5")


@pytest.mark.parametrize(("straggler", "message"), [("5", "such as 1x5"), ("3x5", "there are 2 workers")])
def test_a_straggler_that_cannot_be_is_refused(straggler: str, message: str, orchestra: Orchestra) -> None:
    said = orchestra("run", "digits", "--straggler", straggler)
    assert said.code == 2
    assert message in said.err
    with pytest.raises(ConfigError, match=message):
        Options(straggler=straggler, workers=2, sim=True).changes()["cluster"](None)


def test_a_run_that_the_last_release_began_keeps_its_compute_times(tmp_path: Path) -> None:
    note = {"recipe": "digits", "options": {"delay": "constant:2", "steps": 3, "unknown": 1}}
    (tmp_path / "config.json").write_text(json.dumps({"note": note, "cluster": {"kind": "local"}}))
    _, options, _ = resume._remembered(tmp_path, together=False)
    assert options == {"compute_time": "constant:2", "steps": 3}
