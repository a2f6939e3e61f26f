# SPDX-License-Identifier: Apache-2.0
"""The end of a comparison: save its table and page, print the findings."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from orchestra.cli import summary
from orchestra.report import escaping

if TYPE_CHECKING:
    from rich.console import Console

    from orchestra.cli.claims import Claim
    from orchestra.cli.table import Table
    from orchestra.runs.budget import Target

_WIDE = 125  # columns of a terminal that takes the table with its long headings
PAGE = "report.html"
_DOES_NOT_HOLD = 9  # exit code


def conclude(
    table: Table,
    out: Path,
    *,
    as_json: bool,
    quiet: bool,
    fair: Sequence[str] = (),
    asserted: Sequence[Claim] = (),
    beside: Callable[[], None] = lambda: None,
) -> None:
    """Save the table and the page, print the findings, and fail if a run failed or a claim does not hold.

    `beside` prints what is not saved.
    """
    record = save(table, out, fair)
    if any(row.done for row in table.rows):
        write_page(out, table.target)
    record["claims"] = [{"claim": claim.text, "holds": claim.holds(table)} for claim in asserted]
    if as_json:
        summary.print_json(record)
    else:
        show(table, record["learned"], fair)
        for claim in asserted:
            print(claim.told(table))
        if not quiet:
            beside()
            where = summary.nearby(out)
            summary.say(f"\nsaved: {where}/{PAGE}, table.md and table.json")
            summary.say(f"next: open {where}/{PAGE} · orchestra explain {table.ranked[0].strategy.split('(')[0]}")
    if any(row.failures for row in table.rows):
        raise typer.Exit(1)
    if not all(claim.holds(table) for claim in asserted):
        raise typer.Exit(_DOES_NOT_HOLD)


def write_page(out: Path, target: Target) -> None:
    """Write the page of all runs in a folder."""
    from orchestra.engine import checkpoint
    from orchestra.report import model, page

    checkpoint.write_text(out / PAGE, page.write(model.build([out], target=target)))


def save(table: Table, out: Path, fair: Sequence[str] = ()) -> dict[str, Any]:
    """Write the table and the findings to the folder of the runs, and return both."""
    from orchestra.cli.lessons import verdict

    words = verdict(table, len(os.sched_getaffinity(0)) if table.unit == "s" else None)
    record = table.as_record() | {"learned": words, "fairness": [*fair], "out": str(out)}
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(summary.finite(record), indent=1, ensure_ascii=False)
    (out / "table.json").write_text(text + "\n", encoding="utf-8")
    box = "".join(f"\n- {escaping.markdown(point)}" for point in fair)
    learned = escaping.markdown(" ".join(words))
    (out / "table.md").write_text(f"{table.markdown()}\n{learned}\n{box}\n", encoding="utf-8")
    return record


def console_of_table() -> Console:
    """Return standard output as the table and all text beside it are printed: equally wide."""
    return summary.console_for(80 if sys.stdout.isatty() else 200)


def show(table: Table, words: Sequence[str], fair: Sequence[str] = ()) -> None:
    """Print the table and the findings."""
    from rich.table import Table as Grid

    console = console_of_table()
    narrow = console.width < _WIDE
    grid = Grid(box=None, pad_edge=False, header_style="bold", padding=(0, 1 if narrow else 2, 0, 0))
    for i, heading in enumerate(table.columns(narrow=narrow)):
        # Only the time may be broken into lines, between words.
        grid.add_column(heading, justify="left" if i in (0, 3) else "right", no_wrap=i != 3, overflow="fold")
    for row in table.ranked:
        grid.add_row(*table.cells(row, narrow=narrow))
    console.print(f"\n{table.heading}\n", style="bold")
    console.print(grid)
    if narrow:
        console.print(
            f"runs: reached · ratio: speed, {table.baseline} = 1 · total: s · MB: of a worker · "
            "age: of gradients, in updates, mean/max",
            style="dim",
        )
    else:
        console.print(f"\n{table.legend}", style="dim")
    for note in table.notes():
        console.print(note)
    console.print()
    for sentence in words:
        console.print(sentence)
    if fair:
        console.print("\nfairness: " + "; ".join(fair) + ".", style="dim", markup=False)
