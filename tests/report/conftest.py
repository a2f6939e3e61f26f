# SPDX-License-Identifier: Apache-2.0
"""A comparison whose figures are known."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.report.folders import make_race

RACE = {"allreduce": [0.1, 0.11, 0.12], "ps(consistency=asp)": [0.06, 0.05, 0.07], "localsgd": [0.05, 0.06, 0.05]}


@pytest.fixture
def race(tmp_path: Path) -> Path:
    return make_race(tmp_path / "race", RACE)
