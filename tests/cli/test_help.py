# SPDX-License-Identifier: Apache-2.0
"""What `--help` shows: panels of options and of commands."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest
import typer
from tests.cli.conftest import Orchestra

from orchestra.cli.app import app

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
BIG = ("run", "resume", "sim", "compare", "sweep", "recommend", "launch")
PANELS = {
    "Comparison", "Training", "Budget", "Cluster", "Simulation", "Several machines", "Templates", "Output",
}  # fmt: skip


@pytest.mark.parametrize("name", BIG)
def test_every_option_of_a_big_command_is_in_a_panel(name: str) -> None:
    command = COMMANDS[name]
    options = [param for param in command.get_params(typer.Context(command)) if param.param_type_name == "option"]
    panels = [option.rich_help_panel for option in options]
    assert set(panels) <= PANELS, [option.name for option in options if option.rich_help_panel not in PANELS]
    in_turn = Counter(panel for panel, _ in groupby(panels))
    assert set(in_turn.values()) == {1}, "a panel's options stand together in the signature"
    assert [*in_turn][-1] == "Output"
    assert options[-1].name == "help"


def test_commands_with_many_options_are_those_with_panels() -> None:
    assert {name for name, command in COMMANDS.items() if len(command.params) > 10} == set(BIG)


def test_commands_that_choose_a_strategy_come_first(orchestra: Orchestra) -> None:
    panels = {name: command.rich_help_panel for name, command in COMMANDS.items()}
    assert [*dict.fromkeys(panels.values())] == ["Choose a strategy", "Train", "Look at runs", "Machines and data"]
    assert [*COMMANDS][:2] == ["recommend", "compare"]
    first = orchestra("--help").out.splitlines()[:12]
    assert all(any(f"orchestra {name} digits" in line for line in first) for name in ("recommend", "compare"))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_is_printed(shell: str, orchestra: Orchestra, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--install-completion" in orchestra("--help").out
    monkeypatch.setenv("_ORCHESTRA_COMPLETE", f"source_{shell}")
    said = orchestra()
    assert said.code == 0
    assert f"complete_{shell}" in said.out


@pytest.mark.parametrize(
    ("typed", "expected"),
    [("orchestra rec", {"recommend"}), ("orchestra run digits --str", {"--strategy", "--straggler"})],
)
def test_commands_and_options_are_completed(
    typed: str, expected: set[str], orchestra: Orchestra, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_ORCHESTRA_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(typed.count(" ")))
    assert set(orchestra().out.split()) == expected


def _with_subcommands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for each, below in getattr(command, "commands", {}).items():
        yield from _with_subcommands(f"{name} {each}", below)


def test_examples_fit_a_narrow_terminal() -> None:
    """Lines that the terminal would break are read as two commands."""
    wide = [
        f"{name}: {line}"
        for name, command in _with_subcommands("orchestra", typer.main.get_command(app))
        for line in inspect.cleandoc(command.help or "").splitlines()
        if line.startswith(" ") and len(line) > 78
    ]
    assert not wide, "\n".join(wide)
