# SPDX-License-Identifier: Apache-2.0
"""The end of a script: its error is sent to the other processes, and a missing `finish` is called."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType

from orchestra.engine.tracebacks import Hook, formatted
from orchestra.errors import Interrupted, OrchestraError, Stopped, WorkerLost
from orchestra.user_loop.peers import Peers

FORGOTTEN = "ended without optimizer.finish()"


class Terminated(KeyboardInterrupt):
    """Raised by SIGTERM, which ends a loop like Ctrl-C."""


def interrupted(error: BaseException, how_far: str) -> Interrupted | None:
    """Return the error for a loop that was interrupted by a signal; None if it was not."""
    if isinstance(error, Interrupted):
        return error
    if not isinstance(error, KeyboardInterrupt) and not (isinstance(error, Stopped) and error.is_interruption):
        return None
    code = error.exit_code if isinstance(error, Stopped) else 143 if isinstance(error, Terminated) else 130
    interruption = Interrupted(f"stopped by {'SIGTERM' if code == 143 else 'SIGINT'} {how_far}")
    interruption.exit_code = code  # type: ignore[misc]
    return interruption


class Exit:
    """The end of the script: sends an error to the other processes, and calls a forgotten `finish`.

    `how_far` returns how far the loop got, and what was saved; `leave` records the error in the run folder.
    """

    def __init__(
        self,
        peers: Peers,
        finish: Callable[[], None] | None = None,
        how_far: Callable[[], str] = lambda: "",
        leave: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._peers, self._finish, self._how_far, self._leave = peers, finish, how_far, leave
        self._before: Hook = sys.excepthook
        self._owner, self._over = os.getpid(), False
        sys.excepthook = self._failed
        self._in_main_thread = threading.current_thread() is threading.main_thread()
        if self._in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminate)
        if finish is not None:
            atexit.register(self._forgotten)

    def close(self) -> None:
        """Remove the hooks."""
        self._over = True
        if sys.excepthook == self._failed:
            sys.excepthook = self._before
        if self._in_main_thread and signal.getsignal(signal.SIGTERM) == self._terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        atexit.unregister(self._forgotten)

    def _terminate(self, number: int, frame: object) -> None:
        if os.getpid() == self._owner and not self._over:
            raise Terminated
        # A fork of this process, such as a DataLoader's worker, simply ends; so does a script after its loop.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _failed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.close()
        name = self._peers.name
        if isinstance(error, Stopped):
            self._peers.part()
        elif isinstance(error, WorkerLost):
            self._peers.give_up(str(error), error.exit_code)
        elif isinstance(error, OrchestraError):
            self._peers.give_up(f"{name}: {error}", error.exit_code)
        elif isinstance(error, KeyboardInterrupt):
            term = isinstance(error, Terminated)
            self._peers.give_up(f"{name} was stopped by {'SIGTERM' if term else 'SIGINT'}", 143 if term else 130)
        else:
            last = "".join(traceback.format_exception_only(error)).strip()
            self._peers.give_up(f"{name} failed: {last}", 1)
        interruption = interrupted(error, self._how_far())
        self._leave(error if interruption is None else interruption)
        if interruption is not None:  # without its stack, which is of no use
            kind, error, trace = type(interruption), interruption, None
        self._before(kind, error, trace)

    def _forgotten(self) -> None:
        """Call `finish` if the script did not, so that the others neither wait forever nor lose their work."""
        if os.getpid() != self._owner or self._finish is None:
            return  # a fork of this process is no worker
        self.close()
        self._peers.how = FORGOTTEN
        sys.stderr.write(
            f"orchestra: {self._peers.name} {FORGOTTEN}: it is called now, but earlier evaluations and saved files "
            "lack the strategy's last step. Call it after the loop.\n"
        )
        try:
            self._finish()
        except OrchestraError as error:
            if not isinstance(error, Stopped):
                self._peers.give_up(f"{self._peers.name}: {error}", error.exit_code)
            self._leave(error)
            sys.stderr.write(formatted(error, None))
