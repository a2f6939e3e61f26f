# SPDX-License-Identifier: Apache-2.0
"""A script with its own training loop in a comparison: each run is several processes, as `orchestra run` starts them.

The scores compared are those that the loop gives to `optimizer.orchestra.score(...)`. If it gives none, it is the loss
given to `optimizer.step(loss=loss)`.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from orchestra.cli import local_processes
from orchestra.cli.options import Options
from orchestra.cli.sources import Source
from orchestra.errors import ClusterError, ConfigError, Interrupted, Problem, nearest

if TYPE_CHECKING:
    from orchestra.runs.budget import Target
    from orchestra.runs.events import Scored

TRAINING_LOSS = "training_loss"
_POINTS = 40  # of a curve of losses
_REAL = (
    "runs in real time, in processes of this machine: a script with its own loop cannot be simulated. Leave it out, "
    "call orchestra.train, or define a RECIPE"
)
OWN_RATE = "sets its learning rate itself: tuning tries factors on it. Leave it out, or change the rate in the script"
_INTERRUPTED = (129, 130, 143)  # exit codes of a run that was asked to stop


@dataclass(frozen=True)
class Loop:
    """What stands in place of a recipe: only the loop knows how long it trains, and with what."""

    name: str
    epochs: float = math.nan
    more: dict[str, Any] = field(default_factory=dict)


def problems_of(source: Source, shared: Options, lab: str | None = None) -> Iterator[Problem]:
    """Yield the options that cannot be given for the runs of a loop."""
    simulated = {"sim": shared.sim, "network": shared.network} | {
        "compute-time": shared.compute_time, "straggler": shared.straggler,
    }  # fmt: skip
    for name, value in simulated.items():
        if value is not None:
            yield Problem(name, value, f"{source.label}.py {_REAL}")
    plain = replace(shared, sim=None, network=None, compute_time=None, straggler=None)
    yield from local_processes.problems_of(plain, as_json=False)
    if lab is not None:
        yield Problem("lab", lab, f"{source.label}.py has its own loop: orchestra lab run starts it in a lab")


def misfits(texts: Sequence[str]) -> list[Problem]:
    """Return problems of strategies that no loop can meet. Whether the loop has a loader shows when it runs."""
    from orchestra.engine import expression
    from orchestra.user_loop.arguments import problems_of_strategy

    found: list[Problem] = []
    for text in texts:
        with contextlib.suppress(ConfigError):  # reported elsewhere
            found += problems_of_strategy(expression.parse(text), loader=True, steps=True)
    return found


def run(source: Source, chosen: Options, target: Target) -> None:
    """Run once without printing, and raise what went wrong. The run folder then has scores."""
    from orchestra.runs.facts import scores_of

    if problems := [*local_processes.problems_of(replace(chosen, seconds=None), as_json=False)]:
        raise ConfigError(problems)
    code, last_words = local_processes.start_silently(source, replace(chosen, seconds=None), source.args)
    if code in _INTERRUPTED:
        raise Interrupted("stopped by a signal while a strategy ran.")
    if code == ConfigError.exit_code:
        raise ConfigError([Problem("script", str(source.path), last_words)])
    if code:
        raise ClusterError(last_words)
    folder = Path(chosen.out or "")
    scores = scores_of(folder) or _from_losses(folder)
    names = dict.fromkeys(name for scored in scores for name in scored.metrics)
    if not names or (target.metric and target.metric not in names):
        shutil.rmtree(folder, ignore_errors=True)  # so that the same command can be run again
    if not names:
        message = (
            "has no score to compare: call optimizer.orchestra.score(accuracy=accuracy) where it evaluates, or at "
            "least optimizer.step(loss=loss)"
        )
        raise ConfigError([Problem("script", str(source.path), message)])
    if target.metric and target.metric not in names:
        raise ConfigError(
            [Problem("target", target.metric, f"is no score of this loop; {nearest(target.metric, names)}")]
        )


def _from_losses(folder: Path) -> list[Scored]:
    """Make scores from the losses of all workers' steps, as many as fit on a curve, and write them."""
    from orchestra.engine import checkpoint
    from orchestra.runs.events import Scored, Stepped, encode
    from orchestra.runs.facts import events_of

    steps = [e for e in events_of(folder) if isinstance(e, Stepped) and e.loss is not None]
    last = max((e.step for e in steps), default=0)
    found: list[Scored] = []
    for i in range(_POINTS):
        some = [e for e in steps if i * last < e.step * _POINTS <= (i + 1) * last]
        if some:
            newest = max(some, key=lambda e: (e.step, e.t))
            loss = fmean(e.loss for e in some if e.loss is not None)
            found.append(Scored(newest.t, newest.step, newest.samples, len(found), {TRAINING_LOSS: loss}))
    if found:
        checkpoint.write_text(folder / "scores.jsonl", "".join(map(encode, found)))
    return found
