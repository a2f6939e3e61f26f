# SPDX-License-Identifier: Apache-2.0
"""A command of `orchestra`, as its help shows it."""

from __future__ import annotations

from typing import Any, cast

from typer.core import TyperCommand

_PROCESSES = ("--nproc-per-node", "--nproc_per_node")
# Names of options in torchrun and Accelerate, and in the previous release of this program. --help does not list them.
OTHER_NAMES = {
    "--workers": (*_PROCESSES, "--num-processes", "--num_processes"),
    "--per-host": _PROCESSES,
    "--batch": ("--batch-size", "--batch_size"),
    "--compute-time": ("--delay",),
}


class Verb(TyperCommand):
    """A command whose help has the option --help last, and no type beside an option that takes no value."""

    def make_parser(self, ctx: Any) -> Any:
        """Return a parser that knows the options by their other names as well."""
        parser = super().make_parser(ctx)
        for param in self.params:
            if names := [name for option in param.opts for name in OTHER_NAMES.get(option, ())]:
                parser.add_option(obj=cast("Any", param), opts=names, dest=param.name, nargs=param.nargs)
        return parser

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
