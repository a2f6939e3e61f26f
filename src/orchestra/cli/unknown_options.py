# SPDX-License-Identifier: Apache-2.0
"""The message about an option that a command does not have: a near miss, or the commands that have it.

The parser suggests whatever looks a little like it: `--trusted-network`, which switches encryption off, for
`run --network`. A suggestion is kept only if it differs by a few letters.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

_NEAR = 0.8  # similarity, of 1, from which on an option counts as misspelt

# By option, for commands that train on real processes.
_INSTEAD = {
    "--network": "Real processes use the network that is there: simulate another one with `orchestra sim --network`, "
    "or emulate one between real processes with `orchestra compare --lab` or `orchestra lab`.",
    "--sim": "Use `orchestra sim`, which simulates one run.",
    "--numerics": "Only a simulation can leave the numbers out: use `orchestra sim`.",
    "--lab": "Build the hosts with `orchestra lab up`, then run a command on all of them with `orchestra lab run`.",
    "--hosts": "Start one run on many machines with `orchestra launch --hosts FILE -- run ...`.",
}
_REAL = ("run", "resume", "demo")


def explain(error: Any) -> None:
    """Replace the parser's suggestions for an option that does not exist by better ones."""
    context = error.ctx
    if context is None or context.parent is None:
        return
    option, verb = error.option_name, context.info_name
    commands = getattr(context.parent.command, "commands", {})
    others = [name for name, command in commands.items() if name != verb and option in _options(command)]
    near = difflib.get_close_matches(option, [*_options(context.command)], n=1, cutoff=_NEAR)
    said = [error.message.rstrip(".")]
    said += [f"Did you mean {near[0]}?"] if near else []
    said += [f"{option} is an option of {context.parent.command_path} {_listed(others)}."] if others else []
    said += [_INSTEAD[option]] if option in _INSTEAD and verb in _REAL else []
    error.message, error.possibilities = ". ".join(said[:2]) + "".join(f" {more}" for more in said[2:]), None


def _options(command: Any) -> Iterator[str]:
    """Yield the long options of a command."""
    for parameter in command.params:
        yield from (name for name in parameter.opts if name.startswith("--"))


def _listed(names: list[str]) -> str:
    """Join names for a sentence.

    >>> _listed(["sim", "compare", "sweep"])
    'sim, compare and sweep'
    """
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
