# SPDX-License-Identifier: Apache-2.0
"""Tuning on a stream, and by which script and arguments a try is known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.cli.conftest import Orchestra
from tests.cli.tunings import AS_RECIPE, STREAM
from torch.utils.data import IterableDataset

from orchestra.cli import compare, sources, streams, tuning_cache
from orchestra.cli.candidates import Setting
from orchestra.cli.options import Options
from orchestra.cli.tuning import Tuning

AS_SCRIPT = "orchestra.train(budget=orchestra.Epochs(2), cluster=orchestra.Local(workers=2), **what)"


@pytest.mark.parametrize("ending", [pytest.param(AS_RECIPE, marks=pytest.mark.nightly), AS_SCRIPT])
def test_strategies_are_tuned_on_a_stream(ending: str, orchestra: Orchestra) -> None:
    """Its parts of an epoch are steps: only whole passes over a stream end a run."""
    Path("mine.py").write_text(f"{STREAM}\n{ending}\n")
    said = orchestra("compare", "mine.py", "--sim", "-n", "2", "-s", "allreduce,solo", "--seeds", "1", "--out", "c")
    assert said.code == 0, said.err
    assert "· tuned ·" in said.out
    configs = {path.parts[1]: json.loads(path.read_text()) for path in Path("c").rglob("config.json")}
    assert {name: config["budget"] for name, config in configs.items()} == {
        "allreduce": ["epochs=2.0"],
        "solo": ["epochs=2.0"],
    }
    assert {name: config["snapshot_every"] for name, config in configs.items()} == {"allreduce": 1, "solo": 2}
    race = compare.prepare(sources.find("mine.py"), ["allreduce"], Options(workers=2, sim=True), 1, None, Path("d"))
    tries = [Tuning(race, 1)._race_of(Setting(name), 0.5).options_of(name, 1) for name in ("allreduce", "solo")]
    assert [(one.epochs, one.steps) for one in tries] == [(None, 10), (None, 20)]


def test_on_a_stream_without_an_end_nothing_is_tuned(
    orchestra: Orchestra, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(streams, "_LONGEST", 0.0)
    Path("mine.py").write_text(f"{STREAM}\n{AS_RECIPE}\n")
    said = orchestra("compare", "mine.py", "--sim", "-n", "2", "-s", "allreduce", "--seeds", "1", "--out", "c")
    assert said.code == 0, said.err
    assert "untuned: the data is a stream that did not end within a minute" in said.err
    assert "· untuned ·" in said.out


def test_a_stream_that_says_its_length_is_not_read() -> None:
    class Long(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError

        def __len__(self) -> int:
            return 640

    assert streams.samples_of(Long) == 640
    assert streams.samples_of(lambda: torch.zeros(3)) is None


def keys(folder: Path, *args: str) -> tuple[str, ...]:
    """What a try of a script and one of a loop are known by."""
    found = []
    for name, text in (("script.py", AS_SCRIPT), ("loop.py", "orchestra.prepare()")):
        path = folder / name
        if not path.exists():
            path.write_text(f"{STREAM}\nimport beside\n{text}\n")
        race = compare.prepare(
            sources.find(str(path), args), ["allreduce"], Options(workers=2), 3, "accuracy=0.8", folder / "c"
        )
        found.append(tuning_cache.key(race, "allreduce", 3))
    return tuple(found)


def test_a_try_of_another_script_or_with_other_arguments_is_another(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("from below import inner\n")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "inner.py").write_text("")
    seen = [keys(tmp_path)]
    assert keys(tmp_path) == seen[0]
    seen.append(keys(tmp_path, "--depth", "3"))
    (tmp_path / "below" / "inner.py").write_text("RATE = 1\n")
    seen.append(keys(tmp_path))
    for name in ("script.py", "loop.py"):
        path = tmp_path / name
        path.write_text(path.read_text().replace("lr=0.02", "lr=0.03"))
    seen.append(keys(tmp_path))
    assert all(len({*each}) == 4 for each in zip(*seen, strict=True))
