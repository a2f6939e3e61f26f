# SPDX-License-Identifier: Apache-2.0
"""The command that makes many runs, kept in their folder from the beginning: what to type to have all of them again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

NAME = "command.json"
_BEFORE = (NAME, "tuning.json", "tuning")  # what is there before the first run of a race


def keep(typed: Sequence[str], out: Path) -> None:
    """Write the words of a command to the folder of its runs; where they went is no part of what they are."""
    from orchestra.engine import checkpoint

    out.mkdir(parents=True, exist_ok=True)
    words = ["orchestra", *_without_out(typed)]
    checkpoint.write_text(out / NAME, json.dumps({"command": words}, ensure_ascii=False) + "\n")


def is_taken(out: Path) -> bool:
    """Whether there is more in a folder than what a command left that was refused or stopped before the race."""
    return out.exists() and (not out.is_dir() or any(path.name not in _BEFORE for path in out.iterdir()))


def _without_out(typed: Sequence[str]) -> Iterator[str]:
    words = iter(typed)
    for word in words:
        if word == "--out":
            next(words, None)
        elif not word.startswith("--out="):
            yield word
