# SPDX-License-Identifier: Apache-2.0
"""What `--help` shows: panels of options and of commands."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import Any

import pytest
import typer

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
