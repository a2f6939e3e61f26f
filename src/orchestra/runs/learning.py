# SPDX-License-Identifier: Apache-2.0
"""Whether a run learned anything: from its training loss, and from its accuracy where chance level is known.

    unknown   no losses
    unknown   fewer than 50 steps of a worker, unless the run diverged: of the last three losses of each worker, or of
              those of the last quarter, three quarters are at least twice the initial one
    no        a score of the initial model was finite and that of the final one is not
    no        the accuracy is at chance level
    yes       the accuracy is more than half way from chance level to 1
    no        three quarters of the losses in the last tenth of the steps are not below the initial one
    yes       three quarters of them are below it
    unknown   otherwise

The first line that applies counts. The initial loss is the mean over the workers' first steps. Chance level is the
share of the largest class, plus two standard deviations of what guessing scores on so many samples. It is known only
where labels could be counted and are balanced: if one label is frequent, a model that always predicts that label may
well have a falling loss.

If the loss never rose above the initial one by more than a tenth, the suspected reason is a learning rate that is too
small, or too few steps. Otherwise it is a learning rate that is too large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestra.runs.events import Scored, Stepped

FEWEST = 50  # steps of a worker; of shorter runs, only those that diverged are judged
_DIVERGED = 2  # times the initial loss, in a short run
_LAST = 3  # losses of each worker, at least, by which a short run is judged
_ROSE = 1.1  # times the initial loss
_BALANCED = 1.25  # largest class, as a multiple of an equal share
_COUNTED = 1000  # at most so many samples count when the noise of guessing is estimated: test sets may be small
_SIGMAS = 2


@dataclass(frozen=True)
class Learning:
    """Whether a run learned; if it did not, a short reason, and the figures with what to do."""

    learned: bool | None = None
    unlearned: str | None = None
    why_unlearned: str | None = None


def chance(labels: Any) -> float | None:
    """Return the accuracy that guessing may reach; None where labels are unknown or not balanced."""
    match labels:
        case {"classes": int(classes), "count": int(count), "largest": float(largest)} if classes > 1 and count > 0:
            noise = _SIGMAS * math.sqrt(1 / classes * (1 - 1 / classes) / min(count, _COUNTED))
            balanced = 0 < largest <= _BALANCED / classes + noise
            return largest + noise if balanced and largest + noise < 1 else None
    return None


def judge(stepped: Sequence[Stepped], scores: Sequence[Scored], labels: Any, *, steps: int, stale: bool) -> Learning:
    """Judge a finished run; `stale`: whether gradients were applied to a newer model than they were computed at."""
    by_node: dict[int, list[float]] = {}
    for e in stepped:
        if e.loss is not None:
            by_node.setdefault(e.node, []).append(e.loss)
    if not by_node:
        return Learning()
    firsts = [losses[0] for losses in by_node.values()]
    initial = sum(firsts) / len(firsts)
    last = sorted(loss for losses in by_node.values() for loss in losses[-max(1, len(losses) // 10) :])
    guess, accuracies = chance(labels), [s.metrics["accuracy"] for s in scores if _is_number(s, "accuracy")]
    once = guess is not None and any(_is_good(accuracy, guess) for accuracy in accuracies)
    if steps < FEWEST and not _diverged([*by_node.values()], initial):
        return Learning()
    if (why := _by_score(scores, guess)) is None:
        if guess is not None and accuracies and _is_good(accuracies[-1], guess):
            return Learning(True)
        if (learned := _by_loss(last, initial)) is not False:
            return Learning(learned)
        why = f"the training loss was {initial:.4g} in the first step and {last[len(last) // 2]:.4g} in the end"
    small = max(loss for losses in by_node.values() for loss in losses) <= _ROSE * initial
    suspect, remedy = _suspicion(small=small and not once, stale=stale)
    return Learning(False, f"{'collapsed' if once else 'did not learn'} ({suspect}?)", f"{why}. {remedy}")


def _diverged(workers: Sequence[Sequence[float]], initial: float) -> bool:
    last = sorted(loss for losses in workers for loss in losses[1:][-max(_LAST, len(losses) // 4) :])
    return len(last) >= _LAST * len(workers) and 0 < _DIVERGED * initial <= last[len(last) // 4]


def _is_good(accuracy: float, guess: float) -> bool:
    return accuracy > (1 + guess) / 2


def _is_number(score: Scored, name: str) -> bool:
    value: Any = score.metrics.get(name)  # null in a file stands for a number that is not finite
    return value is not None and math.isfinite(value)


def _by_score(scores: Sequence[Scored], guess: float | None) -> str | None:
    """Return why the final model is useless according to its scores; None if they do not say so."""
    if not scores or not scores[-1].number:
        return None
    first, last = scores[0], scores[-1]
    if lost := [name for name in first.metrics if _is_number(first, name) and not _is_number(last, name)]:
        return f"{', '.join(lost)} of the final model {'is no number' if len(lost) == 1 else 'are no numbers'}"
    if guess is None or not _is_number(last, "accuracy") or last.metrics["accuracy"] > guess:
        return None
    return (
        f"the final accuracy {last.metrics['accuracy']:.4g} is no better than guessing, which scores up to {guess:.2g}"
    )


def _by_loss(last: Sequence[float], initial: float) -> bool | None:
    """Return whether most of the last losses, sorted by size, are below the initial one; None if that is unclear."""
    low, high = last[len(last) // 4], last[(3 * len(last)) // 4]
    return False if low >= initial else True if high < initial else None


def _suspicion(*, small: bool, stale: bool) -> tuple[str, str]:
    if small:
        return "rate too small, or too few steps", "Use a larger learning rate, or train longer."
    if stale:
        return (
            "rate too large for stale gradients",
            "Use a smaller learning rate and less momentum: training with gradients that are several updates "
            "old diverges at rates and momenta that suit allreduce.",
        )
    return "rate too large", "Use a smaller learning rate, or clip the gradients."
