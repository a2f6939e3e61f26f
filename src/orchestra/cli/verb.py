# SPDX-License-Identifier: Apache-2.0
"""A command of `orchestra`, as its help shows it."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class Verb(TyperCommand):
    """A command whose help has the option --help last, and no type beside an option that takes no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, --help among them."""
        params: list[Any] = super().get_params(ctx)
        panels = [panel for param in params if (panel := getattr(param, "rich_help_panel", None))]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
            if param.name == "help" and panels:
                param.rich_help_panel = panels[-1]
        return params
