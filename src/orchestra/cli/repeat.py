# SPDX-License-Identifier: Apache-2.0
"""The command that made many runs, kept in their folder from the start: it makes all of them again."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from orchestra.errors import ConfigError
from orchestra.runs.reading import object_in

NAME = "command.json"
_BEFORE = (NAME, "tuning.json")  # files that exist before the first run of a race


def keep(typed: Sequence[str], out: Path) -> None:
    """Write the words of a command to the folder of its runs, without --out."""
    from orchestra.engine import checkpoint

    out.mkdir(parents=True, exist_ok=True)
    words = ["orchestra", *_without_out(typed)]
    checkpoint.write_text(out / NAME, json.dumps({"command": words}, ensure_ascii=False) + "\n")


@contextmanager
def kept(typed: Sequence[str], out: Path) -> Iterator[None]:
    """Keep a command; if it is refused before anything else is in the folder, and the folder is new, delete both."""
    is_new = not out.exists()
    keep(typed, out)
    try:
        yield
    except ConfigError:
        if is_new and all(path.is_dir() or path == out / NAME for path in out.rglob("*")):
            shutil.rmtree(out)
        raise


def is_taken(out: Path) -> bool:
    """Return whether a folder holds more than a command leaves that was refused or stopped before the race."""
    if not out.is_dir():
        return out.exists()
    files = (path.relative_to(out).parts for path in out.rglob("*") if not path.is_dir())
    return not all(parts[-1] in _BEFORE or _is_of_a_try(parts) for parts in files)


def _is_of_a_try(parts: Sequence[str]) -> bool:
    """Return whether a file belongs to a run of tuning, tuning/STRATEGY/seedN, which is deleted after its result."""
    return any(name == "tuning" and parts[i + 2].startswith("seed") for i, name in enumerate(parts[:-3]))


def going_on(out: Path, **more: str) -> str | None:
    """Return the command that continues in a folder, with options that it lacked; None if it would be refused."""
    folder = next((folder for folder in (out, out.parent) if (folder / NAME).is_file()), None)
    words = [] if folder is None else object_in(folder / NAME).get("command")
    if folder is None or not isinstance(words, list) or not words or is_taken(folder):
        return None
    own = words[: words.index("--")] if "--" in words else words
    lacks = {name: value for name, value in more.items() if not any(word.startswith(f"--{name}") for word in own)}
    added = [word for name, value in {**lacks, "out": str(folder)}.items() for word in (f"--{name}", value)]
    return shlex.join([*own, *added, *words[len(own) :]])


def _without_out(typed: Sequence[str]) -> Iterator[str]:
    words = iter(typed)
    for word in words:
        if word == "--":  # the rest is the script's
            yield from (word, *words)
        elif word == "--out":
            next(words, None)
        elif not word.startswith("--out="):
            yield word
