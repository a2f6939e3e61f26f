# SPDX-License-Identifier: Apache-2.0
"""The end of a script: errors in a few lines, also sent to the other processes, and a call of a missing `finish`."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from orchestra.engine.environment import is_member
from orchestra.errors import Interrupted, OrchestraError, Stopped, WorkerLost
from orchestra.user_loop.peers import Peers

FORGOTTEN = "ended without optimizer.finish()"
_NOT_THE_LOOPS = tuple(
    {str(Path(__file__).parents[1]), *(sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib"))}
)

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class _ErrorPrinter:
    """An excepthook that prints orchestra's errors in a few lines, and passes other errors to the previous hook."""

    def __init__(self) -> None:
        self._before: Hook | None = None

    def install(self) -> None:
        """Install the hook, unless it or a later one is installed."""
        if self._before is None or sys.excepthook is sys.__excepthook__:
            self._before, sys.excepthook = sys.excepthook, self

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print an uncaught error."""
        assert self._before is not None
        if not isinstance(error, OrchestraError):
            self._before(kind, error, trace)
            return
        if self._before is sys.__excepthook__:
            # In one write, since other processes write there, too. Of several interrupted ones, only the first prints.
            sys.stderr.write("" if isinstance(error, Interrupted) and is_member() else formatted(error, trace))
        else:
            self._before(kind, error, trace)
        raise SystemExit(error.exit_code)


error_printer = _ErrorPrinter()


def formatted(error: OrchestraError, trace: TracebackType | None) -> str:
    """Return an error with the lines of the user's loop, without the frames of orchestra."""
    if isinstance(error, Interrupted):
        return f"{error}\n"
    # An error of another process is unrelated to this process's stack.
    frames = [] if isinstance(error, Stopped | WorkerLost) else traceback.extract_tb(trace)
    lines = traceback.format_list([f for f in frames if not f.filename.startswith((*_NOT_THE_LOOPS, "<frozen"))])
    return f"{''.join(lines)}{type(error).__name__}: {error}\n"


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
