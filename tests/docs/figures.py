# SPDX-License-Identifier: Apache-2.0
"""Figures that pages quote, and the files they come from. Comments that readers of a page do not see name the source.

    <!-- figures: experiments/warmup/results.json
    0.3 = claims / with gradual warm-up / behind
    settings = 8
    -->
    8 times the batch ends 0.3 points behind.

The comment belongs to the passage after it: a paragraph, a list, a table or a quotation, up to the next empty line.
Several comments may precede one passage, one for each file. In a passage with a source every number must be

    0.3 = place        a figure: the value at that place in the file, rounded to the digits that the page shows
    settings = 8 5     no result: what the experiment was set to, or a number that belongs to a name

or the passage as a whole is a text of the file: `quote = place`. Instead of a new line, `; ` may separate two of them.

A place is a way into the file, its parts separated by ` / `. In a JSON object a part is a key; in a list it is the name
of entries, or how the name begins. The name of an entry is its first value. A Markdown file is an object of sections,
each a list of paragraphs and rows of tables; the columns are keys. Of several values, `mean`, `median`, `least` or
`most` makes one, and `percent` multiplies by 100. `a ÷ b` and `a − b` calculate with two places.

`<!-- no figure: why -->` before a passage says that what looks like a result is none.
"""

from __future__ import annotations

import json
import operator
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from scripts.pages import MADE

NUMBER = re.compile(r"(?<![\w.,])(?<![A-Za-z]-)(?:(?<![\w)])[-−])?\d+(?:,\d{3}(?!\d))*(?:\.\d+)?(?:e[-−]?\d+)?")
# Words of a sentence that has a result in it if it has a number as well.
_RESULT = re.compile(
    r"\d %(?! interval)|\d times (?:as|more|less|sooner|faster|slower|longer)|\bpoints? (?:behind|ahead)|\bmedian\b"
    r"|\berrors? of\b|±|\b(?:took|gave|reached)\b|[kMG]B/s|[kMG]bit/s|samples/s|virtual s\b|\b\de-\d|\bmeasured\b"
    r"|\d [GMk]B\b|\bseconds after\b|\b(?:minutes?|hours?)\b"
)
_NOT_PROSE = re.compile(r"`[^`]*`|!?\[[^\]]*\]\(https?:[^)]*\)|(?<=\])\([^)]*\)|<[^>]*>")
_MANY: dict[str, Callable[[list[float]], float]] = {
    "mean": statistics.fmean, "median": statistics.median, "least": min, "most": max,
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """What one comment says."""

    file: str
    figures: tuple[tuple[str, str], ...]  # (number, place)
    settings: frozenset[str]
    quote: str | None = None  # a place


@dataclass
class Passage:
    """A paragraph, list, table or quotation, and the comments before it."""

    where: str  # page:line
    text: str
    sources: list[Source] = field(default_factory=list)
    excuse: str = ""  # why it needs no source

    @property
    def prose(self) -> str:
        """The text without code, addresses and what belongs to Markdown."""
        return _NOT_PROSE.sub(" ", re.sub(r"^> ?", "", self.text, flags=re.MULTILINE))

    @property
    def numbers(self) -> list[str]:
        """All numbers of the prose, as they are written."""
        return numbers(self.prose)


def numbers(text: str) -> list[str]:
    """The numbers of a text as they are written, with a plain minus."""
    return [match.replace("−", "-") for match in NUMBER.findall(text)]


def passages(page: Path, root: Path) -> Iterator[Passage]:
    """All passages of a page but code and what is generated from code."""
    text = MADE.sub(lambda match: "\n" * match[0].count("\n"), page.read_text(encoding="utf-8"))
    sources: list[Source] = []
    excuse = ""
    pattern = (
        r"^```.*?^```$|^<!-- (?P<comment>.*?) ?-->$"
        r"|^(?!<!-- |```)\S[^\n]*(?:\n(?!<!-- |```)[^\n]*\S[^\n]*)*"
    )
    for match in re.finditer(pattern, text, re.MULTILINE | re.DOTALL):
        comment, where = match["comment"], f"{page.relative_to(root)}:{text.count(chr(10), 0, match.start()) + 1}"
        if comment is None:
            if not match[0].startswith("```"):
                yield Passage(where, match[0], sources, excuse)
            sources, excuse = [], ""
        elif comment.startswith("figures:"):
            sources.append(_source(comment.removeprefix("figures:"), where))
        elif comment.startswith("no figure:"):
            excuse = comment.removeprefix("no figure:").strip()


def _source(comment: str, where: str) -> Source:
    file, *lines = (line.strip() for line in re.split(r"\n|; ", comment.strip()))
    said = [line.partition(" = ")[::2] for line in lines]
    assert all(place for _, place in said), f"{where}: each line of a comment is `number = place`"
    by_name = {name: place for name, place in said if name in ("settings", "quote")}
    figures = tuple((name, place.strip()) for name, place in said if name not in by_name)
    assert all(NUMBER.fullmatch(number) for number, _ in figures), f"{where}: not a number: {figures}"
    return Source(file, figures, frozenset(by_name.get("settings", "").split()), by_name.get("quote"))


def problems(passage: Passage, root: Path) -> list[str]:
    """What a passage with sources gets wrong; nothing without sources."""
    found, known = [], set[str]()
    for source in passage.sources:
        document = read(root / source.file)
        known |= source.settings
        for number, place in source.figures:
            known.add(number)
            if number not in passage.numbers:
                found.append(f"{passage.where}: {number} has a source, but does not stand there")
            value = look_up(document, place)
            if not agrees(number, value):
                found.append(f"{passage.where}: {number} is {value} in {source.file}, {place}")
        if source.quote is not None:
            text = str(look_up(document, source.quote))
            known.update(numbers(text))
            if " ".join(passage.prose.split()) != text:
                found.append(f"{passage.where}: {source.file} says: {text}")
    missing = [number for number in passage.numbers if passage.sources and number not in known]
    return found + [f"{passage.where}: {number} is neither a figure nor a setting" for number in missing]


def unsourced(passage: Passage) -> list[str]:
    """The sentences of a passage that look like results, if it names no source."""
    if passage.sources or passage.excuse:
        return []
    sentences = re.split(r"(?<=[.:;])\s+|\s*\|\s*", passage.prose)
    return [sentence for sentence in sentences if NUMBER.search(sentence) and _RESULT.search(sentence)]


def agrees(number: str, value: float | str) -> bool:
    """Whether a value, rounded, is the quoted number; of a text, whether one of its numbers is."""
    if isinstance(value, str):
        return any(agrees(number, float(other.replace(",", ""))) for other in numbers(value))
    digits, _, exponent = number.replace(",", "").partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
    return abs(float(f"{digits}e{exponent or 0}") - value) <= 0.5 * unit * (1 + 1e-6)


def look_up(document: Any, place: str) -> float | str:
    """The number or text at a place."""
    for sign, calculate in (("÷", operator.truediv), ("−", operator.sub)):
        left, found, right = place.partition(f" {sign} ")
        if found:
            return float(calculate(look_up(document, left), look_up(document, right)))
    value = document
    for part in place.split(" / "):
        value = _step(value, part, place)
    if isinstance(value, list) and value and all(entry == value[0] for entry in value):
        value = value[0]
    assert isinstance(value, int | float | str), f"{place}: leads to {type(value).__name__}, not to one value"
    return value


def _step(value: Any, part: str, place: str) -> Any:
    """Go one part further: to the key of an object, to the entries of a list with that name, or into all of them."""
    if isinstance(value, dict):
        assert part in value, f"{place}: {part} is not there"
        return value[part]
    entries = value if isinstance(value, list) else [value]
    if entries and all(isinstance(entry, int | float) for entry in entries):
        assert part == "percent" or part in _MANY, f"{place}: {part} of numbers"
        return [100 * entry for entry in entries] if part == "percent" else _MANY[part](entries)
    objects = [entry | entry.get("figures", {}) for entry in entries if isinstance(entry, dict)]
    found = (
        [entry for entry in entries if _name(entry) == part]
        or [entry[part] for entry in objects if part in entry]
        or [entry for entry in entries if _name(entry).startswith(part)]
    )
    assert found, f"{place}: {part} is not there"
    return found


def _name(entry: Any) -> str:
    return str(next(iter(entry.values()))) if isinstance(entry, dict) else str(entry)


@cache
def read(path: Path) -> Any:
    """A file as places go into it."""
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if path.suffix == ".json" else sections(text)


def sections(text: str) -> dict[str, list[Any]]:
    """Markdown: the paragraphs and rows of tables below each heading."""
    found: dict[str, list[Any]] = {}
    text = re.sub(r"^<!--.*?-->$\n?", "", text, flags=re.MULTILINE | re.DOTALL)
    for piece in re.split(r"^#+ ", text, flags=re.MULTILINE)[1:]:
        heading, _, body = piece.partition("\n")
        entries = found.setdefault(heading.strip(), [])
        for paragraph in re.split(r"\n\s*\n", body.strip()):
            lines = paragraph.splitlines()
            if paragraph.startswith("|"):
                columns, _, *rows = ([cell.strip() for cell in line.strip()[1:-1].split("|")] for line in lines)
                entries += [dict(zip(columns, row, strict=True)) for row in rows]
            else:
                entries.append(" ".join(lines))
    return found
