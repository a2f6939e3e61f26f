# SPDX-License-Identifier: Apache-2.0
"""`orchestra explain`: one strategy, as in its paper, with its options."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from orchestra.cli.part_text import StrategyOption


_PAGES = {
    "network": "orchestra.worlds.simulated.networks",
    "compute-time": "orchestra.engine.compute_times",
    "delay": "orchestra.engine.compute_times",  # its name before
    "optimizer": "orchestra.model.optimizers",
    "lars": "orchestra.model.optimizers.lars",
    "lamb": "orchestra.model.optimizers.lamb",
    "schedule": "orchestra.model.schedules",
}


def explain(
    name: Annotated[
        str,
        typer.Argument(
            help="A strategy or a part of one, such as slowmo, ps, asp; or network, compute-time, optimizer, schedule.",
            metavar="NAME",
        ),
    ],
    json_: Annotated[bool, typer.Option("--json", help="Print JSON on standard output, for programs.")] = False,
) -> None:
    """Explain a strategy: paper, pseudo-code, bytes on the wire, options with their ranges, expressions to try.

    For example:

      orchestra explain slowmo
      orchestra explain asp
      orchestra explain compute-time   values of --compute-time; also network,
                                       optimizer, schedule
      orchestra explain lars           an optimizer for large batches; also lamb
    """
    from orchestra.cli import part_text, summary
    from orchestra.strategies.catalogue import PARTS

    if name in _PAGES:
        print(inspect.cleandoc(importlib.import_module(_PAGES[name]).__doc__ or ""), flush=True)
        return
    cls = part_text.find(name)
    if json_:
        summary.print_json(_as_record(cls))
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True, emoji=False)
    if (alias := part_text.about_alias(name)) is not None:
        console.print(f"{textwrap.fill(alias, 100)}\n")
    short = part_text.short_of(cls)
    title = part_text.name_of(cls) + (f" (short: {short})" if short else "")
    console.print(f"{title}: {part_text.one_line(cls)}\n", style="bold")
    if cls in PARTS:
        hosts = list(dict.fromkeys(example.split("(")[0] for example in part_text.examples(cls)))
        console.print(f"A part of {', '.join(hosts)}: see also `orchestra explain {hosts[0]}`.\n")
    console.print(part_text.page(cls))
    _print_options(console, part_text.options(cls))
    console.print("\nExamples", style="bold")
    for example in part_text.examples(cls):
        quoted = f'"{example}"' if "(" in example else example
        console.print(f"  orchestra run digits --workers {1 if example == 'solo' else 4} --strategy {quoted}")


def _print_options(console: Console, options: list[StrategyOption]) -> None:
    if not options:
        console.print("\nNo options.")
        return
    console.print("\nOptions", style="bold")
    left = max(len(f"{option.name} = {option.default}") for option in options)
    for option in options:
        given = f"{option.name} = {option.default}"
        about = option.about + (f"  [{option.range}]" if option.range else "")
        lines = textwrap.wrap(about, max(30, 100 - left)) or [""]
        console.print(f"  {given:<{left}}   {lines[0]}")
        for line in lines[1:]:
            console.print(f"  {'':<{left}}   {line}")


def _as_record(cls: type[Any]) -> dict[str, Any]:
    from orchestra.cli import part_text
    from orchestra.cli.strategies import as_record
    from orchestra.core.strategy import Strategy

    page = {"page": part_text.page(cls)}
    if issubclass(cls, Strategy):
        return as_record(cls) | page
    return {
        "name": part_text.name_of(cls),
        "about": part_text.one_line(cls),
        "options": [vars(option) for option in part_text.options(cls)],
        "examples": part_text.examples(cls),
    } | page
