# SPDX-License-Identifier: Apache-2.0
"""Resuming a run: whether its checkpoint fits, how many steps are left, which events happen again.

A complete run stays as it is under the same budget. Under a larger one it goes on; a smaller one is refused.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

import orchestra.runs.budget as budgets
from orchestra.engine import checkpoint
from orchestra.engine.checkpoint import Checkpoint
from orchestra.engine.fingerprint import budget_of
from orchestra.engine.runner import Runner
from orchestra.engine.snapshot import FINAL, MODEL, numbered
from orchestra.engine.spec import RunSpec
from orchestra.errors import CheckpointError, ConfigError, Problem
from orchestra.runs import events, files
from orchestra.runs.budget import Epochs, Seconds, Steps, Target
from orchestra.runs.events import Event, encode, read
from orchestra.runs.facts import Facts, facts_of, scores_of

_LONGEST_SQUARED = 16_384  # a longer side of a layer gets no square matrix
_LOG = re.compile(r"(?:events|trace)-([0-9]+)\.jsonl")


def find(folder: Path, about: dict[str, Any], runner: Runner, largest: int) -> Checkpoint:
    """Return the newest whole checkpoint of a run; raise if the run had other settings.

    `largest`: upper bound on the bytes of a part; see `largest_part`.
    """
    if (folder / "ending.json").exists() and not (folder / "checkpoints").exists():
        raise CheckpointError(
            f"{folder} is complete, and no checkpoint was kept to go on from. Train again, with --checkpoint-every or "
            "checkpoint_every=..., which also keeps a checkpoint of the end."
        )
    saved, complaints = checkpoint.newest(folder / "checkpoints", largest)
    for complaint in complaints:
        print(f"warning: {complaint}; going on from {saved.path.name}", file=sys.stderr)
    _require_same_run(saved.path, saved.manifest, about, runner)
    return saved


def largest_part(module: nn.Module, nodes: int) -> int:
    """Bytes that no node's part of a checkpoint of this model has more of, by far.

    Strategies keep some vectors like x for each node, and optimizers some more; those of the Shampoo family keep
    square matrices for every side of a layer, up to a length.
    """
    shapes = [t.shape for t in (*module.parameters(), *module.buffers())]
    vectors = (64 + 16 * nodes) * sum(shape.numel() for shape in shapes)
    squares = 4 * sum(min(side, _LONGEST_SQUARED) ** 2 for shape in shapes for side in shape)
    words = files.SMALL + 4096 * (len(shapes) + nodes)
    return 8 * (vectors + squares) + 4 * words


def _require_same_run(path: Path, before: dict[str, Any], about: dict[str, Any], runner: Runner) -> None:
    """Raise if a checkpoint belongs to another run."""
    for key, value in about.items():
        if before.get(key) != value:
            remedy = "Resume with the same model, data, optimizer, strategy and cluster."
            if key == "model":
                remedy += " Where its layers come from a set, whose order changes: sort it, or set PYTHONHASHSEED."
            if key in ("workers", "servers"):
                remedy = runner.how_to_have(int(before["workers"]), int(before["servers"]))
            raise CheckpointError(f"{path} was written with {key} = {before.get(key)!r}, now it is {value!r}. {remedy}")


def left_by(folder: Path) -> tuple[dict[str, Any], Facts]:
    """Return the configuration and the facts of a complete run."""
    try:
        config, facts = dict(files.read_json(folder / "config.json")), facts_of(folder)
        if not 0 <= facts.seconds < math.inf:
            raise ValueError(f"it took {facts.seconds} s")
        return config, facts
    except (OSError, ArithmeticError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise damaged(folder, error) from None


def damaged(folder: Path, error: Exception) -> CheckpointError:
    """Return the error for a complete run whose files cannot be read."""
    return CheckpointError(
        f"{folder} is complete, but what it left is damaged: {error}. If it has checkpoints, remove its ending.json: "
        "resuming then concludes the run again."
    )


def is_complete(folder: Path) -> bool:
    """Return whether a run of `train` is complete and left a model file, which is not read."""
    return (folder / "ending.json").exists() and (folder / MODEL).exists()


def as_it_ended(folder: Path, about: dict[str, Any], runner: Runner, spec: RunSpec) -> Facts | None:
    """Return the facts of a complete run, if the budget asks for no more than was done."""
    if not is_complete(folder):
        return None
    config, facts = left_by(folder)
    reached = any(part.reached(facts.metrics) for part in budgets.parts(spec.budget) if isinstance(part, Target))
    if not reached and config.get("budget") != budget_of(spec) and spec.last_step != facts.steps:
        return None
    _require_same_run(folder / "config.json", config, about, runner)
    figures = "".join(f", {name} {value:.4g}" for name, value in facts.metrics.items())
    timed = facts.stopped_by == "seconds"
    more = larger(budgets.parts(spec.budget), facts.steps, facts.seconds, spec.steps_per_epoch, timed=timed)
    print(f"{folder} is complete: {facts.made}{figures}. Nothing is trained; {_go_on(more)}.", file=sys.stderr)
    return facts


def clock(saved: Checkpoint) -> float:
    """Return the seconds of training at a checkpoint: the latest of the nodes that save models, and worker 0."""
    return max(_progress(saved, node)[0] for node in {0, _holder(saved)})


def _progress(saved: Checkpoint, node: int) -> tuple[float, int]:
    """Return the seconds of training and the number of snapshots in a node's part."""
    try:
        part = saved.node(node)
        seconds, snapshots = part["cost"][0], part["counts"][3]
        if not 0 <= seconds < math.inf or type(snapshots) is not int:
            raise ValueError(f"{seconds!r} seconds, {snapshots!r} snapshots")
        return float(seconds), snapshots
    except (LookupError, TypeError, ValueError) as error:
        what = f"holds neither the time nor the snapshots: {type(error).__name__} {error}"
        raise CheckpointError(f"{saved.path / checkpoint.part_name(node)} {what}.") from None


def _holder(saved: Checkpoint) -> int:
    """Return the node that writes the models of snapshots."""
    return int(saved.manifest["workers"]) if saved.manifest["servers"] else 0


def look_at_budget(folder: Path, saved: Checkpoint, spec: RunSpec, done: float) -> bool:
    """Return whether anything is left to train; refuse a budget that is already spent. `done`: seconds so far.

    A run that was interrupted after its last step may still be concluded.
    """
    spent, why, step, what, timed = False, "", saved.step, "the checkpoint", False
    ended = left_by(folder)[1] if is_complete(folder) else None
    if ended is not None:
        step, done, what = ended.steps, ended.seconds, "the run"
    seconds = next((part.count for part in budgets.parts(spec.budget) if isinstance(part, Seconds)), math.inf)
    # Where workers retire, the others do more steps than the budget of each.
    comparable = (spec.strategy.layout.updates.synchronous or ended is not None) and not spec.strategy.layout.promotes
    if comparable and spec.last_step is not None and step >= spec.last_step:
        spent = step > spec.last_step
        why = f"it ends at step {spec.last_step:,}, and {what} is already at {step:,}"
    elif done >= seconds:
        timed = True
        why = f"it ends after {seconds:g} s, and {done:.3g} s of training are already done"
    if not why:
        return True
    more = larger(budgets.parts(spec.budget), step, done, spec.steps_per_epoch, timed=timed)
    message = f"nothing left to do: {why}; {_go_on(more)}"
    if spent or ended is not None:
        raise ConfigError([Problem("budget", budgets.words(budget_of(spec)), message)])
    print(f"{message}. The run is concluded now.", file=sys.stderr)
    return False


def remember(folder: Path, **now: Any) -> None:
    """Replace entries of the run's configuration, such as the budget, by those of this call."""
    path = folder / "config.json"
    checkpoint.write_text(path, json.dumps(files.read_json(path) | now, indent=1))


def larger(
    parts: Iterable[object], steps: int, seconds: float, steps_per_epoch: int | None, *, timed: bool
) -> Epochs | Steps | Seconds | None:
    """Return the least budget, in whole numbers, that goes on after so many steps and seconds.

    It is in the unit of the part that ran out; None if no part of the budget is of these kinds.

    `timed`: the seconds ran out, so that more of them are needed. Without `steps_per_epoch` all epochs count as done.
    """
    limits = [part for part in parts if isinstance(part, Epochs | Steps | Seconds)]
    ran_out = [part for part in limits if isinstance(part, Seconds) == timed]
    match next(iter(ran_out or limits), None):
        case Epochs(count):
            return Epochs((steps // steps_per_epoch if steps_per_epoch else math.floor(count)) + 1)
        case Steps():
            return Steps(steps + 1)
        case Seconds():
            return Seconds(math.floor(seconds) + 1)
    return None


def _go_on(more: Epochs | Steps | Seconds | None) -> str:
    if more is None:
        return "a larger budget would go on"
    name = type(more).__name__
    return f"--{name.lower()} {more.count} or more, or budget={name}({more.count}), would go on"


def _is_of(saved: Checkpoint, event: Event) -> bool:
    """Return whether an event records this checkpoint: it separates the dropped events before and after."""
    return isinstance(event, events.Saved) and event.step == saved.step


def forget_after(run: Path, saved: Checkpoint) -> None:
    """Drop the records of an interrupted run after its checkpoint: the same will happen again."""
    (run / "ending.json").unlink(missing_ok=True)
    shutil.rmtree(run / FINAL, ignore_errors=True)
    for draft in (run / "checkpoints").glob("*.tmp"):
        shutil.rmtree(draft, ignore_errors=True)
    taken = _progress(saved, _holder(saved))[1] or _progress(saved, 0)[1]  # servers may not have had the model yet
    for number, folder in numbered(run / "snapshots"):
        if number > taken:
            shutil.rmtree(folder)
    for node, path in files.numbered(run, _LOG):
        if node >= saved.manifest["workers"] + saved.manifest["servers"]:
            continue  # of no node of this run
        until = _progress(saved, node)[0]
        kept = [event for event in read(path) if event.t <= until or _is_of(saved, event)]
        checkpoint.write_text(path, "".join(encode(event) for event in kept))
    scores = [score for score in scores_of(run) if score.number <= taken]
    checkpoint.write_text(run / "scores.jsonl", "".join(encode(score) for score in scores))
