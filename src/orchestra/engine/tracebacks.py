# SPDX-License-Identifier: Apache-2.0
"""Tracebacks that show the user's code, and how a script ends by an error of this package: in a few lines."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import orchestra
from orchestra.engine import environment
from orchestra.errors import Interrupted, OrchestraError, Stopped, WorkerLost

_INSTALLED = ("stdlib", "platstdlib", "purelib", "platlib")  # of sysconfig
_CALLS_OF_LAYERS = str(Path("torch", "nn", "modules", "module.py"))  # two calls around each layer's forward

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def from_users_code(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the first call of code that is not installed, or all of it if there is none."""
    first = trace
    while first is not None and _is_library(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    return trace if first is None else first


def shorten(error: Exception) -> None:
    """Remove orchestra's frames from an error that leaves a call; print one of orchestra in a few lines if uncaught."""
    if not isinstance(error, OrchestraError):
        error.__traceback__ = _without_plumbing(error.__traceback__)
        return
    if environment.is_told_by_another(error):
        environment.hush(error)
    error_printer.install()
    # The message says what is wrong and what to do; a traceback through orchestra's files would only hide it.
    error.__traceback__, error.__cause__ = None, None  # without a cause, the context is not shown either


def _without_plumbing(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the first call of code that is not installed, without the calls around torch's layers."""
    calls = []
    first = from_users_code(trace)
    while first is not None:
        calls.append(first)
        first = first.tb_next
    for call in reversed(calls):
        if call is calls[-1] or not call.tb_frame.f_code.co_filename.endswith(_CALLS_OF_LAYERS):
            first = TracebackType(first, call.tb_frame, call.tb_lasti, call.tb_lineno)
    return first


def _is_library(file: str) -> bool:
    folders = [Path(orchestra.__file__).parent, *map(Path, map(sysconfig.get_path, _INSTALLED))]
    return file.startswith("<frozen ") or any(Path(file).is_relative_to(folder) for folder in folders)


class _ErrorPrinter:
    """An excepthook that prints orchestra's errors in a few lines, and passes other errors to the previous hook."""

    def __init__(self) -> None:
        self._before: Hook | None = None

    def install(self) -> None:
        """Install the hook, unless it or a later one is installed."""
        if self._before is None or sys.excepthook is sys.__excepthook__:
            self._before, sys.excepthook = sys.excepthook, self

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print an uncaught error, and end the script with its exit code."""
        assert self._before is not None
        if not isinstance(error, OrchestraError):
            self._before(kind, error, trace)
            return
        if self._before is sys.__excepthook__:
            # In one write, since other processes write there, too. Of several interrupted ones, only the first prints.
            silent = isinstance(error, Interrupted) and environment.is_member()
            sys.stderr.write("" if silent else formatted(error, trace))
        else:
            self._before(kind, error, trace)
        if not hasattr(sys, "ps1"):  # an interactive session goes on
            raise SystemExit(error.exit_code)


error_printer = _ErrorPrinter()


def formatted(error: OrchestraError, trace: TracebackType | None) -> str:
    """Return an error with the lines of the user's script, without the frames of orchestra."""
    if isinstance(error, Interrupted):
        return f"{error}\n"
    # An error of another process is unrelated to this process's stack.
    frames = [] if isinstance(error, Stopped | WorkerLost) else traceback.extract_tb(trace)
    lines = traceback.format_list([frame for frame in frames if not _is_library(frame.filename)])
    return f"{''.join(lines)}{type(error).__name__}: {error}\n"
