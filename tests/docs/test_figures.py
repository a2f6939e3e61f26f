# SPDX-License-Identifier: Apache-2.0
"""Every figure that a page quotes is the one in the file that the page names as its source."""

from __future__ import annotations

import json
import re
import shlex
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from scripts import asynchronous, front_page, pictures
from tests.docs import figures
from tests.docs.blocks import DOCS, ROOT, blocks
from tests.docs.figures import Passage, passages, problems, unsourced

READ = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
QUOTING = [*READ, ROOT / "benchmarks" / "RESULTS.md", *sorted(ROOT.glob("experiments/*/README.md"))]
SOURCED = [passage for page in QUOTING for passage in passages(page, ROOT) if passage.sources]


@pytest.mark.parametrize("passage", SOURCED, ids=lambda passage: passage.where)
def test_figures_are_those_of_their_source(passage: Passage) -> None:
    assert problems(passage, ROOT) == []


@pytest.mark.parametrize("page", READ, ids=lambda page: page.stem)
def test_results_name_their_source(page: Path) -> None:
    found = [f"{passage.where}: {sentence}" for passage in passages(page, ROOT) for sentence in unsourced(passage)]
    assert found == [], "tests/docs/figures.py says how to name the source"


def test_every_comment_belongs_to_a_passage() -> None:
    written = sum(page.read_text(encoding="utf-8").count("<!-- figures: ") for page in QUOTING)
    assert written == sum(len(passage.sources) for passage in SOURCED) > 0


# The front page.


def commands_of(page: Path) -> list[list[str]]:
    lines = [line for block in blocks(page) for line in block.commands()]
    return [shlex.split(line) for line in lines if line.startswith("orchestra compare")]


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "index.md"], ids=lambda page: page.stem)
def test_the_figures_of_the_front_page_are_those_of_its_command(page: Path) -> None:
    saved = json.loads(front_page.FIGURES.read_text(encoding="utf-8"))
    assert shlex.split(saved["command"]) in commands_of(page)
    assert saved["command"] == front_page.COMMAND, saved["made_by"]


@pytest.mark.parametrize("name", asynchronous.NETWORKS)
def test_the_figures_of_asynchronous_training_are_those_of_its_commands(name: str) -> None:
    saved = json.loads(asynchronous.FIGURES.read_text(encoding="utf-8"))
    assert shlex.split(saved[name]["command"]) in commands_of(DOCS / "choosing.md")
    assert saved[name]["command"] == asynchronous.COMMAND.format(asynchronous.NETWORKS[name]), saved["made_by"]


def test_one_rate_for_all_gives_the_order_that_the_readme_says() -> None:
    first, *_ = json.loads(front_page.FIGURES.read_text(encoding="utf-8"))["untuned"]
    assert f"(`--no-tune`), `{first['strategy']}` is first" in " ".join((ROOT / "README.md").read_text("utf-8").split())


def test_pictures_of_the_comparison_show_its_verdict() -> None:
    verdict = json.loads(front_page.FIGURES.read_text(encoding="utf-8"))["verdict"]
    held = {path.stem: [*pictures.labels(path.read_bytes())] for path in pictures.SHOTS.glob("*.png")}
    assert [verdict] == held["report-overview"] == held["report-compare-dark"] == held["report-phone-dark"]


# The test itself.


@pytest.mark.parametrize("passage", SOURCED, ids=lambda passage: passage.where)
def test_any_other_number_on_a_page_is_found(passage: Passage) -> None:
    for number in {*passage.numbers}:
        at = re.compile(rf"(?<![\w.,]){re.escape(number)}(?![\w.,]*\d)")
        text = at.sub(f"{number}7", passage.prose, count=1)
        assert text == passage.prose or problems(Passage("here", text, passage.sources), ROOT), number


@pytest.mark.parametrize("passage", SOURCED, ids=lambda passage: passage.where)
def test_any_other_number_in_a_source_is_found(passage: Passage, monkeypatch: pytest.MonkeyPatch) -> None:
    read = figures.read
    monkeypatch.setattr(figures, "read", lambda path: _changed(read(path)))
    assert len(problems(passage, ROOT)) >= sum(len(source.figures) or 1 for source in passage.sources)


_OTHER = str.maketrans("0123456789", "5678901234")


def _changed(document: Any) -> Any:
    """The same document with other numbers; names stay."""
    factors = count(2)

    def other(value: Any) -> Any:
        match value:
            case dict():
                first = next(iter(value), None)
                return {k: v if k == first and isinstance(v, str) else other(v) for k, v in value.items()}
            case list():
                return [other(entry) for entry in value]
            case str():
                return value.translate(_OTHER)
            case int() | float():
                return next(factors) * (value + 1)
        return value

    return other(document)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    claims = [{"words": "it is sooner", "holds": True, "figures": {"times": 1.83, "share": 0.047}}]
    rows = [{"variant": "plain", "seed": seed, "score": 90.0 + seed} for seed in range(3)]
    (tmp_path / "results.json").write_text(json.dumps({"claims": claims, "rows": rows, "verdict": "a wins by 2."}))
    table = "| who | step, ms |\n|---|---|\n| ours | 62.0 (54.7 to 78.7) |"
    (tmp_path / "RESULTS.md").write_text(f"# All\n\n## Step\n\n{table}\n\nGoal: at most 1/8 (here 0.068).\n")
    return tmp_path


def told(folder: Path, text: str) -> list[str]:
    (folder / "page.md").write_text(text)
    return [
        problem.partition(": ")[2]
        for passage in passages(folder / "page.md", folder)
        for problem in [
            *problems(passage, folder),
            *(f"{passage.where}: {sentence}" for sentence in unsourced(passage)),
        ]
    ]


def test_a_place_in_a_file_gives_its_value(folder: Path) -> None:
    saved, text = figures.read(folder / "results.json"), figures.read(folder / "RESULTS.md")
    for document, place, value in (
        (saved, "claims / it is sooner / times", 1.83),
        (saved, "claims / it is / share / percent", pytest.approx(4.7)),
        (saved, "rows / plain / score / mean", 91.0),
        (saved, "rows / score / most", 92.0),
        (saved, "rows / score / most − rows / score / least", 2.0),
        (saved, "rows / score / median ÷ rows / score / median", 1.0),
        (text, "Step / ours / step, ms", "62.0 (54.7 to 78.7)"),
        (text, "Step / Goal: at most", "Goal: at most 1/8 (here 0.068)."),
    ):
        assert figures.look_up(document, place) == value
    for place in ("claims / it is later / times", "rows / score", "rows / plain / seconds", "verdict / times"):
        with pytest.raises(AssertionError, match=re.escape(place)):
            figures.look_up(saved, place)


def test_rounding() -> None:
    assert all(figures.agrees(number, 0.275) for number in ("0.275", "0.28", "0.3"))
    assert not any(figures.agrees(number, 0.275) for number in ("0.274", "0.29", "0.2", "0.280"))
    assert figures.agrees("2e-7", 1.5351e-7)
    assert not figures.agrees("1e-7", 1.5351e-7)
    assert figures.agrees("1,155", 1155.3)
    assert figures.agrees("-0.01", -0.012)


def test_figures_without_a_source_are_reported(folder: Path) -> None:
    comment = "<!-- figures: results.json\n1.8 = claims / it is sooner / times; settings = 3\n-->\n"
    assert told(folder, f"{comment}Of 3 runs, 1.8 times sooner.\n") == []
    assert told(folder, f"{comment}\n| a | b |\n|---|---|\n| 3 | 1.8 `k=4` [5](https://a.b/6) |\n") == []
    assert told(folder, f"{comment}Of 3 runs, 1.9 times sooner.\n") == [
        "1.8 has a source, but does not stand there", "1.9 is neither a figure nor a setting",
    ]  # fmt: skip
    assert told(folder, f"{comment.replace('1.8', '1.9')}Of 3 runs, 1.9 times sooner.\n") == [
        "1.9 is 1.83 in results.json, claims / it is sooner / times"
    ]
    assert told(folder, f"{comment}Of 3 runs, 1.8 times sooner.\n\nAnd 1.8 times sooner.\n") == [
        "And 1.8 times sooner."
    ]
    quote = "<!-- figures: results.json\nquote = verdict\n-->\n"
    assert told(folder, f"{quote}> a wins\n> by 2.\n") == []
    assert told(folder, f"{quote}> a wins\n> by 20.\n")


def test_what_looks_like_a_result_needs_a_source_or_a_reason(folder: Path) -> None:
    for sentence in (
        "It is 1.5 times as fast.", "The median is 3 s.", "That is 7 % of a step.", "It ends 0.3 points behind.",
        "The link gave 94 Mbit/s.", "A median error of 3.6 %.", "Both agree to 1e-7.", "It has 1.1 GB.",
        "It is ready 40 seconds after that.", "Of 2 runs one takes a minute.",
    ):  # fmt: skip
        assert told(folder, f"{sentence}\n") == [sentence]
        assert told(folder, f"<!-- no figure: it is a limit -->\n{sentence}\n") == []
        assert told(folder, f"```\n{sentence}\n```\n") == []
    for sentence in ("It needs 4 workers.", "With its 95 % interval.", "It is twice as fast.", "Use `--rate 5 MB/s`."):
        assert told(folder, f"{sentence}\n") == []
