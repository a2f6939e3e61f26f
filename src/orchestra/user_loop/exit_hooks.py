# SPDX-License-Identifier: Apache-2.0
"""How a script ends: what went wrong, in a few lines and for the others as well; nobody leaves without `finish`."""

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
    """Tells our own errors in a few lines, from the first `prepare` on; others as they were told before."""

    def __init__(self) -> None:
        self._before: Hook | None = None

    def install(self) -> None:
        """Once; whoever has a hook of its own already keeps it."""
        if self._before is None or sys.excepthook is sys.__excepthook__:
            self._before, sys.excepthook = sys.excepthook, self

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """An error that nobody caught."""
        assert self._before is not None
        if not isinstance(error, OrchestraError):
            self._before(kind, error, trace)
            return
        if self._before is sys.__excepthook__:
            # In one piece: others write there, too. Of several that were stopped together, the first says so.
            sys.stderr.write("" if isinstance(error, Interrupted) and is_member() else told(error, trace))
        else:
            self._before(kind, error, trace)
        raise SystemExit(error.exit_code)


tell_in_short = _ErrorPrinter()


def told(error: OrchestraError, trace: TracebackType | None) -> str:
    """An error as the user should read it: the lines of the loop, and what to do; not the way through these files."""
    if isinstance(error, Interrupted):
        return f"{error}\n"
    # What happened in another process has nothing to do with where this one was.
    frames = [] if isinstance(error, Stopped | WorkerLost) else traceback.extract_tb(trace)
    lines = traceback.format_list([f for f in frames if not f.filename.startswith((*_NOT_THE_LOOPS, "<frozen"))])
    return f"{''.join(lines)}{type(error).__name__}: {error}\n"


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a loop as Ctrl-C does."""


def interrupted(error: BaseException, how_far: str) -> Interrupted | None:
    """What to say of a loop that somebody stopped; None if that is not what happened."""
    if isinstance(error, Interrupted):
        return error
    if not isinstance(error, KeyboardInterrupt) and not (isinstance(error, Stopped) and error.is_interruption):
        return None
    code = error.exit_code if isinstance(error, Stopped) else 143 if isinstance(error, Terminated) else 130
    told = Interrupted(f"stopped by {'SIGTERM' if code == 143 else 'SIGINT'} {how_far}")
    told.exit_code = code  # type: ignore[misc]
    return told


class Exit:
    """The end of the script: an error reaches the other processes, a forgotten `finish` is made up for.

    `how_far` says how far the loop came, and what is left of it; `leave` puts there why it came no farther.
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
        self._hears = threading.current_thread() is threading.main_thread()
        if self._hears and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminate)
        if finish is not None:
            atexit.register(self._forgotten)

    def close(self) -> None:
        """All went well, or all is told."""
        self._over = True
        if sys.excepthook == self._failed:
            sys.excepthook = self._before
        if self._hears and signal.getsignal(signal.SIGTERM) == self._terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        atexit.unregister(self._forgotten)

    def _terminate(self, number: int, frame: object) -> None:
        if os.getpid() == self._owner and not self._over:
            raise Terminated
        # A fork of this process, such as one that loads data, just ends; so does a script whose loop is over.
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
        told = interrupted(error, self._how_far())
        self._leave(error if told is None else told)
        if told is not None:  # where it was just then is of no use to anybody
            kind, error, trace = type(told), told, None
        self._before(kind, error, trace)

    def _forgotten(self) -> None:
        """Whatever the strategy, the others must not wait for ever, nor lose what they have done."""
        if os.getpid() != self._owner or self._finish is None:
            return  # a fork of this process is nobody's worker
        self.close()
        self._peers.how = FORGOTTEN
        sys.stderr.write(
            f"orchestra: {self._peers.name} {FORGOTTEN}: it is done now, but what was evaluated or saved before "
            "lacks the strategy's last step. Call it after the loop.\n"
        )
        try:
            self._finish()
        except OrchestraError as error:
            if not isinstance(error, Stopped):
                self._peers.give_up(f"{self._peers.name}: {error}", error.exit_code)
            self._leave(error)
            sys.stderr.write(told(error, None))
