# SPDX-License-Identifier: Apache-2.0
"""Whether machines can play together: what each said of itself, and what is to be done where they differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orchestra.errors import ClusterError

Answer = Mapping[str, Any]  # of `orchestra.launchers.agent.check_machine`


def agree(answers: Sequence[tuple[str, Answer | str]]) -> list[Answer]:
    """The answers of all machines, each with its name; a text is a problem. Raises with all that is wrong."""
    found = [(name, answer) for name, answer in answers if not isinstance(answer, str)]
    problems = [f"{name}: {answer}" for name, answer in answers if isinstance(answer, str)]
    problems += [f"{name} {problem}" for name, answer in found for problem in answer["problems"]]
    problems += _differences(found)
    if problems:
        told = "\n".join(f"  {problem}" for problem in dict.fromkeys(problems))
        raise ClusterError(f"not every host is ready; nothing was started.\n{told}")
    return [answer for _, answer in found]


def _differences(found: Sequence[tuple[str, Answer]]) -> Iterator[str]:
    """Between the first machine and the others, of each the one that explains most."""
    for name, answer in found[1:]:
        first, expected = found[0]
        for what in ("orchestra", "torch"):
            if answer[what] != expected[what] and None not in (answer[what], expected[what]):
                yield f"{name} has {what} {answer[what]}, {first} has {expected[what]}: install the same on both"
                break
        else:
            if answer["code"] != expected["code"]:
                such = _such(answer["code"], expected["code"])
                yield f"{name} has other sources of orchestra than {first}{such}: install the same commit on both"


def _such(mine: Any, theirs: Any) -> str:
    """The first file that is not the same, if both say what they have of each: others of ours may not."""
    if not isinstance(mine, dict) or not isinstance(theirs, dict):
        return ""
    return f", such as {min(path for path in mine.keys() | theirs.keys() if mine.get(path) != theirs.get(path))}"
