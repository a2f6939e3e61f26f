# SPDX-License-Identifier: Apache-2.0
"""What a run writes down about where it comes from: the code, and the samples."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

import orchestra
from orchestra.cli import invoke
from orchestra.engine import fingerprint
from orchestra.report import settings
from orchestra.runs import reading

HERE = "version of the working directory"


@pytest.fixture(autouse=True)
def _git_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    fingerprint._commit.cache_clear()
    yield
    fingerprint._commit.cache_clear()


def run_here(out: str) -> dict[str, str]:
    assert invoke(["sim", "digits", "-n", "2", "--steps", "2", "--out", out, "--quiet"]) == 0
    return settings.settings_of(reading.load(Path(out)))


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_a_run_in_a_repository_names_its_commit(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(["git", *who, *words], check=True, capture_output=True, text=True).stdout.strip()

    assert HERE not in run_here("outside")
    git("init", "--quiet")
    fingerprint._commit.cache_clear()
    assert HERE not in run_here("empty")
    (tmp_path / "train.py").write_text("1")
    git("add", "train.py")
    git("commit", "--quiet", "--message", "first")
    fingerprint._commit.cache_clear()
    clean = run_here("clean")
    assert clean[HERE] == git("rev-parse", "HEAD")[:12]
    assert clean["version of orchestra"] == orchestra.__version__
    (tmp_path / "train.py").write_text("2")
    fingerprint._commit.cache_clear()
    changed = run_here("changed")
    assert changed[HERE] == f"{clean[HERE]} with changes"
    assert settings.conditions([clean, changed]) == ["", ""], "who commits between two seeds has not varied anything"


@pytest.mark.timed
def test_without_git_or_with_a_slow_one_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "the working directory" not in fingerprint.versions("1")
    fake = tmp_path / "git"
    fake.write_text("#!/bin/sh\nexec /bin/sleep 20\n")
    fake.chmod(0o755)
    monkeypatch.setattr(fingerprint, "_SOON", 0.2)
    fingerprint._commit.cache_clear()
    began = time.monotonic()
    assert "the working directory" not in fingerprint.versions("1")
    assert time.monotonic() - began < 10


class Ragged(Dataset[tuple[Tensor, int]]):
    """Samples of different lengths, which fit into no batch together."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.full((i + 1,), self.value), i


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        raise AssertionError("a stream may be read only once")


def test_a_sum_of_samples_tells_data_apart() -> None:
    x, y = torch.arange(100.0), torch.zeros(100)
    assert fingerprint.samples((x, y)) == fingerprint.samples((x.clone(), y.clone()))
    assert fingerprint.samples((x, y)) != fingerprint.samples((x, y + 1))
    assert fingerprint.samples(Ragged(1.0)) == fingerprint.samples(Ragged(1.0))
    assert fingerprint.samples(Ragged(1.0)) != fingerprint.samples(Ragged(2.0))
    assert fingerprint.samples(Stream()) is None
