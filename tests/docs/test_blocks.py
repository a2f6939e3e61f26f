# SPDX-License-Identifier: Apache-2.0
"""Every command and every program in the documentation runs, or says why it is not run here."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from scripts import pages
from tests.docs.blocks import DOCS, ROOT, Block, Session, blocks

from orchestra.cli import invoke
from orchestra.cli.app import app

PAGES = [*sorted(DOCS.glob("*.md")), ROOT / "README.md"]
BLOCKS = [block for page in PAGES for block in blocks(page)]
HANDFUL = 8


@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run_in_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    session, said = Session(tmp_path), ""
    for block in blocks(page):
        session.run(block)
        if block.language == "text":
            assert block.text in said, block.where
        said = "".join(capfd.readouterr())


EXAMPLES = re.findall(r"^orchestra run digits .+$", pages.catalogue() + "\n" + pages.parts(), re.MULTILINE)


@pytest.mark.parametrize("command", EXAMPLES, ids=lambda command: command.partition("--strategy ")[2].strip('"'))
def test_the_examples_of_the_catalogue_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert invoke([*shlex.split(command)[1:], "--steps", "2"]) == 0  # all of their 20 epochs would take minutes


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent == DOCS], ids=lambda page: page.stem)
def test_no_block_hides_in_another_language(page: Path) -> None:
    assert pages.MADE.sub("", page.read_text(encoding="utf-8")).count("\n```") == 2 * len(blocks(page))
    assert {block.language for block in blocks(page)} <= {"bash", "python", "text", "toml"}


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    reasons = [(block.where, block.not_run) for block in BLOCKS if block.not_run is not None]
    assert len(reasons) <= HANDFUL
    assert all(len(reason.split()) >= 2 for _, reason in reasons), reasons
    assert all(re.fullmatch(r"|not run: .+|exit: \d+", block.mark) for block in BLOCKS), "a mark that is not known"


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=lambda block: block.where)
def test_programs_can_be_read(block: Block) -> None:
    ast.parse(block.text)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
def test_every_file_of_a_page_is_used_by_a_later_command(page: Path) -> None:
    found = blocks(page)
    for number, block in enumerate(found):
        if block.title:
            later = "\n".join(b.text for b in found[number + 1 :] if b.language == "bash" and b.not_run is None)
            assert block.title in later, block.where


def _commands_in_passing() -> list[str]:
    """What the README lists as `orchestra ...   what it does`: pieces between wide gaps and semicolons."""
    lines = [line for block in blocks(ROOT / "README.md") if not block.language for line in block.text.splitlines()]
    pieces = [piece for line in lines for piece in re.split(r"\s{2,}|; ", line)]
    return [piece for piece in pieces if piece.startswith("orchestra ")]


@pytest.mark.parametrize("command", _commands_in_passing())
def test_commands_in_the_readme_have_the_words_they_use(command: str) -> None:
    _read(typer.main.get_command(app), command)


def _read(group: Any, command: str) -> None:
    """Find the verb and let it read its options, without carrying it out."""
    arguments = shlex.split(command.partition(" > ")[0])[1:]
    context = group.make_context("orchestra", list(arguments))
    while arguments and hasattr(group, "resolve_command"):
        name, group, arguments = group.resolve_command(context, arguments)
        context = group.make_context(name, list(arguments), parent=context)
