# SPDX-License-Identifier: Apache-2.0
"""A test that asserts how many seconds something took runs in the lane in which every test has a core."""

from __future__ import annotations

import ast
import re

import pytest
from tests.architecture.test_architecture import ROOT, TEXTS, shown, tree_of
from tests.conftest import LANES, lanes_of


def _is_difference(found: ast.AST) -> bool:
    """Whether it is a difference such as `time.monotonic() - began`."""
    return bool(re.match(r"time\.(monotonic|perf_counter|time)\(\) - ", ast.unparse(found)))


def measures_time(function: ast.FunctionDef) -> bool:
    """Whether a test asserts that so much time has passed at most.

    It compares a difference, or has a function that returns one; or the seconds of a run whose seconds are real.
    """
    compared = [
        found.left
        for check in ast.walk(function)
        if isinstance(check, ast.Assert)
        for found in ast.walk(check)
        if isinstance(found, ast.Compare) and any(isinstance(op, ast.Lt | ast.LtE) for op in found.ops)
    ]
    nested = [part for body in function.body for part in ast.walk(body) if isinstance(part, ast.FunctionDef)]
    returned = [part.value for inner in nested for part in ast.walk(inner) if isinstance(part, ast.Return)]
    real = re.search(r"\b(Local|Attached)\(", ast.unparse(function))
    return (
        any(_is_difference(left) for left in compared)
        or bool(compared and any(value is not None and _is_difference(value) for value in returned))
        or bool(real and any(isinstance(left, ast.Attribute) and left.attr == "seconds" for left in compared))
    )


@pytest.mark.parametrize(
    ("text", "measures"),
    [
        ("assert time.time() - began < 5", True),
        ("assert 1 <= time.time() - began", False),
        ("def call():\n  return time.monotonic() - began\n assert call() < 2", True),
        ("assert train(cluster=Local(workers=2)).summary.seconds < 5", True),
        ("assert train(cluster=Simulated(workers=2)).summary.seconds < 5", False),
    ],
)
def test_measuring_is_recognized(text: str, measures: bool) -> None:
    (function,) = ast.parse(f"def test():\n {text}").body
    assert isinstance(function, ast.FunctionDef)
    assert measures_time(function) is measures


def test_what_measures_time_has_a_core() -> None:
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
