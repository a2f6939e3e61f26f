# SPDX-License-Identifier: Apache-2.0
"""What the documentation takes from the code. It is committed with the pages, which so read without the site as well.

    python -m scripts.pages          writes it again; a test compares the pages with what this command would write

In a page of docs/ it stands between `<!-- made by scripts.pages: NAME -->` and `<!-- end: NAME -->`; NAME is one of
`GENERATED` below. The docstrings are Markdown as they are: paragraphs, and pseudo-code that is indented by four.

This file is also a hook of mkdocs, named in `mkdocs.yml`: files of the repository that a page links to, such as
`[text](../SECURITY.md)`, become pages of the site.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from orchestra import collectives, errors
from orchestra.cli import part_text as known
from orchestra.cli.app import orchestra as verbs
from orchestra.collectives import ALGORITHMS
from orchestra.model import optimizers, schedules
from orchestra.strategies.catalogue import PARTS, STRATEGIES

ROOT = Path(__file__).resolve().parents[1]
# Files beside docs/ that pages refer to, and where they are in the site.
ELSEWHERE = (
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "benchmarks/RESULTS.md",
    "benchmarks/results/*.md",
    "experiments/*/README.md",
)
_SITE = "repository"
MADE = re.compile(r"^<!-- made by scripts\.pages: ([\w-]+) -->$.*?^<!-- end: \1 -->$", re.MULTILINE | re.DOTALL)


def catalogue() -> str:
    """Every strategy: what it does, its paper and pseudo-code, its bytes and options."""
    rows = [
        (f"[`{known.short_of(cls) or known.name_of(cls)}`](#{known.name_of(cls)})", known.one_line(cls),
         known.paper(cls), str(cls().layout.servers or "-"), known.synchronous(cls))
        for cls in STRATEGIES
    ]  # fmt: skip
    head = table(("strategy", "what it does", "paper", "servers", "synchronous"), rows)
    return "\n\n".join([head, *(_section([cls]) for cls in STRATEGIES)])


def parts() -> str:
    """Return the pages of the parts of strategies; parts of one file share its page."""
    return "\n\n".join(_section(list(group)) for _, group in groupby(PARTS, key=lambda cls: cls.__module__))


def algorithms() -> str:
    """Return the pages of the all-reduce algorithms: their costs, and the page of each."""
    pages = [f"### {name}\n\n{_text(sys.modules[add_up.__module__])}" for name, add_up in ALGORITHMS.items()]
    return "\n\n".join([_text(collectives), *pages])


def inner() -> str:
    """Optimizers for large mini-batches, and schedules."""
    modules = {name: sys.modules[getattr(optimizers, name).__module__] for name in optimizers.__all__}
    return "\n\n".join(
        f"### {name}\n\n{_text(module)}" for name, module in (modules | {"Schedules": schedules}).items()
    )


def exit_codes() -> str:
    """Return a table of the exit codes, in the words of `orchestra --help`, with the errors behind them."""
    said = " ".join((verbs.__doc__ or "").split()).partition("Exit codes: ")[2]
    meanings = {int(code): words for code, words in re.findall(r"(\d+) ([^,.]+)", said)}
    behind = {code: [link(cls) for cls in error_classes() if cls.exit_code == code] for code in meanings}
    return table(("code", "meaning", "raised as"), ((str(c), m, ", ".join(behind[c])) for c, m in meanings.items()))


def error_classes() -> list[type[errors.OrchestraError]]:
    """Every error of the package, as its file has them."""
    found = [cls for cls in vars(errors).values() if inspect.isclass(cls) and issubclass(cls, errors.OrchestraError)]
    return [cls for cls in found if cls is not errors.OrchestraError]


def link(cls: type[Any]) -> str:
    """Return a link to the section of a class."""
    return f"[`{cls.__name__}`](#{cls.__name__.lower()})"


def error_tree() -> str:
    """Which error is a kind of which."""
    return "```text\n" + inspect.cleandoc(errors.__doc__ or "").partition("\n\n")[2].rstrip() + "\n```"


GENERATED: dict[str, Callable[[], str]] = {
    "catalogue": catalogue,
    "parts": parts,
    "algorithms": algorithms,
    "inner": inner,
    "exit-codes": exit_codes,
    "error-tree": error_tree,
}


def table(heading: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    heading = list(heading)
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _section(classes: list[type[Any]]) -> str:
    """Return the page of one file: its text, and the options of the classes that it defines."""
    names = [known.name_of(cls) for cls in classes]
    title = ", ".join(cls.__name__ for cls in classes)
    short = [f"`{name}`" for cls in classes for name in (known.short_of(cls),) if name]
    anchors = "".join(f'<a id="{name}"></a>' for name in names if len(names) > 1)
    blocks = [
        f"## {title}",
        f"{anchors}{', '.join(f'`{name}`' for name in names)}{', for short ' + short[0] if short else ''}",
        _text(sys.modules[classes[0].__module__]),
        *(f"Another name is `{name}`. {differs}" for cls in classes for name, differs in known.aliases_of(cls).items()),
        *(block for cls in classes for block in _options(cls, alone=len(classes) == 1)),
        "```bash\n" + "\n".join(_example(cls) for cls in classes) + "\n```",
    ]
    return "\n\n".join(blocks)


def _options(cls: type[Any], *, alone: bool) -> Iterator[str]:
    options = known.options(cls)
    if options:
        rows = ((f"`{k.name}`", f"`{k.default}`", k.range, k.about) for k in options)
        yield table(("option" if alone else f"option of `{known.name_of(cls)}`", "default", "range", "meaning"), rows)


def _example(cls: type[Any]) -> str:
    """Return a command with the last example of `orchestra explain`."""
    example = known.examples(cls)[-1]
    return f'orchestra run digits --workers {1 if example == "solo" else 4} --strategy "{example}"'


def _text(module: Any) -> str:
    """Return the docstring of a file, with each paper on its own line."""
    title, gap, rest = inspect.cleandoc(module.__doc__ or "").partition("\n\n")
    papers, more, after = rest.partition("\n\n")
    lines = papers.split("\n")
    for number, line in enumerate(lines[1:]):
        if '"' in line and "\n".join(lines[: number + 1]).count('"') % 2 == 0 and not line.startswith(" "):
            lines[number] += "<br>"
    return title + gap + "\n".join(lines) + more + after


def renewed(markdown: str) -> str:
    """Return a page with its generated blocks renewed from the code."""

    def block(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- made by scripts.pages: {name} -->\n\n{GENERATED[name]()}\n\n<!-- end: {name} -->"

    return MADE.sub(block, markdown)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """For mkdocs: a page before it is rendered; its links to files of the repository lead to pages of the site."""
    if page.file.src_uri.startswith(_SITE):
        return markdown
    return re.sub(r"\]\(\.\./(?=[\w./-]+\.md)", f"]({_SITE}/", markdown)


def on_files(files: Any, config: Any) -> Any:
    """For mkdocs: which files there are."""
    from mkdocs.structure.files import File

    for path in (path for pattern in ELSEWHERE for path in sorted(ROOT.glob(pattern))):
        name = f"{_SITE}/{path.relative_to(ROOT).as_posix()}"
        files.append(File.generated(config, name, content=path.read_text(encoding="utf-8")))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """For mkdocs: a page when it is rendered. The dashes of an option are no place to break a command."""
    return re.sub(r'(?<=<span class="w"> </span>)-[\w-]+', r'<span class="option">\g<0></span>', html)


if __name__ == "__main__":
    for path in sorted((ROOT / "docs").glob("*.md")):
        path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
