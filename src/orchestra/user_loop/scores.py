# SPDX-License-Identifier: Apache-2.0
"""The scores that a loop gives its model: `optimizer.orchestra.score(accuracy=...)`.

    any worker   its first, second, ... score        →   worker 0
    worker 0     writes its own at once, and at the end the mean over the workers that gave the same one

So every worker may score the model, on all test samples or on a share of them, or only one worker; no worker waits for
another. The file has the format of `train`: a line for each score in scores.jsonl.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from orchestra.engine import checkpoint
from orchestra.errors import ConfigError, Problem
from orchestra.runs import score_file
from orchestra.runs.events import Scored, encode
from orchestra.user_loop.peers import Peers
from orchestra.worlds.sockets.control_messages import FIGURES

_COORDINATOR = 0


def figures(given: Mapping[str, Any]) -> dict[str, float]:
    """Return the given figures as floats; raise `ConfigError` for values that are not numbers."""
    problems = [Problem("score", None, "name at least one figure: optimizer.orchestra.score(accuracy=0.9)")]
    problems = [] if given else problems
    if len(given) > FIGURES:
        problems.append(Problem("score", len(given), f"at most {FIGURES} figures are one score"))
    found: dict[str, float] = {}
    for name, value in given.items():
        try:
            found[name] = float(value.detach() if isinstance(value, Tensor) else value)
        except (TypeError, ValueError, RuntimeError):
            problems.append(Problem(f"score.{name}", type(value).__name__, "must be one number"))
    if problems:
        raise ConfigError(problems)
    return found


class LoopScores:
    """The scores of one run; worker 0 collects those of all workers."""

    def __init__(self, peers: Peers, folder: Path | None, rank: int) -> None:
        self._peers, self._folder, self._rank = peers, folder, rank
        self._given = 0  # by this worker
        self.last: dict[str, float] = {}  # of this worker
        self._by_number: dict[int, dict[int, Scored]] = {}  # and by worker
        self._warned = False
        peers.scored = self._handle_message

    def give(self, t: float, step: int, samples: int, metrics: dict[str, float]) -> None:
        """Add a score of this worker."""
        scored = Scored(t, step, samples, self._given, metrics)
        self._given += 1
        self.last = metrics
        if self._folder is None:
            return
        if self._rank != _COORDINATOR:
            about = {"number": scored.number, "t": t, "step": step, "samples": samples, "figures": metrics}
            self._peers.messenger.send_control(_COORDINATOR, {"kind": "score", **about})
            return
        self._keep(_COORDINATOR, scored)
        try:
            score_file.ScoreFile(self._folder).append(scored)
        except OSError as error:
            if not self._warned:
                print(f"warning: a score could not be written: {error}. It is tried again at the end.", file=sys.stderr)
            self._warned = True

    def _handle_message(self, source: int, said: Mapping[str, Any]) -> None:
        figures = {name: float(value) for name, value in said["figures"].items()}
        self._keep(source, Scored(float(said["t"]), said["step"], said["samples"], said["number"], figures))

    def _keep(self, source: int, scored: Scored) -> None:
        self._by_number.setdefault(scored.number, {})[source] = scored

    def write(self) -> None:
        """As worker 0, write the mean of each score, at the time of worker 0 if it gave one."""
        if self._folder is not None and self._by_number:
            means = [_mean([*self._by_number[n].items()]) for n in sorted(self._by_number)]
            kept = score_file.thinned(means, score_file.LIMIT)
            checkpoint.write_text(self._folder / score_file.NAME, "".join(map(encode, kept)))


def _mean(given: list[tuple[int, Scored]]) -> Scored:
    """Return the mean of one score over several workers."""
    scores = [scored for _, scored in sorted(given)]
    first, names = scores[0], dict.fromkeys(name for scored in scores for name in scored.metrics)
    mean = {name: fmean(s.metrics[name] for s in scores if name in s.metrics) for name in names}
    return Scored(first.t, first.step, first.samples, first.number, mean)
