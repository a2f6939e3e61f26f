# SPDX-License-Identifier: Apache-2.0
"""A strategy is added by its file and one row of the catalogue, in this package or in another one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.docs.blocks import DOCS, ROOT, blocks

EXAMPLE = ROOT / "examples" / "growing_rounds"
PAGE = {block.title: block.text for block in blocks(DOCS / "adding.md") if block.language == "python"}

# What the rest of the system makes of a strategy: run with a copy of the package that has one more.
PLACES = """
import orchestra
from orchestra.core.traffic import RunSize
from orchestra.engine import expression
from orchestra.strategies.catalogue import expected_traffic
from scripts import pages
from tests.laws.examples import EXAMPLES
from tests.laws.test_laws import test_bytes_on_the_wire_are_those_of_the_docstring as bytes_law
from tests.laws.test_laws import test_frozen_hashable_and_read_back as values_law

assert "Growing" in orchestra.__all__
strategy = orchestra.Growing(tau=3)
assert expression.parse(expression.show(strategy)) == strategy
assert expected_traffic(strategy, RunSize(workers=2, steps=7, layers=(10,))).workers == [4 * 40] * 2
assert "\\n## Growing\\n" in pages.catalogue()
mine = [example for example in EXAMPLES if isinstance(example, orchestra.Growing)]
assert strategy in mine and len(mine) > 1
for example in mine:
    values_law(example)
    bytes_law(example, 2)
"""


def run(*words: str, path: list[Path], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, *words], env=environment, cwd=folder, capture_output=True, text=True, check=False
    )


def orchestra(*words: str, path: list[Path], folder: Path) -> str:
    done = run("-m", "orchestra", *words, path=path, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_file_and_a_row_are_all_it_takes(tmp_path: Path) -> None:
    """What `docs/adding.md` says, word for word."""
    source = tmp_path / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
    package = source / "orchestra" / "strategies"
    (package / "growing.py").write_text(PAGE["growing.py"])
    before = (package / "catalogue.py").read_text()
    after = before.replace("\nROWS = (\n", f"\nROWS = (\n{PAGE[None].strip()},\n").replace(
        "from orchestra.strategies import ",
        "from orchestra.strategies.growing import Growing as Growing\nfrom orchestra.strategies import growing, ",
        1,
    )
    (package / "catalogue.py").write_text(after)
    path = [source, ROOT]
    done = run("-c", PLACES, path=path, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "growing" in [
        entry["name"] for entry in json.loads(orchestra("strategies", "--json", path=path, folder=tmp_path))
    ]
    test = PAGE["test_growing.py"].replace("from growing import", "from orchestra.strategies.growing import")
    (tmp_path / "test_growing.py").write_text(test)
    done = run("-m", "pytest", "-q", "test_growing.py", path=path, folder=tmp_path)
    assert done.returncode == 0, done.stdout


def test_the_example_is_the_strategy_of_the_page() -> None:
    text = PAGE["growing.py"].replace(
        "import ExpectedTraffic, RunSize\n",
        "import ExpectedTraffic, RunSize\nfrom orchestra.strategies.catalogue import Row\n",
    )
    row = PAGE[None].replace("growing.traffic", "traffic")
    assert (EXAMPLE / "growing_rounds.py").read_text() == f"{text}\n\nROW = {row}"


# From another package.


def installed(folder: Path, values: dict[str, str]) -> Path:
    """What an installer would leave: the entry points of a package, where Python finds them."""
    about = folder / "growing_rounds-0.1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: growing-rounds\nVersion: 0.1\n")
    lines = [f"{name} = {value}" for name, value in values.items()]
    (about / "entry_points.txt").write_text("\n".join(["[orchestra.strategies]", *lines]) + "\n")
    return folder


@pytest.mark.nightly
def test_a_strategy_of_another_package_is_like_those_of_this_one(tmp_path: Path) -> None:
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    path = [installed(tmp_path / "site", project["entry-points"]["orchestra.strategies"]), EXAMPLE, ROOT / "src"]
    assert "Growing rounds" in orchestra("explain", "growing", path=path, folder=tmp_path)
    words = (
        "sim",
        "digits",
        "--strategy",
        "growing(tau=2)",
        "--workers",
        "2",
        "--steps",
        "6",
        "--out",
        "run",
        "--json",
    )
    report = json.loads(orchestra(*words, path=path, folder=tmp_path).splitlines()[-1])
    assert report["strategy"] == "growing(tau=2)"
    found = run("-c", "from orchestra.cli.recommend import _catalogue; print(_catalogue())", path=path, folder=tmp_path)
    assert "'growing'" in found.stdout, found.stderr


def test_a_package_that_cannot_be_used_is_named_and_left_out(tmp_path: Path) -> None:
    (tmp_path / "others.py").write_text("from orchestra.strategies.catalogue import ROWS\nTAKEN = ROWS[0]\nNONE = 1\n")
    values = {"a": "no_such_module:ROW", "b": "others:TAKEN", "c": "others:NONE"}
    path = [installed(tmp_path / "site", values), tmp_path, ROOT / "src"]
    done = run("-m", "orchestra", "explain", "slowmo", path=path, folder=tmp_path)
    assert done.returncode == 0
    assert "strategy no_such_module:ROW is left out: ModuleNotFoundError" in done.stderr
    assert "strategy others:TAKEN is left out: ValueError: the name allreduce, ddp is taken" in done.stderr
    assert "strategy others:NONE is left out: TypeError: must be a Row" in done.stderr


@pytest.mark.nightly
def test_the_example_is_a_package_that_pip_installs(tmp_path: Path) -> None:
    target = tmp_path / "site"
    done = run(
        "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(EXAMPLE), path=[], folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "Growing rounds" in orchestra("explain", "growing", path=[target, ROOT / "src"], folder=tmp_path)
