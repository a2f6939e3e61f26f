# SPDX-License-Identifier: Apache-2.0
"""The names of the files that were given on the command line: strategies defined there can be named as text.

A class is known while the command runs that named its file, and not for ever after it was once defined.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_given: ContextVar[tuple[Mapping[str, Any], ...]] = ContextVar("orchestra-script-names", default=())


@contextmanager
def scope() -> Iterator[None]:
    """Forget at the end what was added inside."""
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
