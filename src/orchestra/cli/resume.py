# SPDX-License-Identifier: Apache-2.0
"""`orchestra resume`: go on with a run that was stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestra import environment
from orchestra.cli import options as o
from orchestra.cli import sources
from orchestra.cli.options import Options
from orchestra.cli.run import carry_out, conclude
from orchestra.errors import CheckpointError, ConfigError, Problem


def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.", show_default=False)],
    epochs: o.Epochs = None,
    steps: o.Steps = None,
    seconds: o.Seconds = None,
    target: o.Goal = None,
    checkpoint_every: o.CheckpointEvery = None,
    token_file: o.TokenFile = None,
    trusted: o.Trusted = False,
    json_: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Go on from the newest checkpoint of a run that `orchestra run` began.

    Model, data, strategy and cluster are those of the run. A budget given here replaces the run's own, and counts from
    the run's beginning: `--epochs 10` ends after ten epochs in all.

    For example:

      orchestra resume runs/2026-01-31-120000-slowmo
      orchestra resume runs/mine --epochs 40
    """
    more = Options(epochs=epochs, steps=steps, seconds=seconds, target=target, checkpoint_every=checkpoint_every)
    joining = {"token_file": str(token_file) if token_file else None, "trusted": trusted or None}
    source, before, args = _remembered(run)
    if not environment.is_member():  # else process 0 sees to it: this machine may not even see the run folder
        _refuse_without_use(run, more)
    chosen = Options(**_joined(before, more.given()) | {"out": str(run)} | joining)
    runs = carry_out(source, chosen, args, quiet=quiet, more={"resume": lambda old: True})
    conclude(source, chosen, runs, as_json=json_, quiet=quiet)


def _refuse_without_use(run: Path, more: Options) -> None:
    """Nothing to go on from, or nothing to do."""
    if not list((run / "checkpoints").glob("step-*")):
        raise CheckpointError(
            f"{run} has no checkpoint. Ctrl-C writes one, and so does `orchestra run --checkpoint-every`."
        )
    if (run / "ending.json").exists() and not more.given():
        message = f"is complete, nothing left to do: {_ended(run)} would go on"
        raise ConfigError([Problem("run", str(run), message)])


def _ended(run: Path) -> str:
    """What ended a run, and an option that goes further."""
    budget = json.loads((run / "config.json").read_text(encoding="utf-8")).get("budget") or []
    for part in budget:
        name, _, value = str(part).partition("=")
        if name in ("epochs", "steps", "seconds"):
            return f"it was to end after {', '.join(map(str, budget))}; --{name} {2 * float(value):g}"
    return "a larger budget, e.g. --epochs 10,"


def _joined(before: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """New options over old ones. A new end of the run takes the place of every old one."""
    ends = {"epochs", "steps", "seconds"}
    if ends & more.keys():
        before = {name: value for name, value in before.items() if name not in ends}
    return before | more


def _remembered(run: Path) -> tuple[sources.Source, dict[str, Any], list[str]]:
    """How the run was begun, as its config.json tells."""
    if not run.is_dir():
        raise ConfigError([Problem("run", str(run), "there is no such folder")])
    try:
        note = json.loads((run / "config.json").read_text(encoding="utf-8")).get("note") or {}
        known = {field for field in Options.__dataclass_fields__}
        options = {name: value for name, value in dict(note["options"]).items() if name in known}
        return sources.find(str(note["recipe"])), options, [str(arg) for arg in note.get("args", [])]
    except FileNotFoundError:
        raise ConfigError([Problem("run", str(run), "holds no config.json: it is not a run folder")]) from None
    except KeyError:
        why = "was not begun by `orchestra run`: call train(..., out=..., resume=True) where you called train"
        raise ConfigError([Problem("run", str(run), why)]) from None
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{run / 'config.json'} is damaged: {error}") from None
