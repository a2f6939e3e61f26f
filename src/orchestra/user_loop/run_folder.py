# SPDX-License-Identifier: Apache-2.0
"""The run folder of a loop that several processes run: worker 0 announces it, the others write or send their files.

worker 0                                    every other process
makes the folder, with a mark in it     →   sees the mark: writes to the folder
                                            else: writes to a temporary folder
                                        ←   at the end the files of a temporary folder, and "written"
stores them; writes the summary when all have arrived

Worker 0 holds the folder's lock during the run; if the run fails, it writes the reason there.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

from orchestra.errors import ConfigError, OrchestraError, Problem
from orchestra.runs import run_lock
from orchestra.user_loop.peers import Peers
from orchestra.worlds.sockets.file_transfer import FileReceiver, FileSender, files_of
from orchestra.worlds.sockets.messenger import Messenger

_COORDINATOR = 0
_LARGEST = 1 << 30  # maximum bytes of events that a process may send


class LoopRunFolder:
    """The folder to which this process writes; none if worker 0 keeps no run folder."""

    def __init__(self, peers: Peers, messenger: Messenger, rank: int, size: int, out: Path | None) -> None:
        self._peers, self._messenger = peers, messenger
        self._is_coordinator, self._others = rank == _COORDINATOR, size - 1
        self._sender: FileSender | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._lock: run_lock.RunLock | None = None
        self.path = self._offer(out) if self._is_coordinator else self._find()

    def _offer(self, out: Path | None) -> Path | None:
        """As worker 0, make the folder, and wait until the others have looked for its mark."""
        if out is None:
            self._messenger.send_control_to_all({"kind": "folder", "path": None, "mark": ""})
            return None
        path = out.absolute()
        try:
            path.mkdir(parents=True, exist_ok=True)
            run_lock.make_room(path)
            self._lock = run_lock.RunLock(path)
            if not self._others:
                return path
            mark = path / f".mark-{secrets.token_hex(8)}"
            mark.write_text(mark.name, encoding="ascii")
        except OSError as error:
            raise ConfigError([Problem("out", str(out), f"cannot be written: {error}")]) from None
        self._peers.receive_files(FileReceiver(path, files_of, _LARGEST, _could_not_keep))
        self._messenger.send_control_to_all({"kind": "folder", "path": str(path), "mark": mark.name})
        self._await(lambda: len(self._peers.looked) == self._others, "the others to look for the run folder")
        mark.unlink()
        return path

    def _find(self) -> Path | None:
        """As another process, check whether the folder of worker 0 is visible; else use a temporary one."""
        self._await(lambda: self._peers.folder is not None, "worker 0 to announce the run folder")
        assert self._peers.folder is not None
        path, mark = self._peers.folder
        if path is None:
            return None
        seen = False
        with contextlib.suppress(OSError):
            seen = (path / mark).read_text(encoding="ascii") == mark
        self._messenger.send_control(_COORDINATOR, {"kind": "looked"})
        if seen:
            return path
        self._scratch = tempfile.TemporaryDirectory(prefix="orchestra-")
        self._sender = FileSender(self._messenger, Path(self._scratch.name), _COORDINATOR)
        return self._sender.folder

    def deliver(self) -> None:
        """Send the files of a temporary folder, and tell worker 0 that all files are written."""
        if self._sender is not None:
            self._sender.send_new()
        if self._scratch is not None:
            self._scratch.cleanup()
        if self.path is not None and not self._is_coordinator:
            self._messenger.send_control(_COORDINATOR, {"kind": "written"})

    def collect(self) -> None:
        """As worker 0, wait until every process has delivered."""
        self._await(lambda: len(self._peers.written) == self._others, "the others to write their files")

    def close(self) -> None:
        """Release the lock of a complete run."""
        if self._lock is not None:
            self._lock.let_go()

    def leave(self, error: BaseException) -> None:
        """Release the lock of a run that failed, and write the reason."""
        if self._lock is not None:
            ours = isinstance(error, OrchestraError)
            self._lock.leave(type(error).__name__, str(error) if ours else "".join(traceback.format_exception(error)))

    def _await(self, ready: Callable[[], bool], what: str) -> None:
        self._messenger.wait_until(ready, lambda: what, forever=True)


def _could_not_keep(source: int, path: Path, error: OSError) -> None:
    print(f"warning: files of node {source} could not be written to {path}: {error}", file=sys.stderr)
