# SPDX-License-Identifier: Apache-2.0
"""What a report gives as the command to have it again is what was typed, and can be typed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.cli.conftest import Orchestra

from orchestra.cli import repeat
from orchestra.cli.app import app
from orchestra.cli.in_lab import flags
from orchestra.cli.options import Options
from orchestra.report import model

QUICK = ("--epochs", "0.2", "--target", "accuracy=0.1")


def read(command: str) -> dict[str, Any]:
    """The options of a command, as its verb reads them, not carried out; raises what typer would say."""
    group: Any = typer.main.get_command(app)
    program, verb, *words = shlex.split(command)
    assert program == "orchestra"
    found: dict[str, Any] = group.commands[verb].make_context(verb, words).params
    assert not found.get("args"), "a word that no option takes is taken for one of the script's"
    return found


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "typed",
    [
        ("compare", "digits", "--sim", "-s", "allreduce, localsgd(tau=4)", "--lrs", "0.012345678,0.05", "--seeds=1"),
        ("sweep", "digits", "--sim", "--grid", "bandwidth=10mbit,1gbit", "--grid", "workers=2,3", "-s", "allreduce"),
        ("recommend", "digits", "--network", "20mbit", "-s", "allreduce,ps,localsgd(tau=4)", "--seeds", "1"),
    ],
    ids=lambda typed: typed[0],
)
@pytest.mark.parametrize("out", [("--out", "here"), pytest.param(("--out=here",), marks=pytest.mark.nightly)])
def test_the_command_of_many_runs(orchestra: Orchestra, typed: tuple[str, ...], out: tuple[str, ...]) -> None:
    said = orchestra(*typed, *QUICK, "--quiet", *out)
    assert said.code == 0, said.err
    assert model.build([Path("here")])["commands"] == [shlex.join(["orchestra", *typed, *QUICK, "--quiet"])]
    read(model.build([Path("here")])["commands"][0])


def test_the_command_of_a_run(orchestra: Orchestra) -> None:
    typed = ("sim", "digits", "--trace", "--lr", "0.012345678", "-n", "2", "--steps", "3", "--out", "here", "-q")
    assert orchestra(*typed).code == 0
    (command,) = model.build([Path("here")])["commands"]
    again = read(command)
    assert again["trace"] is True
    assert again["lr"] == 0.012345678
    assert again["workers"] == 2
    assert again["steps"] == 3


def test_words_for_other_processes_can_be_typed() -> None:
    words = [*flags(Options(strategy="ps", workers=2, lr=0.012345678, trace=True))]
    again = read(shlex.join(["orchestra", "run", "digits", *words]))
    assert (again["strategy"], again["workers"], again["lr"], again["trace"]) == ("ps", None, 0.012345678, True)


def test_a_command_that_was_refused_leaves_room_for_the_next(orchestra: Orchestra, tmp_path: Path) -> None:
    wrong = orchestra("compare", "digits", "--sim", "-s", "allreduce", "--batch", "0", "--out", "here", "-q")
    assert wrong.code == 2
    assert json.loads((tmp_path / "here" / "command.json").read_text())["command"][-2:] == ["0", "-q"]
    assert (
        orchestra("compare", "digits", "--sim", "-s", "allreduce", *QUICK, "--no-tune", "--out", "here", "-q").code == 0
    )
    assert "choose a new one" in orchestra("compare", "digits", "--sim", "--out", "here").err


def test_a_users_file_in_tuning_makes_the_folder_taken(tmp_path: Path) -> None:
    (tmp_path / "tuning" / "ps" / "seed3").mkdir(parents=True)
    (tmp_path / "tuning" / "ps" / "seed3" / "config.json").write_text("{}")
    (tmp_path / "tuning.json").write_text("{}")
    assert not repeat.is_taken(tmp_path)
    (tmp_path / "tuning" / "notes.txt").write_text("mine")
    assert repeat.is_taken(tmp_path)
