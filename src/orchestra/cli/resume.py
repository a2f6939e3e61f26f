# SPDX-License-Identifier: Apache-2.0
"""`orchestra resume`: continue a run that was stopped."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestra.cli import on_ray, sources, summary
from orchestra.cli import options as o
from orchestra.cli.options import Options
from orchestra.cli.run import carry_out, conclude
from orchestra.engine import environment
from orchestra.errors import CheckpointError, ConfigError, Problem
from orchestra.runs import budget, files
from orchestra.runs.reading import visible

if TYPE_CHECKING:
    from orchestra.runs.facts import Facts

_OWN_TOKEN = "is not for --on: the processes that it starts have their own token"
_RENAMED = {"delay": "compute_time"}  # options of runs that the previous release started
_ENDS = {"epochs", "steps", "seconds", "target"}


def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.", show_default=False)],
    epochs: o.Epochs = None,
    steps: o.Steps = None,
    seconds: o.Seconds = None,
    target: o.Goal = None,
    token_file: o.TokenFile = None,
    trusted: o.Trusted = False,
    grace: o.Grace = None,
    on: o.On = None,
    ray_address: o.RayAddress = "auto",
    checkpoint_every: o.CheckpointEvery = None,
    json_: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Continue a run from its newest checkpoint.

    Model, data, strategy and cluster are those of the run. A budget given here replaces the run's own, and counts from
    the start of the run: `--epochs 10` ends after ten epochs in all. If the run is complete, its result is printed and
    nothing is trained. A larger budget continues it, if it was run with --checkpoint-every, which also keeps the end.

    For example:

      orchestra resume runs/2026-01-31-120000-slowmo
      orchestra resume runs/mine --epochs 40

    A run that several machines or torchrun started is resumed in the same way:

      orchestra launch --hosts hosts.txt -- resume runs/mine
      orchestra resume runs/mine --on ray
      torchrun --standalone --nproc-per-node 4 -m orchestra resume runs/mine
    """
    more = Options(
        epochs=epochs, steps=steps, seconds=seconds, target=target, checkpoint_every=checkpoint_every, grace=grace
    )
    joining = {"token_file": str(token_file) if token_file else None, "trusted": trusted or None}
    if is_complete(run) and not _ENDS & more.given().keys() and not environment.launched():  # else `train` reports it
        _tell_complete(run.absolute(), as_json=json_, quiet=quiet)
        return
    source, before, args = _remembered(run, together=on is not None or environment.launched())
    if on is not None:
        if unfit := [Problem(name, value, _OWN_TOKEN) for name, value in joining.items() if value is not None]:
            raise ConfigError(unfit)
        raise typer.Exit(on_ray.resume_on(on, run, more, as_json=json_, quiet=quiet, at=ray_address))
    if not environment.is_member():  # else process 0 does: this machine may not see the run folder
        _refuse_without_use(run)
    chosen = Options(**_joined(before, more.given()) | {"out": str(run)} | joining)
    runs = carry_out(source, chosen, args, quiet=quiet, more={"resume": lambda old: True})
    conclude(source, chosen, runs, as_json=json_, quiet=quiet)


def is_complete(run: Path) -> bool:
    """Return whether a run is complete. One whose model was deleted is not if a checkpoint can restore it."""
    over = (run / "ending.json").is_file() and (run / "config.json").is_file()
    return over and ((run / "model.safetensors").is_file() or not _checkpoints(run))


def _tell_complete(run: Path, *, as_json: bool, quiet: bool) -> None:
    """Print the result of a complete run, and an option that would continue it."""
    from orchestra.engine import resume

    config, facts = resume.left_by(run)
    if not config.get("loop") and not (run / "model.safetensors").is_file():
        raise CheckpointError(f"{run} is complete, but its model.safetensors is gone, and no checkpoint was kept.")
    if not quiet:
        summary.say(f"{summary.nearby(run)} is complete, nothing left to do: {_further(run, config, facts)}")
    if as_json:
        summary.print_json(summary.as_record(run, facts))
    else:
        print(summary.describe(run, facts), flush=True)


def _further(run: Path, config: dict[str, Any], facts: Facts) -> str:
    """Return what ended a run, and an option that would continue it if there is a checkpoint."""
    from orchestra.engine import resume

    kept = config.get("budget")
    texts = [*map(str, kept)] if isinstance(kept, list) else []
    ended = "its loop ended" if config.get("loop") else "its budget is unknown"
    if texts:
        ended = f"its budget was {visible(budget.words(texts))}"
    if not _checkpoints(run):
        return f"{ended}; there is no checkpoint to continue from"
    more = resume.larger(budget.read(texts), facts.steps, facts.seconds, None, timed=facts.stopped_by == "seconds")
    if more is None:
        return f"{ended}; a larger budget, e.g. --epochs 10, would go on"
    return f"{ended}; --{type(more).__name__.lower()} {more.count} or more would go on"


def _checkpoints(run: Path) -> list[Path]:
    from orchestra.engine import checkpoint

    return checkpoint.found_in(run / "checkpoints")


def _refuse_without_use(run: Path) -> None:
    """Raise if there is no checkpoint to continue from."""
    if not _checkpoints(run) and not is_complete(run):  # for a complete run, `train` checks whether one is needed
        raise CheckpointError(
            f"{run} has no checkpoint. Ctrl-C writes one, and so does `orchestra run --checkpoint-every`."
        )


def _joined(before: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return the old options with the new ones. A new end of the run replaces every old one."""
    ends = _ENDS - {"target"}
    if ends & more.keys():
        before = {name: value for name, value in before.items() if name not in ends}
    return before | more


def _unfit(run: Path, config: dict[str, Any], together: bool) -> str:
    """Return why a run cannot be resumed in this way and how it can, or an empty text if it can."""
    if config.get("loop"):
        return (
            "was made by a loop under orchestra.prepare, which saves its own state: start it again as before, with "
            "another folder"
        )
    kind, command = (config.get("cluster") or {}).get("kind"), shlex.join(["resume", str(run)])
    if kind == "local" and together:
        return f"was started by one process, which started the others: run `orchestra {command}` alone"
    if kind == "attached" and not together:
        nodes = int(config["workers"]) + int(config["servers"])
        return (
            f"was started in {nodes} processes, and is resumed in the same way: torchrun --standalone --nproc-per-node "
            f"{nodes} -m orchestra {command}, orchestra launch --hosts FILE -- {command}, or orchestra {command} --on "
            "ray"
        )
    return ""


def _remembered(run: Path, *, together: bool) -> tuple[sources.Source, dict[str, Any], list[str]]:
    """Return what was run, with which options and arguments, as its config.json has them.

    `together`: this process is one of several, or starts them.
    """
    if not run.is_dir():
        raise ConfigError([Problem("run", str(run), "there is no such folder")])
    try:
        config = files.read_json(run / "config.json")
        if why := _unfit(run, config, together):
            raise ConfigError([Problem("run", str(run), why)])
        note = config.get("note") or {}
        known = {field.name for field in dataclasses.fields(Options)}
        options = {_RENAMED.get(name, name): value for name, value in note["options"].items()}
        options = {name: value for name, value in options.items() if name in known}
        return sources.find(str(note["recipe"])), options, [str(arg) for arg in note.get("args", [])]
    except FileNotFoundError:
        raise ConfigError([Problem("run", str(run), "holds no config.json: it is not a run folder")]) from None
    except KeyError:
        why = "was not started by `orchestra run`: call train(..., out=..., resume=True) where you called train"
        raise ConfigError([Problem("run", str(run), why)]) from None
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{run / 'config.json'} is damaged: {error}") from None
