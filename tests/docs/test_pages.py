# SPDX-License-Identifier: Apache-2.0
"""What the pages take from the code is all there, and links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import pages
from tests.docs.blocks import DOCS, ROOT

from orchestra import errors
from orchestra.cli import part_text as known
from orchestra.collectives import ALGORITHMS
from orchestra.strategies.catalogue import PARTS, STRATEGIES

READ = [*sorted(DOCS.glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


@pytest.mark.parametrize("cls", [*STRATEGIES, *PARTS], ids=lambda cls: cls.__name__)
def test_the_catalogue_has_every_strategy_and_part_whole(cls: type) -> None:
    text = pages.catalogue() if cls in STRATEGIES else pages.parts()
    assert known.name_of(cls) in _anchors(text)
    assert known.page(cls) in text.replace("<br>\n", "\n")
    assert all(f"`{name}`. {differs}" in text for name, differs in known.aliases_of(cls).items())
    for option in known.options(cls):
        assert re.search(rf"^\| `{option.name}` \| `{re.escape(option.default)}` \|", text, re.MULTILINE), option


def test_every_algorithm_is_a_section() -> None:
    assert set(ALGORITHMS) <= _anchors(pages.algorithms())


def test_every_error_has_a_section_that_says_what_to_do() -> None:
    text = (DOCS / "errors.md").read_text(encoding="utf-8")
    for cls in pages.error_classes():
        (section,) = re.findall(rf"^### {cls.__name__}\n\n(.+?)\n\n(?=#)", text, re.MULTILINE | re.DOTALL)
        assert len(section.split()) > 15, cls
        assert cls.__name__ in pages.error_tree()


def test_every_exit_code_is_explained() -> None:
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", pages.exit_codes(), re.MULTILINE)}
    assert codes == {*range(11), 130, 143}
    assert {cls.exit_code for cls in pages.error_classes()} | {errors.OrchestraError.exit_code} <= codes


def test_all_that_is_generated_is_on_a_page() -> None:
    asked = [name for page in DOCS.glob("*.md") for name in pages.MADE.findall(page.read_text("utf-8"))]
    assert sorted(asked) == sorted(pages.GENERATED)


def test_generated_parts_have_begin_and_end_marks() -> None:
    for page in DOCS.glob("*.md"):
        text = pages.MADE.sub("", page.read_text("utf-8"))
        assert "made by scripts.pages:" not in text, page
        assert "<!-- end: " not in text, page


@pytest.mark.parametrize("page", READ, ids=lambda page: page.stem)
def test_links_and_pictures_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", _without_code(page.read_text(encoding="utf-8"))):
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name}: {target}"
        if page.parent == DOCS and file.suffix == ".md" and DOCS not in file.parents:
            assert any(file.match(pattern) for pattern in pages.ELSEWHERE), f"{target} is not in the site"
        if anchor:
            assert anchor in _anchors(file.read_text(encoding="utf-8")), f"{page.name}: {target}"


def test_both_front_pages_quote_the_same_verdict() -> None:
    first, second = (
        re.findall(r"^> .*", page.read_text(encoding="utf-8"), re.MULTILINE)
        for page in (ROOT / "README.md", DOCS / "index.md")
    )
    assert first == second != []


def test_every_picture_is_shown_and_small() -> None:
    shown = "".join(page.read_text(encoding="utf-8") for page in READ)
    for picture in (DOCS / "screenshots").iterdir():
        assert f"screenshots/{picture.name})" in shown, picture.name
        assert picture.stat().st_size < 300e3, picture.name


def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="`make docs` installs it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "slow momentum" in (tmp_path / "catalogue.html").read_text(encoding="utf-8")


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$|`[^`\n]+`", "", text, flags=re.MULTILINE | re.DOTALL)


def _anchors(text: str) -> set[str]:
    """Where a page can be linked to: its headings, and what names itself."""
    named = set(re.findall(r'\{ #([\w-]+) \}|<a id="([\w-]+)">', text))
    headings = re.findall(r"^#+ (.+?)(?: \{.*\})?$", text, re.MULTILINE)
    slugs = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}
    return slugs | {name for pair in named for name in pair if name}


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_what_is_committed_is_what_would_be_made(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert pages.renewed(text) == text, "`python -m scripts.pages` renews it"
