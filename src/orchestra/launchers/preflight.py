# SPDX-License-Identifier: Apache-2.0
"""Whether machines can run one program: the report of each, and what to do where they differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orchestra.errors import ClusterError

Answer = Mapping[str, Any]  # of `orchestra.launchers.agent.check_machine`


def agree(answers: Sequence[tuple[str, Answer | str]]) -> list[Answer]:
    """Return the reports of all machines; raise with all problems. A text in place of a report is itself a problem."""
    found = [(name, answer) for name, answer in answers if not isinstance(answer, str)]
    problems = [f"{name}: {answer}" for name, answer in answers if isinstance(answer, str)]
    problems += [f"{name} {problem}" for name, answer in found for problem in answer["problems"]]
    problems += _differences(found)
    if problems:
        lines = "\n".join(f"  {problem}" for problem in dict.fromkeys(problems))
        raise ClusterError(f"not every host is ready; nothing was started.\n{lines}")
    return [answer for _, answer in found]


def _differences(found: Sequence[tuple[str, Answer]]) -> Iterator[str]:
    """Yield how machines differ from the first one: for each, the difference that explains most."""
    for name, answer in found[1:]:
        first, expected = found[0]
        for what in ("orchestra", "torch"):
            if answer[what] != expected[what] and None not in (answer[what], expected[what]):
                yield f"{name} has {what} {answer[what]}, {first} has {expected[what]}: install the same on both"
                break
        else:
            if answer["code"] != expected["code"]:
                such = _example(answer["code"], expected["code"])
                yield f"{name} has other sources of orchestra than {first}{such}: install the same commit on both"


def _example(mine: Any, theirs: Any) -> str:
    """Name the first file that differs, if both machines report their files: other versions may not."""
    if not isinstance(mine, dict) or not isinstance(theirs, dict):
        return ""
    return f", such as {min(path for path in mine.keys() | theirs.keys() if mine.get(path) != theirs.get(path))}"
