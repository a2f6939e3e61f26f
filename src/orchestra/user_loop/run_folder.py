# SPDX-License-Identifier: Apache-2.0
"""The run folder of a loop that several processes run: worker 0 says where it is, the others bring what they wrote.

worker 0                                    everybody else
makes the folder, with a mark in it     →   does it see the mark? then it writes there
                                        ←   else to a folder of its own machine
                                        ←   in the end the files, if it is not there, and that it has written all
takes them in; sums up when all have

Meanwhile worker 0 holds the folder's lock; if there is no such end, it leaves there why.
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

_HOME = 0
_LARGEST = 1 << 30  # bytes of events that a process may bring at once


class LoopRunFolder:
    """Where this process writes to: nowhere, if worker 0 keeps nothing."""

    def __init__(self, peers: Peers, messenger: Messenger, rank: int, size: int, out: Path | None) -> None:
        self._peers, self._messenger = peers, messenger
        self._is_home, self._others = rank == _HOME, size - 1
        self._sender: FileSender | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._hold: run_lock.RunLock | None = None
        self.path = self._offer(out) if self._is_home else self._find()

    def _offer(self, out: Path | None) -> Path | None:
        """As worker 0: make it, and wait until the others have looked for it."""
        if out is None:
            self._messenger.send_control_to_all({"kind": "folder", "path": None, "mark": ""})
            return None
        path = out.absolute()
        try:
            path.mkdir(parents=True, exist_ok=True)
            run_lock.make_room(path)
            self._hold = run_lock.RunLock(path)
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
        """As anybody else: look whether what worker 0 made is there."""
        self._await(lambda: self._peers.folder is not None, "worker 0 to say where the run folder is")
        assert self._peers.folder is not None
        path, mark = self._peers.folder
        if path is None:
            return None
        seen = False
        with contextlib.suppress(OSError):
            seen = (path / mark).read_text(encoding="ascii") == mark
        self._messenger.send_control(_HOME, {"kind": "looked"})
        if seen:
            return path
        self._scratch = tempfile.TemporaryDirectory(prefix="orchestra-")
        self._sender = FileSender(self._messenger, Path(self._scratch.name), _HOME)
        return self._sender.folder

    def deliver(self) -> None:
        """All that this process writes is written."""
        if self._sender is not None:
            self._sender.send_new()
        if self._scratch is not None:
            self._scratch.cleanup()
        if self.path is not None and not self._is_home:
            self._messenger.send_control(_HOME, {"kind": "written"})

    def collect(self) -> None:
        """As worker 0: wait until everybody has delivered."""
        self._await(lambda: len(self._peers.written) == self._others, "the others to write their files")

    def close(self) -> None:
        """The loop came to its end, and all is written."""
        if self._hold is not None:
            self._hold.let_go()

    def leave(self, error: BaseException) -> None:
        """It did not: whoever looks at the folder shall know why."""
        if self._hold is not None:
            ours = isinstance(error, OrchestraError)
            self._hold.leave(type(error).__name__, str(error) if ours else "".join(traceback.format_exception(error)))

    def _await(self, ready: Callable[[], bool], whom: str) -> None:
        self._messenger.wait_until(ready, lambda: whom, forever=True)


def _could_not_keep(source: int, path: Path, error: OSError) -> None:
    print(f"warning: what node {source} sent could not be written to {path}: {error}", file=sys.stderr)
