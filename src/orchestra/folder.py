# SPDX-License-Identifier: Apache-2.0
"""A run's folder: a new one, or one from which a run that was broken off goes on."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from orchestra import checkpoint
from orchestra.errors import ConfigError, Problem
from orchestra.events import encode, read
from orchestra.report.facts import scores_of
from orchestra.snapshot import FINAL, numbered


def new_folder(name: str) -> Path:
    """A run folder of today that does not exist yet."""
    slug = "".join(c if c.isalnum() else "-" for c in name).strip("-")
    stem = f"{time.strftime('%Y-%m-%d-%H%M%S')}-{slug}"
    for suffix in ("", *(f"-{i}" for i in range(2, 1000))):
        path = Path("runs") / (stem + suffix)
        if not path.exists():
            return path
    raise ConfigError([Problem("out", stem, "all such run folders exist: name one with out=")])


def forget_after(run: Path, saved: checkpoint.Saved) -> None:
    """Drop what a broken-off run recorded after its checkpoint: it will happen again."""
    (run / "ending.json").unlink(missing_ok=True)
    shutil.rmtree(run / FINAL, ignore_errors=True)
    for draft in (run / "checkpoints").glob("*.tmp"):
        shutil.rmtree(draft, ignore_errors=True)
    holder = saved.manifest["workers"] if saved.manifest["servers"] else 0
    taken = saved.node(holder)["counts"][3] or saved.node(0)["counts"][3]  # servers may not have had their turn
    for number, folder in numbered(run / "snapshots"):
        if number > taken:
            shutil.rmtree(folder)
    for path in (*run.glob("events-*.jsonl"), *run.glob("trace-*.jsonl")):
        until = saved.node(int(path.stem.partition("-")[2]))["cost"][0]
        kept = [event for event in read(path) if event.t <= until]
        checkpoint.write_text(path, "".join(encode(event) for event in kept))
    scores = [score for score in scores_of(run) if score.number <= taken]
    checkpoint.write_text(run / "scores.jsonl", "".join(encode(score) for score in scores))
