# SPDX-License-Identifier: Apache-2.0
"""`orchestra run`: train once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from orchestra.cli import local_processes, loop_summary, on_ray, sources, summary
from orchestra.cli import options as o
from orchestra.cli.options import Options
from orchestra.cli.sources import Source
from orchestra.engine import environment
from orchestra.engine.overrides import Change
from orchestra.errors import ConfigError, Problem
from orchestra.runs import progress

if TYPE_CHECKING:
    from orchestra.user_loop.handle import LoopHandle


def run(
    recipe: o.What, args: o.Args = None,
    strategy: o.Strategy = None, batch: o.Batch = None, lr: o.Lr = None, lr_factor: o.LrFactor = None,
    momentum: o.Momentum = None, optimizer: o.Optimizer = None, schedule: o.Schedule = None, clip: o.Clip = None,
    precision: o.Precision = None, partition: o.Spread = None, seed: o.Seed = None,
    epochs: o.Epochs = None, steps: o.Steps = None, seconds: o.Seconds = None, target: o.Goal = None,
    workers: o.Workers = None, servers: o.Servers = None, device: o.Device = None,
    compute_time: o.ComputeTime = None, straggler: o.Straggler = None,
    token_file: o.TokenFile = None, trusted: o.Trusted = False, order: o.Order = None, grace: o.Grace = None,
    on: o.On = None, ray_address: o.RayAddress = "auto",
    out: o.Out = None, checkpoint_every: o.CheckpointEvery = None, evaluate_every: o.EvaluateEvery = None,
    score_afterwards: o.ScoreAfterwards = False, trace: o.Trace = False, json_: o.Json = False, quiet: o.Quiet = False,
) -> None:  # fmt: skip
    r"""Train once: a recipe by name, or your own script.

    Without an option, the value of the recipe or script holds. Of several budgets (epochs, steps, seconds, target), the
    first that is spent ends the run. Ctrl-C writes a checkpoint and stops; `orchestra resume` continues from it.

    For example:

      orchestra run digits
      orchestra run digits --strategy "ps(consistency=asp())" --workers 4
      orchestra run fashion-lenet -s slowmo --target accuracy=0.88 --seconds 90
      orchestra run train.py -s "localsgd(tau=16)" -n 4 -- --your arguments

    A script with its own training loop, which calls orchestra.prepare, runs in one process for each worker and server,
    as under torchrun. --strategy replaces the script's strategy.

    On several machines, every process runs the same command; if the strategy has servers, the last processes are those:

      orchestra launch --hosts hosts.txt -- run digits -s ps     over ssh
      orchestra run digits --on ray -n 4                         on a Ray cluster
      torchrun --nnodes 4 --nproc-per-node 1 ... \
          -m orchestra run digits -s ps --token-file token
    """
    chosen = Options(
        strategy=strategy, workers=workers, servers=servers, epochs=epochs, steps=steps, seconds=seconds,
        target=target, seed=seed, batch=batch, lr=lr, lr_factor=lr_factor, momentum=momentum,
        optimizer=optimizer, schedule=schedule,
        out=str(out) if out else None, device=device,
        checkpoint_every=checkpoint_every, partition=partition, precision=precision, clip=clip,
        compute_time=compute_time, straggler=straggler,
        token_file=str(token_file) if token_file else None, trusted=trusted or None, order=order, grace=grace,
        evaluate_every=evaluate_every, score_afterwards=score_afterwards or None, trace=trace or None,
    )  # fmt: skip
    source = find(recipe, chosen)
    if on is not None:
        raise typer.Exit(on_ray.run_on(on, source, chosen, args or [], as_json=json_, quiet=quiet, at=ray_address))
    if source.holds_loop:
        if problems := [*local_processes.problems_of(chosen, as_json=json_), *chosen.read(of_script=True)[1]]:
            raise ConfigError(problems)
        if not environment.launched() and on_ray.nodes_of(chosen) > 1:
            raise typer.Exit(local_processes.start(source, chosen, args or [], quiet=quiet))
    runs = carry_out(source, chosen, args or [], quiet=quiet)
    conclude(source, chosen, runs, as_json=json_, quiet=quiet)


def find(recipe: str, chosen: Options) -> Source:
    """Find the recipe or script. If there is none, the error lists the problems of the options as well."""
    try:
        return sources.find(recipe)
    except ConfigError as error:
        raise ConfigError([*error.problems, *chosen.read(of_script=True)[1]]) from None


def carry_out(
    source: Source, chosen: Options, args: Sequence[str], *, quiet: bool, more: dict[str, Change] | None = None
) -> list[Path]:
    """Train with a display, and return the run folders: a script may make several."""
    from orchestra.worlds.shared_memory import fork_server

    changes, problems = chosen.read(of_script=source.path is not None)
    if problems:
        raise ConfigError([*problems, *sources.problems_of(source, changes)])
    if source.holds_loop and chosen.sim:
        why = "has a training loop of its own, which runs in real time: define a RECIPE, or call orchestra.train"
        raise ConfigError([Problem("script", str(source.path), why)])
    if not chosen.sim and not source.holds_loop and not environment.launched():
        fork_server.warm()  # imports torch in another process while this one does the same
    note = {"recipe": source.name, "args": list(args), "options": chosen.given()}
    with progress.choose(quiet=quiet or environment.is_member(), seconds=chosen.seconds) as display:

        def show(old: Any) -> Any:
            def both(watch: Any) -> None:
                display(watch)
                old(watch)

            return display if old is None else both

        changes |= {"progress": show, "note": lambda old: {**(old or {}), **note}} | (more or {})
        prints_loops = source.path is not None and not quiet and not environment.is_member()
        handles: list[LoopHandle] = []
        with loop_summary.afterwards(handles) if prints_loops else nullcontext():
            sources.perform(source, changes, args, display, handles)
    return display.runs


def conclude(source: Source, chosen: Options, runs: list[Path], *, as_json: bool, quiet: bool) -> None:
    """Print the outcome and what to try next."""
    if environment.is_member() or not runs:
        return  # process 0 prints it, or the script itself
    from orchestra.engine import warnings
    from orchestra.runs.facts import facts_of

    found = [(path, facts_of(path)) for path in runs]
    if not quiet:
        for warning in [warning for path in runs for warning in summary.warnings_of(path)]:
            if not warnings.was_said(warning):
                summary.say(f"warning: {warning}")
    if as_json:
        records = [summary.as_record(path, facts) for path, facts in found]
        summary.print_json(records[0] if len(records) == 1 else {"runs": records})
        return
    print("\n\n".join(summary.describe(path, facts) for path, facts in found), flush=True)
    facts = found[-1][1]
    if not quiet and facts.trained:
        summary.say(f"\nnext: {next_command(source, facts.strategy, facts.workers, chosen)}")


def next_command(source: Source, strategy: str, workers: int, chosen: Options | None = None) -> str:
    """Return a command to try after a run, on the same cluster."""
    what = source.name if source.path is None else summary.nearby(source.path)
    world = "" if chosen is None else _world(chosen)
    rivals = ["allreduce", "localsgd" if strategy.startswith("slowmo") else "slowmo"]
    rivals = [strategy, *(rival for rival in rivals if rival != strategy)]
    return f'orchestra compare {what} --strategies "{",".join(rivals)}" --workers {max(2, workers)}{world}'


def _world(chosen: Options) -> str:
    """Return the options that describe the simulated cluster."""
    if not chosen.sim:
        return ""
    given = (("network", chosen.network), ("compute-time", chosen.compute_time), ("straggler", chosen.straggler))
    return " --sim" + "".join(f' --{name} "{value}"' for name, value in given if value is not None)
