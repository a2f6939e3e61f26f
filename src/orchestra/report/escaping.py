# SPDX-License-Identifier: Apache-2.0
"""Escaping, so that names and messages appear as plain text in documents and spreadsheets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_CONTROL = re.compile("[\x00-\x1f\x7f\x85\u2028\u2029]+")  # a new line would begin another row, or another paragraph
_MARKUP = re.compile(
    r"[\\|<>*_`\[\]~&$@]|:(?=//)|(?<=www)\.", re.IGNORECASE
)  # with those of addresses, which become links
_LEADING = re.compile(r"^(\s*)(#+(?=\s|$)|[-+](?=\s+\S)|=+(?=\s*$)|-{2,}(?=\s*$)|\d+(?=[.)]\s))")
# A spreadsheet evaluates text that begins with one of these, which have wide forms as well.
_FORMULAS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def markdown(text: str) -> str:
    r"""Escape text so that Markdown shows it unchanged, on one line.

    >>> markdown("a|b <i>\n=1"), markdown("# x"), markdown("1. x"), markdown("http://x")
    ('a\\|b \\<i\\> =1', '\\# x', '1\\. x', 'http\\://x')
    """
    line = _MARKUP.sub(r"\\\g<0>", _CONTROL.sub(" ", text))
    return _LEADING.sub(_escaped, line)


def _escaped(found: re.Match[str]) -> str:
    space, mark = found.groups()
    return f"{space}{mark}\\" if mark.isdigit() else f"{space}\\{mark}"


def table(lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown; the first line is its head."""
    head, *rows = ["| " + " | ".join(map(markdown, line)) + " |" for line in lines]
    return "\n".join([head, "|" + " --- |" * len(lines[0]), *rows])


def cell(value: Any) -> Any:
    """Return a value for a CSV file: text that a spreadsheet would evaluate gets an apostrophe in front.

    >>> cell("=1+1"), cell(" @x"), cell("a=1"), cell(-3)
    ("'=1+1", "' @x", 'a=1', -3)
    """
    if isinstance(value, str) and (value[:1] in ("\t", "\r", "\n") or value.lstrip().startswith(_FORMULAS)):
        return f"'{value}"
    return value
