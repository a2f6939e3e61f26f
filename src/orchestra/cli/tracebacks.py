# SPDX-License-Identifier: Apache-2.0
"""Tracebacks of errors in the user's code, without the calls that lead there."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from types import TracebackType

import orchestra

_INSTALLED = ("stdlib", "platstdlib", "purelib", "platlib")  # of sysconfig


def from_users_code(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the first call of code that is not installed, or all of it if there is none."""
    libraries = [Path(orchestra.__file__).parent, *map(Path, map(sysconfig.get_path, _INSTALLED))]

    def is_library(file: str) -> bool:
        return file.startswith("<frozen ") or any(Path(file).is_relative_to(folder) for folder in libraries)

    first = trace
    while first is not None and is_library(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    return trace if first is None else first
