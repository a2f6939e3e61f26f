# SPDX-License-Identifier: Apache-2.0
"""Files of a run between machines that have no folder in common.

    a node writes its events, snapshots and checkpoints to a folder of its own machine
    new files are sent to the run folder before process 0 is told of them

Events are sent as they grow; a file of events that was thinned out is sent again, and replaces what was sent of it in
this run. Every other file is sent, and appears, when it is complete. Only a node's own files are accepted from it; a
pattern says which those are, so that no name leads out of the folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from orchestra.engine import checkpoint
from orchestra.engine.snapshot import FINAL, is_full
from orchestra.worlds.sockets.messenger import Messenger
from orchestra.worlds.sockets.wire import BadFrame

THINNED = "thinned"  # the folder in the name of a file of events that replaces what was sent before
_PIECE = 1 << 24  # bytes of events that are announced at once
_LAST = 256  # bytes that show whether a file has grown or was replaced: a line of events is not longer
_TIMES, _BESIDE = 64, 1 << 28  # a file has at most so many times the bytes of the model, and so many bytes more


@dataclass
class FileSender:
    """Sends the files of one folder to another node."""

    messenger: Messenger
    folder: Path
    to: int
    sent: dict[Path, tuple[int, bytes]] = field(default_factory=dict)  # of growing files: bytes sent, the last of them

    def send_new(self) -> None:
        """Send new files, and what growing files have gained."""
        for path in sorted(self.folder.rglob("*")):
            if path.is_file() and not path.name.endswith(".tmp"):
                if path.suffix == ".jsonl":
                    self._send_growth(path)
                else:
                    self._send(path, path.read_bytes())
                    path.unlink()

    def _send_growth(self, path: Path) -> None:
        sent, last = self.sent.get(path, (0, b""))
        with path.open("rb") as file:
            file.seek(sent - len(last))
            name = path
            if file.read(len(last)) != last:  # it was thinned out
                file.seek(0)
                name, sent = self.folder / THINNED / path.name, 0
            while data := file.read(_PIECE):
                self._send(name, data)
                name, sent = path, sent + len(data)
                self.sent[path] = sent, data[-_LAST:]

    def _send(self, path: Path, data: bytes) -> None:
        name = path.relative_to(self.folder).as_posix()
        self.messenger.send_control(self.to, {"kind": "file", "path": name, "bytes": len(data)})
        self.messenger.send_file(self.to, data)


def largest_file(x: Tensor) -> int:
    """Return a limit for the bytes of a file, from the bytes of the model."""
    return _TIMES * x.numel() * x.element_size() + _BESIDE


def files_of(node: int) -> re.Pattern[str]:
    """Return the pattern of the files that a node may add to the run folder."""
    part = re.escape(checkpoint.part_name(node))
    of_a_moment = rf"checkpoints/step-\d{{8,12}}\.tmp|snapshots/\d{{5,12}}|{FINAL}"
    grows = rf"(?:{THINNED}/)?events-{node}\.jsonl|trace-{node}\.jsonl"
    return re.compile(rf"{grows}|(?:{of_a_moment})/{part}", re.ASCII)


def part_of(node: int) -> re.Pattern[str]:
    """Return the pattern of a node's parts of checkpoints."""
    return re.compile(rf"step-\d{{8,12}}/{re.escape(checkpoint.part_name(node))}", re.ASCII)


@dataclass
class FileReceiver:
    """Writes files that other nodes send into a folder; `on_failure` is called for files that cannot be written."""

    folder: Path
    expected: Callable[[int], re.Pattern[str]]  # the names that a sender may use
    largest: int  # bytes
    on_failure: Callable[[int, Path, OSError], None]
    elsewhere: Callable[[], Path] | None = None  # makes another folder for the final model if this one has no room
    failed: dict[Path, OSError] = field(default_factory=dict)
    _open: dict[int, tuple[Path, int, bytearray]] = field(default_factory=dict)  # by sender
    _began: dict[Path, int] = field(default_factory=dict)  # bytes of growing files from before the run was resumed

    def expect(self, source: int, message: dict[str, Any]) -> None:
        """Note an announced file; refuse names that are not the sender's, and files that are too large."""
        name, length = message["path"], message["bytes"]
        if source in self._open:
            raise BadFrame(f"node {source} announced a file before it had sent the last one")
        if not self.expected(source).fullmatch(name):
            raise BadFrame(f"node {source} sent a file {name[:80]!r}, which is not one of its own")
        if length > self.largest:
            raise BadFrame(f"node {source} sent a file of {length:,} bytes; none is longer than {self.largest:,}")
        self._open[source] = (self.folder / name, length, bytearray())
        if not length:
            self.take_in(source, b"")

    def take_in(self, source: int, piece: bytes) -> None:
        """Take a piece of an announced file; after the last one, write the file."""
        if source not in self._open:
            raise BadFrame(f"node {source} sent a file that it had not announced")
        path, length, data = self._open[source]
        if len(data) + len(piece) > length:
            raise BadFrame(f"node {source} sent more of {path.name} than the {length:,} bytes it had announced")
        data += piece
        if len(data) < length:
            return
        del self._open[source]
        try:
            self._write(path, data)
        except OSError as error:
            self.failed[path] = error
            self.on_failure(source, path, error)

    def _write(self, path: Path, data: bytearray) -> None:
        renewed = path.parent.name == THINNED
        path = self.folder / path.name if renewed else path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".jsonl":
            began = self._began.setdefault(path, path.stat().st_size if path.exists() else 0)
            _put(path, _first(path, began) + data) if renewed else _append(path, data)
            return
        try:
            _put(path, data)
        except OSError as error:
            if self.elsewhere is None or path.parent.name != FINAL or not is_full(error):
                raise
            other = self.elsewhere() / FINAL
            other.mkdir(exist_ok=True)
            _put(other / path.name, data)


def _append(path: Path, data: bytearray) -> None:
    """Append all of it or nothing: half a line would spoil the next one as well."""
    with path.open("ab", buffering=0) as file:
        whole = file.tell()
        try:
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(whole)
            raise


def _first(path: Path, size: int) -> bytearray:
    if not size:
        return bytearray()
    with path.open("rb") as file:
        return bytearray(file.read(size))


def _put(path: Path, data: bytearray) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
