# SPDX-License-Identifier: Apache-2.0
"""Changes that the command line makes to a script's own call of `train` or `prepare`.

`orchestra run script.py --strategy slowmo` runs the script as it is; this module applies the options of the command
line to its `train(...)`. A change is a function from the argument's old value to its new one, because some options
replace only a part of an argument: `--workers 4` keeps the rest of the script's `Local(...)`.

`orchestra compare script.py` runs the script only up to its `train(...)`, and takes the arguments from there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    R = TypeVar("R", bound=DataclassInstance)

Change = Callable[[Any], Any]


@dataclass
class ActiveOverrides:
    """The changes in force, and the number and the handles of the loops that were prepared with them."""

    changes: Mapping[str, Change]
    loops: int = 0
    captures: bool = False  # raise `Reached` with the arguments instead of carrying out a call
    handles: list[Any] = field(default_factory=list)


class Reached(BaseException):
    """Raised when a script reaches its call of `train` or `prepare`, to stop it there.

    Not an `Exception`: a script that handles those must not handle this one.
    """

    def __init__(self, arguments: Any = None) -> None:
        super().__init__("the script reached its call")
        self.arguments = arguments  # the arguments of `train`; None if the call was one of `prepare`


_use: ContextVar[ActiveOverrides | None] = ContextVar("orchestra-overrides", default=None)


def current() -> dict[str, Change]:
    """Return the changes in force, by the name of the argument of `train`."""
    use = _use.get()
    return {} if use is None else dict(use.changes)


@contextmanager
def using(
    changes: Mapping[str, Change], *, handles: list[Any] | None = None, captures: bool = False
) -> Iterator[ActiveOverrides]:
    """Put changes in force for every `train` and `prepare` called inside; or have the first call raise `Reached`.

    The handles of the loops that are prepared inside are appended to `handles`.
    """
    use = ActiveOverrides(changes, captures=captures, handles=[] if handles is None else handles)
    token = _use.set(use)
    try:
        yield use
    finally:
        _use.reset(token)


def apply(arguments: R) -> R:
    """Return the arguments of a call of `train` with the changes in force."""
    use, changes = _use.get(), current()
    if use is not None and use.captures:
        raise Reached(arguments)
    if not changes:
        return arguments
    return dataclasses.replace(arguments, **changed(vars(arguments), changes))


def of_a_loop(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of `prepare` with the changes in force, without those that only `train` has."""
    use = _use.get()
    if use is None:
        return dict(arguments)
    if use.captures:
        raise Reached
    use.loops += 1
    known = {name: change for name, change in use.changes.items() if name in arguments}
    return {**arguments, **changed(arguments, known)}


def note_handle(handle: Any) -> None:
    """Keep the handle of a prepared loop for the command that runs the script."""
    if (use := _use.get()) is not None:
        use.handles.append(handle)


def changed(arguments: Mapping[str, Any], changes: Mapping[str, Change]) -> dict[str, Any]:
    """Return the new values of the arguments that change.

    >>> changed({"batch": 32, "seed": 0}, {"batch": lambda old: 2 * old})
    {'batch': 64}
    """
    return {name: change(arguments.get(name)) for name, change in changes.items()}
