# SPDX-License-Identifier: Apache-2.0
"""`orchestra doctor`: what works on this machine, what does not, and how to fix it."""

from __future__ import annotations

import io
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from orchestra.cli import summary
from orchestra.errors import EnvironmentProblem

if TYPE_CHECKING:
    from orchestra.doctor import Check, Finding

_NARROW = 60  # columns; below, the findings have their own lines
_COLOURS = {"fine": "green", "limited": "yellow", "broken": "red", "untried": "yellow"}

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME", help="Only these checks; --list has their names.", show_default=False),
]
List = Annotated[bool, typer.Option("--list", help="List the checks without running them.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, for programs.")]


def doctor(names: Names = None, list_: List = False, json_: Json = False) -> None:
    """Check this machine: what works, what does not, and how to fix it.

    Every check runs in a process of its own: it imports torch, trains with two processes, averages through Gloo and
    NCCL, maps memory, binds ports, or writes to disk. All take 20 seconds at most, and leave nothing behind. The result
    is fine, limited (some uses fail, or it is needed for some uses only), broken, or untried for lack of time or of
    something that it needs.

    The exit code is 0 if everything that training on this machine needs works, and 3 if part of that is broken or
    untried. Checks for other uses (GPUs, other machines, the lab) do not count.

    For example:

      orchestra doctor
      orchestra doctor local disk
      orchestra doctor --json | jq '.checks[] | select(.state != "fine")'
    """
    from orchestra.doctor import examine, find

    checks = find(names or [])
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show a letter of a path must not end the program; and JSON is always UTF-8.
        sys.stdout.reconfigure(encoding="utf-8" if json_ else None, errors="backslashreplace")
    if list_:
        _list(checks, json_=json_)
        return
    if any(check.slow for check in checks) and not json_ and sys.stderr.isatty():
        summary.say("this takes some seconds ...")
    results = []
    for check, finding in examine(checks):
        results.append((check, finding))
        if not json_:
            _show(check, finding)
    works = not _missing(results)
    if json_:
        found = [asdict(f) | {"name": c.name, "about": c.about, "needed": c.needed} for c, f in results]
        summary.print_json({"works": works, "verdict": verdict(results), "checks": found})
    else:
        print("\n".join(["", *_advice(results), _filled(verdict(results), "")]), flush=True)
    if not works:
        raise typer.Exit(EnvironmentProblem.exit_code)


def _list(checks: Sequence[Check], *, json_: bool) -> None:
    if json_:
        summary.print_json([{"name": c.name, "about": c.about, "needed": c.needed, "slow": c.slow} for c in checks])
        return
    for check in checks:
        notes = ["needed"] * check.needed + ["takes seconds"] * check.slow
        print(_filled(check.about + (f" ({', '.join(notes)})" if notes else ""), f"{check.name:<10}  "))


def _show(check: Check, finding: Finding) -> None:
    """Print one line of the table. The mark is a word, which needs no colour and no special letters."""
    from rich.console import Console
    from rich.text import Text

    wide = _width() >= _NARROW
    head = f"{finding.state:<8}{check.name:<10}  "
    row = _filled(finding.found, head) if wide else f"{head.rstrip()}\n{_filled(finding.found, '  ')}"
    text = Text(row)
    text.stylize(_COLOURS[finding.state], 0, len(finding.state))
    Console(highlight=False).print(text, soft_wrap=True)


def _filled(text: str, head: str) -> str:
    """Return text after a head, with its further lines indented; in a pipe one line, which programs can search."""
    return textwrap.fill(
        text,
        _width(),
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 1 << 20


def _missing(results: Sequence[tuple[Check, Finding]], *states: str) -> list[str]:
    """Return the checks that training needs in one of these states; without states, those not known to work."""
    wanted = states or ("broken", "untried")
    return [check.name for check, finding in results if check.needed and finding.state in wanted]


def _advice(results: Sequence[tuple[Check, Finding]]) -> Iterator[str]:
    """Yield what to do, the needed checks first; each remedy once."""
    remedies: dict[str, list[str]] = {}
    for check, finding in sorted(results, key=lambda result: result[0].name not in _missing(results)):
        if finding.remedy:
            remedies.setdefault(finding.remedy, []).append(check.name)
    if remedies:
        yield "what to do:"
        yield from (_filled(f"{', '.join(names)}: {remedy}", "  ") for remedy, names in remedies.items())
        yield ""


def verdict(results: Sequence[tuple[Check, Finding]]) -> str:
    """Return all results in a sentence."""
    from orchestra.doctor import CHECKS

    needed = _missing(results)
    others = [check.name for check, finding in results if finding.state != "fine" and check.name not in needed]
    if broken := _missing(results, "broken"):
        return f"Training on this machine will fail until this is fixed: {', '.join(broken)}."
    if needed:
        return f"Whether training works on this machine is not known yet: {', '.join(needed)} took too long."
    if len(results) < len(CHECKS):
        return f"Not fine: {', '.join(others)}." if others else "What was tried works."
    if others:
        return f"Training on this machine works. Not fine, for some uses only: {', '.join(others)}."
    return "Everything works."
