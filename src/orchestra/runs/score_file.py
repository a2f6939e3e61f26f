# SPDX-License-Identifier: Apache-2.0
"""The scores of a run, `scores.jsonl`: a file that stays small however many there are.

A file of more than LIMIT bytes is rewritten, half as long: the first and the last scores stay, the lowest and the
highest of each figure, and samples at equal intervals of time between them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from orchestra.runs.event_thinning import ends_and_samples
from orchestra.runs.events import Scored, encode
from orchestra.runs.facts import scores_of

NAME = "scores.jsonl"
LIMIT = 16 << 20  # bytes
_NAMES = 64  # figures whose best scores are kept


class ScoreFile:
    """Appends scores to the file of a run; without `thin` it keeps all of them."""

    def __init__(self, run: Path, *, thin: bool = True) -> None:
        self._run, self._path = run, run / NAME
        self._thin_at = LIMIT if thin else math.inf

    def append(self, scored: Scored) -> None:
        """Write one more score."""
        with self._path.open("ab") as file:
            file.write(encode(scored).encode())
            size = file.tell()
        if size > self._thin_at:
            self._rewrite(thinned(scores_of(self._run), LIMIT // 2))

    def _rewrite(self, scores: Sequence[Scored]) -> None:
        """Replace the file at once. If there is no room for a second file, let it grow before the next attempt."""
        draft = self._path.with_name(NAME + ".tmp")
        try:
            draft.unlink(missing_ok=True)
            with draft.open("x", encoding="utf-8") as file:
                file.writelines(map(encode, scores))
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._path)
        except OSError:
            draft.unlink(missing_ok=True)
        self._thin_at = max(LIMIT, 1.25 * self._path.stat().st_size)


def thinned(scores: Sequence[Scored], most: int) -> list[Scored]:
    """Choose scores that take about `most` bytes together; all of them if they fit."""
    size = sum(len(encode(score)) for score in scores)
    if size <= most:
        return [*scores]
    best = _best(scores)
    room = most * len(scores) // size - len(best)  # as if all were of mean length
    stay = ends_and_samples(np.array([score.t for score in scores]), max(1, room // 4))
    stay[[0, *best]] = True
    return [score for score, stays in zip(scores, stay.tolist(), strict=True) if stays]


def _best(scores: Sequence[Scored]) -> set[int]:
    """Find the scores with the lowest and the highest value of each figure; the first of equal ones."""
    low: dict[str, int] = {}
    high: dict[str, int] = {}
    for i, score in enumerate(scores):
        for name, value in score.metrics.items():
            if not isinstance(value, int | float) or (name not in low and len(low) >= _NAMES):
                continue
            if value < scores[low.setdefault(name, i)].metrics[name]:
                low[name] = i
            if value > scores[high.setdefault(name, i)].metrics[name]:
                high[name] = i
    return {*low.values(), *high.values()}
