# SPDX-License-Identifier: Apache-2.0
"""What measures time runs in the lane in which every test has a core."""

from __future__ import annotations

import ast
import re

from tests.architecture.test_architecture import ROOT, TEXTS, shown, tree_of
from tests.conftest import LANES, lanes_of


def measures_time(function: ast.AST) -> bool:
    """Whether a test asserts how much time has passed: `time.monotonic() - began < 5`."""
    passed = [
        compared.left
        for check in ast.walk(function)
        if isinstance(check, ast.Assert)
        for compared in ast.walk(check)
        if isinstance(compared, ast.Compare) and isinstance(compared.left, ast.BinOp)
    ]
    return any(re.match(r"time\.(monotonic|perf_counter|time)\(\) - ", ast.unparse(left)) for left in passed)


def test_what_measures_time_has_a_core() -> None:
    assert measures_time(ast.parse("def test() -> None:\n    assert time.time() - began < 5"))
    strange = [
        f"{shown(path)}: {node.name} lacks @pytest.mark.timed"
        for path in TEXTS
        if path.name.startswith("test_") and "timed" not in lanes_of(path)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef)
        and measures_time(node)
        and not any("timed" in ast.unparse(mark) for mark in node.decorator_list)
    ]
    assert not strange, "\n".join(strange)


def test_the_places_of_the_lanes_exist() -> None:
    places = [place for places in LANES.values() for place in places]
    gone = [place for place in places if not (ROOT / "tests" / place).exists()]
    assert not gone, "\n".join(gone)
