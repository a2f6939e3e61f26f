# SPDX-License-Identifier: Apache-2.0
"""Files of a run between machines that have no folder in common.

    a node writes its events, snapshots and checkpoints to a folder of its own machine
    whatever is new there goes to the run folder before home is told of it

Events are sent as they grow. Every other file is sent when it is whole, and appears whole.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from orchestra.errors import ClusterError
from orchestra.transports.exchange import Exchange


@dataclass
class Courier:
    """Brings the files of one folder to another node."""

    exchange: Exchange
    folder: Path
    to: int
    sent: dict[Path, int] = field(default_factory=dict)  # bytes of files that grow

    def bring(self) -> None:
        """Send what is new."""
        for path in sorted(self.folder.rglob("*")):
            if path.is_file() and not path.name.endswith(".tmp"):
                self._bring(path)

    def _bring(self, path: Path) -> None:
        with path.open("rb") as file:
            start = file.seek(self.sent.get(path, 0))
            data = file.read()
        name = path.relative_to(self.folder).as_posix()
        if start and not data:
            return
        self.exchange.note(self.to, {"kind": "file", "path": name, "bytes": len(data)})
        self.exchange.ship(self.to, data)
        if path.suffix == ".jsonl":
            self.sent[path] = start + len(data)
        else:
            path.unlink()  # it is there now


@dataclass
class Reception:
    """Puts files that others send into a folder."""

    folder: Path
    _open: dict[int, tuple[Path, bool, int, bytearray]] = field(default_factory=dict)  # by sender

    def expect(self, source: int, said: dict[str, Any]) -> None:
        """A file is announced: refuse what would lie elsewhere."""
        relative = PurePosixPath(str(said["path"]))
        if relative.is_absolute() or ".." in relative.parts or not relative.parts:
            raise ClusterError(f"node {source} sent a file {said['path']!r}, which is no place in a run folder")
        path = self.folder / relative
        self._open[source] = (path, path.suffix == ".jsonl", int(said["bytes"]), bytearray())
        if not said["bytes"]:
            self.take_in(source, b"")

    def take_in(self, source: int, piece: bytes) -> None:
        """A piece of it; the last one makes it appear."""
        path, appended, length, data = self._open[source]
        data += piece
        if len(data) < length:
            return
        del self._open[source]
        path.parent.mkdir(parents=True, exist_ok=True)
        if appended:
            with path.open("ab") as file:
                file.write(data)
            return
        whole = path.with_name(path.name + ".tmp")
        with whole.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        whole.replace(path)
