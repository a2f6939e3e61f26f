# SPDX-License-Identifier: Apache-2.0
"""Files that may come from anywhere: only regular ones are opened, and never more is read than was expected.

A run folder may be copied, shared or hostile. Opening a pipe waits for its other end, a device never ends, and some
devices do something when they are opened. So each file is looked at before it is opened, and again afterwards.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

PAUSES = (0.5, 1.0, 2.0)  # seconds between two attempts to write to a full disk
SMALL = 16 << 20  # bytes of a file of settings: configuration, ending, manifest
_WHOLE = re.compile("[0-9]{1,18}")


def open_regular(path: Path, *, most: int | None = None) -> BufferedReader:
    """Open a regular file for reading; raises OSError for anything else, or if it has more than `most` bytes."""
    _require_regular(os.stat(path), path, most)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)  # neither waits for a pipe that was put there since
    try:
        _require_regular(os.fstat(fd), path, most)
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def _require_regular(found: os.stat_result, path: Path, most: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    if most is not None and found.st_size > most:
        raise OSError(errno.EFBIG, f"has {found.st_size:,} bytes, more than the {most:,} that are read", str(path))


def is_regular(path: Path) -> bool:
    """Whether there is a regular file, or a link to one."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def read_bytes(path: Path, *, most: int = SMALL) -> bytes:
    """Read a regular file of at most so many bytes."""
    with open_regular(path, most=most) as file:
        content = file.read(most + 1)
    if len(content) > most:  # it grew meanwhile
        raise OSError(errno.EFBIG, f"has more than the {most:,} bytes that are read", str(path))
    return content


def read_json(path: Path, *, most: int = SMALL, errors: str = "strict") -> Any:
    """Read a JSON file; raises OSError if it cannot be read, ValueError if it holds something else."""
    try:
        return json.loads(read_bytes(path, most=most).decode("utf-8", errors))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def numbered(folder: Path, name: re.Pattern[str]) -> Iterator[tuple[int, Path]]:
    """The entries of a folder whose names hold a number as the pattern's only group, in the order of the numbers."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = name.fullmatch(path.name)
        if match is not None and _WHOLE.fullmatch(match[1]):
            found.append((int(match[1]), path))
    yield from sorted(found)
