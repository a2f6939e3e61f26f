# SPDX-License-Identifier: Apache-2.0
"""What ten more strategies cost `make test`: copies of those in the catalogue, under other names."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS, CORES = 30, 2
COPIES = """
def _copied(row: Row, time: str = "") -> Row:
    name = f"Copied{time}{row.strategy.__name__}"
    cls = dataclass(frozen=True, kw_only=True)(type(name, (row.strategy,), {"__module__": __name__}))
    globals()[name] = cls
    renamed = tuple(re.sub(r"^\\w+", name.lower(), text) for text in row.examples)
    return replace(row, strategy=cls, short=None, other_names={}, examples=renamed)


_SMALL = [row for row in ROWS if row.strategy not in (ParameterServer, StrategySwitch)]  # without parts of their own
_AGAIN = [row for row in ROWS if row.strategy in (Downpour, EASGD)]
ROWS = (*ROWS, *map(_copied, _SMALL), *(_copied(row, "Again") for row in _AGAIN))
assert len(_SMALL) + len(_AGAIN) == 10
"""
EVERY = ("tests/laws", "tests/inputs/test_not_finite.py", "tests/report/test_formulas.py", "tests/transports")


def processor_seconds(source: Path, chosen: str) -> tuple[float, str]:
    """Of the tests of the parallel lane whose names hold a word, with the package in a folder; and the last line."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", f"pythonpath={source} {ROOT}",
         *(str(ROOT / path) for path in EVERY), "-m", "not timed and not nightly", "-k", chosen],
        env=os.environ | {"PYTHONPATH": f"{source}:{ROOT}"}, capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode in (0, 5), done.stdout  # 5: none was chosen
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout.splitlines()[-1]


@pytest.mark.timed
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_ten_more_strategies_add_at_most_half_a_minute(tmp_path: Path) -> None:
    source = tmp_path / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
    catalogue = source / "orchestra" / "strategies" / "catalogue.py"
    text = catalogue.read_text().replace('"""The catalogue', '"""Bytes: see the originals. The catalogue', 1)
    text = text.replace("\nimport sys\n", "\nimport re\nimport sys\n", 1)
    text = text.replace("\nSTRATEGIES: ", f"{COPIES}\nSTRATEGIES: ", 1)
    catalogue.write_text(text)
    nothing, _ = processor_seconds(source, "no_test_has_this_name")
    copies, said = processor_seconds(source, "copied")
    tests = int(re.search(r"(\d+) passed", said)[1])  # type: ignore[index]
    print(f"{tests} tests, {copies - nothing:.0f} processor seconds")
    assert tests > 400
    assert (copies - nothing) / CORES <= SECONDS, said
