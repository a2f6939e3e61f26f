# SPDX-License-Identifier: Apache-2.0
"""`orchestra report`: a report of runs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestra.cli import options as o
from orchestra.cli import summary
from orchestra.cli.patience import patiently
from orchestra.cli.train_arguments import read_target
from orchestra.errors import ConfigError, Problem, nearest
from orchestra.formatting import plural

if TYPE_CHECKING:
    from orchestra.runs.budget import Target

FORMATS = ("html", "md", "csv", "svg", "png")

Runs = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN...", help="Run folders, or folders of runs: of a comparison, a sweep.", show_default=False
    ),
]
Where = Annotated[
    Path | None,
    o.output(
        "--out", "-o", metavar="DIR|FILE",
        help="Folder for the report, or its one file. Default: the folder of the runs; of several, report.",
    ),
]  # fmt: skip
Formats = Annotated[str, o.output("--format", "-f", metavar="A,B", help="Of html, md, csv, svg, png.")]
Goal = Annotated[
    str | None,
    o.output(metavar="SCORE=VALUE", help="The test score to measure times to. Default: that of the comparison."),
]
Title = Annotated[str | None, o.output(metavar="TEXT", help="Title of the report.")]


def report(
    runs: Runs, out: Where = None, format_: Formats = "html", target: Goal = None, title: Title = None,
    json_: o.Json = False, quiet: o.Quiet = False,
) -> None:  # fmt: skip
    """Write a report of runs as one file to open in a browser: curves, waiting, timelines, traffic, the verdict.

    Runs may be real or simulated, of one strategy or of many, still running or stopped early. The file contains its
    data and needs no network. Other formats: Markdown, tables for a spreadsheet, and figures for a paper.

    For example:

      orchestra report runs/demo
      orchestra report runs/a runs/b --target accuracy=0.95 -o comparison.html
      orchestra report runs/sweep --format html,md,csv,svg -o figures
    """
    from orchestra.report import model

    wanted = _formats(format_, out)
    goal = _target(target)
    where = ", ".join(map(str, runs))
    with contextlib.nullcontext() if quiet else patiently(f"looking through {where} for runs ..."):
        shown = model.build(runs, target=goal, title=title)
    files = _contents(shown, wanted)
    written = _write(files, runs, out)
    if json_:
        summary.print_json({"verdict": shown["verdict"]["sentence"], "files": [str(path) for path in written]})
        return
    print(shown["verdict"]["sentence"])
    if not quiet:
        _say(shown, written)


def _formats(text: str, out: Path | None) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    problems = [Problem("format", n, f"is none; {nearest(n, FORMATS)}") for n in names if n not in FORMATS]
    if not names:
        problems.append(Problem("format", text, f"name at least one of {', '.join(FORMATS)}"))
    if out is not None and out.suffix and not out.is_dir() and names not in (["html"], ["md"]):
        problems.append(Problem("out", str(out), "is one file, which only html or md alone fits in: name a folder"))
    if problems:
        raise ConfigError(problems)
    return names


def _target(text: str | None) -> Target | None:
    if text is None:
        return None
    short = {"acc": "accuracy"}
    name, equals, value = text.partition("=")
    return read_target(f"{short.get(name.strip(), name)}{equals}{value}")


def _contents(shown: dict[str, Any], wanted: list[str]) -> dict[str, str | bytes]:
    """Return the contents of each file."""
    from orchestra.report import figures, page, tables

    found: dict[str, str | bytes] = {}
    for name in wanted:
        match name:
            case "html":
                found["report.html"] = page.write(shown)
            case "md":
                found["report.md"] = tables.markdown(shown)
            case "csv":
                found |= {"runs.csv": tables.runs_csv(shown), "curves.csv": tables.curves_csv(shown)}
            case "svg":
                found |= {f"{figure}.svg": text for figure, text in figures.draw(shown).items()}
            case _:
                found |= {f"{figure}.png": data for figure, data in figures.pictures(shown).items()}
    return found


def _write(files: dict[str, str | bytes], runs: list[Path], out: Path | None) -> list[Path]:
    from orchestra.engine import checkpoint

    single = out is not None and bool(out.suffix) and not out.is_dir()
    folder = out or (runs[0] if len(runs) == 1 else Path("report"))
    paths = [folder if single else folder / name for name in files]
    for path, content in zip(paths, files.values(), strict=True):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            checkpoint.write_bytes(path, content if isinstance(content, bytes) else content.encode("utf-8"))
        except OSError as error:
            raise ConfigError([Problem("out", str(path), f"cannot be written: {error.strerror}")]) from None
    return paths


def _say(shown: dict[str, Any], written: list[Path]) -> None:
    from orchestra.report import figures

    for doubt in shown["verdict"]["doubts"]:
        summary.say(doubt)
    for refused in shown["refused"]:
        summary.say(f"left out: {refused['name']}: {refused['why']}")
    dropped = figures.left_out(shown) if any(path.suffix in (".svg", ".png") for path in written) else []
    if dropped:
        summary.say(
            f"no figures of {plural(len(dropped), 'condition')}, give their folders alone: {'; '.join(dropped)}"
        )
    summary.say("")
    for path in written:
        summary.say(f"wrote {summary.nearby(path.absolute())} ({path.stat().st_size / 1e3:,.0f} kB)")
    if page := next((path for path in written if path.suffix == ".html"), None):
        summary.say(f"next: open {page.absolute().as_uri()} in a browser")
    else:
        summary.say("next: orchestra report ... --format html to look around in")
