# SPDX-License-Identifier: Apache-2.0
"""`orchestra strategies`: the list of strategies."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def strategies(
    json_: Annotated[bool, typer.Option("--json", help="Print JSON on standard output, for programs.")] = False,
) -> None:
    """List the strategies: how the workers agree.

    `--strategy` takes any of them, by its long or short name, with its options in parentheses.

    For example:

      orchestra strategies
      orchestra explain slowmo
      orchestra run digits --strategy "slowmo(tau=8, beta=0.6)"
    """
    from orchestra.cli import part_text, summary
    from orchestra.strategies.catalogue import rows

    if json_:
        summary.print_json([as_record(row.strategy) for row in rows()])
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for heading in ("name", "short"):
        table.add_column(heading, no_wrap=True)
    table.add_column("servers", justify="right", no_wrap=True)
    table.add_column("sync", no_wrap=True)
    table.add_column("paper", no_wrap=True)
    table.add_column("what it does", overflow="fold")
    for cls in (row.strategy for row in rows()):
        table.add_row(
            part_text.name_of(cls), part_text.short_of(cls) or "", str(cls().layout.servers or "-"),
            part_text.synchronous(cls), part_text.paper(cls), part_text.one_line(cls),
        )  # fmt: skip
    summary.console_for(90).print(table)
    also = ", ".join(f"{name}: {row.name}" for row in rows() for name in row.other_names)
    summary.say(f"\nother names: {also}\nnext: orchestra explain slowmo")


def as_record(cls: type[Any]) -> dict[str, Any]:
    """Return a strategy as a record for programs."""
    from orchestra.cli import part_text

    return {
        "name": part_text.name_of(cls),
        "short": part_text.short_of(cls),
        "aliases": part_text.aliases_of(cls),
        "about": part_text.one_line(cls),
        "paper": part_text.citation(cls),
        "servers": cls().layout.servers,
        "synchronous": part_text.synchronous(cls),
        "bytes": part_text.bytes_formula(cls),
        "options": [vars(option) for option in part_text.options(cls)],
        "examples": part_text.examples(cls),
    }
