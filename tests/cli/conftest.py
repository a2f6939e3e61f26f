# SPDX-License-Identifier: Apache-2.0
"""Most command lines run inside the test's process, where torch is imported and the warm process waits already."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orchestra.cli import invoke


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out.splitlines()[-1])


Orchestra = Callable[..., Said]


@pytest.fixture
def orchestra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Orchestra:
    """Run a command line in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments: str) -> Said:
        capfd.readouterr()
        code = invoke(arguments)
        out, err = capfd.readouterr()
        return Said(code, out, err)

    return call


def story(path: Path | str) -> dict[str, Any]:
    """What a page is drawn from."""
    packed = re.search(r'id="report">([^<]+)<', Path(path).read_text())
    assert packed is not None
    found: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    return found
