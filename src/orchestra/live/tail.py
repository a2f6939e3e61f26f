# SPDX-License-Identifier: Apache-2.0
"""Read a growing file piece by piece: each look returns the whole lines since the last one.

    offset      bytes that were returned as whole lines
    look:       the name has another inode, the file is shorter, or its bytes before offset differ (a thinned-out file
                of events may reuse the inode of an older one): offset ← 0, earlier lines no longer hold
                read from offset to the last end of a line; an incomplete line waits for the next look

A look at a file that has not grown costs one stat call.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

from orchestra.runs import files

_LAST = 256  # bytes before the offset that are compared, to tell a file that grew from another
_CHUNK = 1 << 22  # bytes read at once, far more than a line has
_MOST = 1 << 30  # bytes read in one look; the next look goes on from there


class TailedFile:
    """One growing file. With `tail`, the first look reads only so many bytes at its end; the first line may be cut."""

    def __init__(self, path: Path, *, tail: int | None = None) -> None:
        self.path = path
        self.changed = 0.0  # seconds since the epoch, of the file's last change
        self.size = 0  # bytes, at the last look
        self._tail = tail
        self._offset = 0
        self._last = b""  # the last bytes that were returned
        self._identity: tuple[int, int] | None = None
        self._grown = False

    def renewed(self) -> bool:
        """Look whether the file changed; return whether it was replaced, so that its earlier lines no longer hold."""
        self._grown = False
        try:
            found = self.path.stat()
        except OSError:
            return False
        if not stat.S_ISREG(found.st_mode):  # reading a pipe would never end
            return False
        identity = (found.st_dev, found.st_ino)
        replaced = self._identity is not None and (identity != self._identity or not self._goes_on(found.st_size))
        if replaced or self._identity is None:
            self._offset = max(0, found.st_size - self._tail) if self._tail is not None else 0
            self._last = b""
        self._grown = found.st_size > self._offset
        self._identity, self.changed, self.size = identity, found.st_mtime, found.st_size
        return replaced

    def _goes_on(self, size: int) -> bool:
        """Whether the file still has the bytes that were read, perhaps followed by more."""
        if size <= self._offset:
            return size == self._offset
        try:
            with files.open_regular(self.path) as file:
                file.seek(self._offset - len(self._last))
                return file.read(len(self._last)) == self._last
        except OSError:
            return True

    def lines(self) -> Iterator[list[str]]:
        """Yield the new lines, some thousand at a time; none unless `renewed` found that the file has grown."""
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
                    return  # an incomplete line: it may still be being written
                self._offset += end or len(chunk)
                self._last = chunk[: end or len(chunk)][-_LAST:]
                file.seek(self._offset)
                # Not splitlines, which also splits at other characters.
                yield chunk[:end].decode("utf-8", "replace").split("\n")[:-1]
