# SPDX-License-Identifier: Apache-2.0
"""`orchestra strategies`: what there is."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def strategies(
    json_: Annotated[bool, typer.Option("--json", help="Print JSON on standard output, for programs.")] = False,
) -> None:
    """List the strategies: how the workers agree.

    Any of them goes to `--strategy`, by its long or its short name, with its knobs in parentheses.

    For example:

      orchestra strategies
      orchestra explain slowmo
      orchestra run digits --strategy "slowmo(tau=8, beta=0.6)"
    """
    from orchestra.cli import catalogue, summary
    from orchestra.strategies import ALIASES, STRATEGIES

    if json_:
        summary.print_json([as_record(cls) for cls in STRATEGIES])
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for heading in ("name", "short"):
        table.add_column(heading, no_wrap=True)
    table.add_column("servers", justify="right", no_wrap=True)
    table.add_column("sync", no_wrap=True)
    table.add_column("paper", no_wrap=True)
    table.add_column("what it does", overflow="fold")
    for cls in STRATEGIES:
        table.add_row(
            catalogue.name_of(cls), catalogue.short_of(cls) or "", str(cls().servers or "-"),
            catalogue.synchronous(cls), catalogue.paper(cls), catalogue.one_line(cls),
        )  # fmt: skip
    summary.console_for(90).print(table)
    also = ", ".join(f"{name}: {catalogue.name_of(alias.strategy)}" for name, alias in ALIASES.items())
    summary.say(f"\nother names: {also}\nnext: orchestra explain slowmo")


def as_record(cls: type[Any]) -> dict[str, Any]:
    """A strategy for programs."""
    from orchestra.cli import catalogue

    return {
        "name": catalogue.name_of(cls),
        "short": catalogue.short_of(cls),
        "aliases": catalogue.aliases_of(cls),
        "about": catalogue.one_line(cls),
        "paper": catalogue.citation(cls),
        "servers": getattr(cls(), "servers", 0),
        "synchronous": catalogue.synchronous(cls),
        "bytes": catalogue.bytes_formula(cls),
        "knobs": [vars(knob) for knob in catalogue.knobs(cls)],
        "examples": catalogue.examples(cls),
    }
