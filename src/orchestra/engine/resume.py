# SPDX-License-Identifier: Apache-2.0
"""Going on with a run that was broken off: whether its checkpoint fits, what is left to do, what happens again.

Of a run that came to its end, nothing is left to do under the same budget: it is as it was. Under a larger one it goes
on; a smaller one is refused.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import orchestra.runs.budget as budgets
from orchestra.engine import checkpoint
from orchestra.engine.checkpoint import Checkpoint
from orchestra.engine.fingerprint import budget_of
from orchestra.engine.runner import Runner
from orchestra.engine.snapshot import FINAL, MODEL, numbered
from orchestra.engine.spec import RunSpec
from orchestra.errors import CheckpointError, ConfigError, Problem
from orchestra.runs import events, files
from orchestra.runs.budget import Budget, Epochs, Seconds, Steps, Target
from orchestra.runs.events import Event, encode, read
from orchestra.runs.facts import Facts, facts_of, scores_of

_TOLD = re.compile(r"(?:events|trace)-([0-9]+)\.jsonl")


def find(folder: Path, about: dict[str, Any], runner: Runner) -> Checkpoint:
    """Return the newest whole checkpoint of a run, if the run is the one that is asked for now."""
    if (folder / "ending.json").exists() and not (folder / "checkpoints").exists():
        raise CheckpointError(
            f"{folder} is complete, and no checkpoint was kept to go on from. Train anew, with --checkpoint-every or "
            "checkpoint_every=..., which keeps the end as well."
        )
    saved, complaints = checkpoint.newest(folder / "checkpoints")
    for complaint in complaints:
        print(f"warning: {complaint}; going on from {saved.path.name}", file=sys.stderr)
    _require_same_run(saved.path, saved.manifest, about, runner)
    return saved


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
    """What a run that came to its end says of itself: how it was asked for, and what it came to."""
    try:
        config = dict(files.read_json(folder / "config.json"))
        return config, facts_of(folder)
    except (OSError, ArithmeticError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise damaged(folder, error) from None


def damaged(folder: Path, error: Exception) -> CheckpointError:
    """A run is over, but what it left cannot be read."""
    return CheckpointError(
        f"{folder} is complete, but what it left is damaged: {error}. If it has checkpoints, remove its ending.json: "
        "resumed, it is concluded anew."
    )


def is_complete(folder: Path) -> bool:
    """Whether a run of `train` came to its end and left a model; only reading it tells whether it is one."""
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
    more = _more(spec.budget, facts.steps, facts.seconds, spec.steps_per_epoch)
    print(f"{folder} is complete: {facts.made}{figures}. Nothing is trained; {more} would go on.", file=sys.stderr)
    return facts


def clock(saved: Checkpoint) -> float:
    """Seconds of training at a checkpoint. Whoever sets models aside did not save at the same moment as worker 0."""
    return max(_said(saved, node)[0] for node in {0, _holder(saved)})


def _said(saved: Checkpoint, node: int) -> tuple[float, int]:
    """How many seconds of training and how many snapshots a node's part tells of."""
    try:
        part = saved.node(node)
        seconds, snapshots = part["cost"][0], part["counts"][3]
        if not 0 <= seconds < math.inf or type(snapshots) is not int:
            raise ValueError(f"{seconds!r} seconds, {snapshots!r} snapshots")
        return float(seconds), snapshots
    except (LookupError, TypeError, ValueError) as error:
        what = f"tells neither the time nor the snapshots: {type(error).__name__} {error}"
        raise CheckpointError(f"{saved.path / checkpoint.part_name(node)} {what}.") from None


def _holder(saved: Checkpoint) -> int:
    """The node that sets models aside."""
    return int(saved.manifest["workers"]) if saved.manifest["servers"] else 0


def look_at_budget(folder: Path, saved: Checkpoint, spec: RunSpec, done: float) -> None:
    """Refuse to do again what is done, which would look like a success; `done`: seconds of training so far.

    A run that was broken off after its last step may still be concluded.
    """
    spent, why, step, what = False, "", saved.step, "the checkpoint"
    ended = left_by(folder)[1] if is_complete(folder) else None
    if ended is not None:
        step, done, what = ended.steps, ended.seconds, "the run"
    seconds = next((part.count for part in budgets.parts(spec.budget) if isinstance(part, Seconds)), math.inf)
    # Where workers retire, the others do more steps than each was to do in the beginning.
    comparable = (spec.strategy.layout.updates.synchronous or ended is not None) and not spec.strategy.layout.promotes
    if comparable and spec.last_step is not None and step >= spec.last_step:
        spent = step > spec.last_step
        why = f"it ends at step {spec.last_step:,}, and {what} is already at {step:,}"
    elif done >= seconds:
        why = f"it ends after {seconds:g} s, and {done:.3g} s of training are already done"
    if not why:
        return
    message = f"nothing left to do: {why}; {_more(spec.budget, step, done, spec.steps_per_epoch)} would go on"
    if spent or ended is not None:
        raise ConfigError([Problem("budget", spec.budget, message)])
    print(f"{message}. The run is concluded now.", file=sys.stderr)


def remember(folder: Path, **now: Any) -> None:
    """Put what is asked for now, such as the budget, in the place of what was asked for in the beginning."""
    path = folder / "config.json"
    checkpoint.write_text(path, json.dumps(files.read_json(path) | now, indent=1))


def _more(budget: Budget, step: int, done: float, steps_per_epoch: int | None) -> str:
    """A budget of the same kind that is not spent."""
    for part in budgets.parts(budget):
        match part:
            case Epochs(count) if steps_per_epoch:
                more = math.ceil(step / steps_per_epoch) + math.ceil(count)
                return f"--epochs {more}, or budget=Epochs({more}),"
            case Steps(count):
                return f"--steps {step + count}, or budget=Steps({step + count}),"
            case Seconds(count):
                more = math.ceil(done + count)
                return f"--seconds {more}, or budget=Seconds({more}),"
    return "a larger budget"


def _is_of(saved: Checkpoint, event: Event) -> bool:
    """Whether an event tells of this very checkpoint: dropped events are counted apart before and after it."""
    return isinstance(event, events.Saved) and event.step == saved.step


def forget_after(run: Path, saved: Checkpoint) -> None:
    """Drop what a broken-off run recorded after its checkpoint: it will happen again."""
    (run / "ending.json").unlink(missing_ok=True)
    shutil.rmtree(run / FINAL, ignore_errors=True)
    for draft in (run / "checkpoints").glob("*.tmp"):
        shutil.rmtree(draft, ignore_errors=True)
    taken = _said(saved, _holder(saved))[1] or _said(saved, 0)[1]  # servers may not have had their turn
    for number, folder in numbered(run / "snapshots"):
        if number > taken:
            shutil.rmtree(folder)
    for node, path in files.numbered(run, _TOLD):
        if node >= saved.manifest["workers"] + saved.manifest["servers"]:
            continue  # of no node of this run
        until = _said(saved, node)[0]
        kept = [event for event in read(path) if event.t <= until or _is_of(saved, event)]
        checkpoint.write_text(path, "".join(encode(event) for event in kept))
    scores = [score for score in scores_of(run) if score.number <= taken]
    checkpoint.write_text(run / "scores.jsonl", "".join(encode(score) for score in scores))
