# SPDX-License-Identifier: Apache-2.0
"""Files from unknown sources: only regular files are opened, and never more bytes are read than expected.

A run folder may be copied, shared or hostile. Opening a pipe blocks, reading a device never ends, and some devices act
when they are opened. So each file is checked before it is opened, and again afterwards.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

PAUSES = (0.5, 1.0, 2.0)  # seconds between two attempts to write to a full disk
SMALL = 16 << 20  # bytes of a file of settings: configuration, ending, manifest
_WHOLE = re.compile("[0-9]{1,18}")


def open_regular(path: Path, *, most: int | None = None) -> BufferedReader:
    """Open a regular file for reading; raises OSError for anything else, or if it has more than `most` bytes."""
    _require_regular(os.stat(path), path, most)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)  # never blocks, if a pipe replaced the file meanwhile
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
    """Return whether the path is a regular file, or a link to one."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def lock_file(file: int | IO[Any], within: float) -> None:
    """Lock a file for this process alone; raises BlockingIOError if others still hold it after so many seconds."""
    end = time.monotonic() + within
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise
        time.sleep(min(0.05, within / 50))


def read_bytes(path: Path, *, most: int = SMALL) -> bytes:
    """Read a regular file of at most `most` bytes."""
    with open_regular(path, most=most) as file:
        content = file.read(most + 1)
    if len(content) > most:  # it grew meanwhile
        raise OSError(errno.EFBIG, f"has more than the {most:,} bytes that are read", str(path))
    return content


def read_json(path: Path, *, most: int = SMALL, errors: str = "strict") -> Any:
    """Read a JSON file; raises OSError if it cannot be read, ValueError if it is not JSON."""
    try:
        return json.loads(read_bytes(path, most=most).decode("utf-8", errors))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def numbered(folder: Path, name: re.Pattern[str]) -> Iterator[tuple[int, Path]]:
    """Yield the entries of a folder whose names hold a number as the pattern's only group, in order of the numbers."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = name.fullmatch(path.name)
        if match is not None and _WHOLE.fullmatch(match[1]):
            found.append((int(match[1]), path))
    yield from sorted(found)
