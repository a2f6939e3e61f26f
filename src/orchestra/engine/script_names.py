# SPDX-License-Identifier: Apache-2.0
"""The names defined in files given on the command line, so that their strategies can be named as text.

A class is known only while the command runs that named its file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_given: ContextVar[tuple[Mapping[str, Any], ...]] = ContextVar("orchestra-script-names", default=())


@contextmanager
def scope() -> Iterator[None]:
    """Forget the names that were added inside, at the end."""
    token = _given.set(_given.get())
    try:
        yield
    finally:
        _given.reset(token)


def add(namespace: Mapping[str, Any]) -> None:
    """Let the strategies of a module be named as text."""
    _given.set((*_given.get(), namespace))


def current() -> tuple[Mapping[str, Any], ...]:
    """Return the namespaces that were added."""
    return _given.get()
