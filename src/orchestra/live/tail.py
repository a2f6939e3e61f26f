# SPDX-License-Identifier: Apache-2.0
"""A file that grows, read piece by piece: each look gives the whole lines that came since the last one.

    offset      bytes that were given as whole lines
    look:       another file of that name, a shorter one, or other bytes before offset (a file of events that was
                thinned out may get the number of an older one): offset ← 0, what was told before no longer holds
                read from offset to the last end of a line; what is cut short waits for the next look

A look at a file that has not grown costs one question to the file system.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

from orchestra.runs import files

_LAST = 256  # bytes by which a file that grew is told from another
_CHUNK = 1 << 22  # bytes read at once; no line of ours is nearly as long
_MOST = 1 << 30  # bytes read in one look; the next look goes on from there


class TailedFile:
    """One file. With `tail`, a first look takes no more than so many bytes at its end, whose first line may be cut."""

    def __init__(self, path: Path, *, tail: int | None = None) -> None:
        self.path = path
        self.changed = 0.0  # seconds since the epoch, of the file's last change
        self.size = 0  # bytes, at the last look
        self._tail = tail
        self._offset = 0
        self._last = b""  # the last bytes that were given
        self._identity: tuple[int, int] | None = None
        self._grown = False

    def renewed(self) -> bool:
        """Look whether the file changed; True if all that it told before no longer holds."""
        self._grown = False
        try:
            found = self.path.stat()
        except OSError:
            return False
        if not stat.S_ISREG(found.st_mode):  # reading a pipe would never end
            return False
        identity = (found.st_dev, found.st_ino)
        anew = self._identity is not None and (identity != self._identity or not self._goes_on(found.st_size))
        if anew or self._identity is None:
            self._offset = max(0, found.st_size - self._tail) if self._tail is not None else 0
            self._last = b""
        self._grown = found.st_size > self._offset
        self._identity, self.changed, self.size = identity, found.st_mtime, found.st_size
        return anew

    def _goes_on(self, size: int) -> bool:
        """Whether the file is the one that was read so far, and perhaps more."""
        if size <= self._offset:
            return size == self._offset
        try:
            with files.open_regular(self.path) as file:
                file.seek(self._offset - len(self._last))
                return file.read(len(self._last)) == self._last
        except OSError:
            return True

    def lines(self) -> Iterator[list[str]]:
        """What has come, some thousand lines at a time; empty unless `renewed` saw something new."""
        if not self._grown:
            return
        try:
            file = files.open_regular(self.path)
        except OSError:
            return
        with file:
            file.seek(self._offset)
            for _ in range(_MOST // _CHUNK):
                if not (chunk := file.read(_CHUNK)):
                    return
                end = chunk.rfind(b"\n") + 1
                if not end and len(chunk) < _CHUNK:
                    return  # cut short: perhaps the rest is being written
                self._offset += end or len(chunk)
                self._last = chunk[: end or len(chunk)][-_LAST:]
                file.seek(self._offset)
                # Not splitlines: to that, other characters end a line as well.
                yield chunk[:end].decode("utf-8", "replace").split("\n")[:-1]
