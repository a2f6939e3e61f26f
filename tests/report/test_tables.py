# SPDX-License-Identifier: Apache-2.0
"""What a report writes as Markdown and for spreadsheets: names cannot break out of it."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from tests.report.folders import make_run

from orchestra.report import escaping, model, tables
from orchestra.runs.budget import Target


def test_markdown_cannot_be_broken_out_of(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", strategy="a|b<i>*x*`(y)")
    text = tables.markdown(model.build([run], title="<b>|"))
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("    "))  # code is taken as it is
    assert "<" not in prose.replace("\\<", "")
    (line,) = [line for line in text.splitlines() if line.startswith("| a")]
    assert len(re.findall(r"(?<!\\)\|", line)) == len(model.build([run])["table"]["head"]) + 1


def test_spreadsheets_are_given_no_formulas(tmp_path: Path) -> None:
    told = model.build([make_run(tmp_path / "run", strategy="=HYPERLINK(1)")])
    (row,) = csv.DictReader(io.StringIO(tables.runs_csv(told)))
    assert row["strategy"] == "'=HYPERLINK(1)"
    assert float(row["final accuracy"]) == 0.9


@pytest.mark.parametrize(
    "name",
    ["=cmd|' /C calc'!A0", "+1", "-1", "@SUM(1)", " =1", "\t=1", "\n=1", "\uff1d1", '"=1', "a,b\n=c"],
)
def test_no_cell_begins_a_formula_whatever_a_run_is_called(name: str, tmp_path: Path) -> None:
    """In either table, in the names of figures as well; what was asked for is still there."""
    told = model.build([make_run(tmp_path / "run", strategy=name)])
    for run in told["runs"]:
        run["metrics"], run["strategy"] = {name: 1.0}, name
        run["scores"]["metrics"] = {name: run["scores"]["metrics"]["accuracy"]}
    for text in (tables.runs_csv(told), tables.curves_csv(told)):
        rows = [*csv.reader(io.StringIO(text))]
        assert len({len(row) for row in rows}) == 1
        strange = [
            c for row in rows for c in row if c.lstrip().startswith(("=", "+", "@", "\uff1d")) or c[:1].isspace()
        ]
        assert not strange
        assert any(c in (name, f"'{name}") for row in rows for c in row)
        assert not any(c.startswith("-") and not c[1:2].isdigit() for row in rows for c in row)


@pytest.mark.parametrize(
    "name",
    ["a|b", "`x`", "<img src=x onerror=alert(1)>", "[x](http://evil)", "http://evil.org", "www.evil.org", "~~x~~",
     "a\n# b", "# x", "- x", "1. x", "===", "x\n===", "$x$", "&lt;b&gt;", "a@b.org", "\\|", "![x](y)"],
)  # fmt: skip
def test_a_name_is_shown_as_it_is_by_markdown(name: str, tmp_path: Path) -> None:
    """Judged by a parser of Markdown: plain text, in a paragraph, in a list, in a table and below it."""
    visible = re.sub("\n", " ", name)
    assert inline(escaping.markdown(name)) == {visible}
    told = model.build(
        [make_run(tmp_path / "a", strategy=name), make_run(tmp_path / "b")], target=Target("accuracy", 0.5)
    )
    told["verdict"] |= {"baseline": name, "sentence": name, "doubts": [name]}
    text = tables.markdown(told | {"title": name, "why": [name], "commands": []})
    assert "http://" not in text
    assert "www.evil" not in text
    tokens = MarkdownIt().enable(["table", "strikethrough"]).parse(text)
    assert {t.type for t in tokens if t.type.endswith("_open")} <= {
        f"{kind}_open" for kind in ("heading", "paragraph", "table", "thead", "tbody", "tr", "th", "td", "bullet_list",
                                    "list_item")
    }  # fmt: skip
    kinds = {child.type for token in tokens for child in token.children or ()}
    assert kinds <= {"text", "strong_open", "strong_close", "text_special", "softbreak"}
    cells = [sum(t.type in ("td_open", "th_open") for t in row) for row in rows_of(tokens)]
    assert sorted({*cells}) == sorted({len(told["table"]["head"]), 2})  # the figures, and the settings


def inline(text: str) -> set[str]:
    """What a reader of Markdown sees, paragraph by paragraph."""
    tokens = MarkdownIt().enable(["table", "strikethrough"]).parse(text)
    assert {token.type for token in tokens} == {"paragraph_open", "inline", "paragraph_close"}
    children = [token.children or [] for token in tokens if token.type == "inline"]
    assert {child.type for some in children for child in some} <= {"text", "text_special"}
    return {"".join(child.content for child in some) for some in children}


def rows_of(tokens: list[Token]) -> Iterator[list[Token]]:
    starts = [i for i, token in enumerate(tokens) if token.type == "tr_open"]
    stops = [i for i, token in enumerate(tokens) if token.type == "tr_close"]
    return (tokens[start:stop] for start, stop in zip(starts, stops, strict=True))


def test_curves_for_a_spreadsheet(race: Path) -> None:
    rows = [*csv.DictReader(io.StringIO(tables.curves_csv(model.build([race]))))]
    scores = [row for row in rows if row["figure"] == "test accuracy" and row["run"].endswith("allreduce/seed0")]
    assert [float(row["value"]) for row in scores] == pytest.approx([0.09 * i for i in range(11)])
    assert float(scores[-1]["bytes"]) == 2 * 20 * 400
