# SPDX-License-Identifier: Apache-2.0
"""All commands in one application."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from orchestra import recipes
from orchestra.cli import data, lab
from orchestra.cli.compare import compare
from orchestra.cli.demo import demo
from orchestra.cli.doctor import doctor
from orchestra.cli.explain import explain
from orchestra.cli.export import export
from orchestra.cli.help_text import flowing
from orchestra.cli.launch import launch
from orchestra.cli.probe import probe
from orchestra.cli.recommend import recommend
from orchestra.cli.report import report
from orchestra.cli.resume import resume
from orchestra.cli.run import run
from orchestra.cli.sim import sim
from orchestra.cli.strategies import strategies
from orchestra.cli.sweep import sweep
from orchestra.cli.top import top
from orchestra.cli.trace import trace
from orchestra.cli.unknown_options import explain as explain_option
from orchestra.cli.verb import Verb
from orchestra.cli.watch import watch
from orchestra.engine import environment, script_names
from orchestra.errors import Interrupted

# Typer brings its own copy of click from some version on, and does not export this class of it.
_NoSuchOption = sys.modules[typer.BadParameter.__module__].NoSuchOption


_VIEWERS = ("watch", "top")  # commands that only show runs: Ctrl-C is how they end


class _Verbs(TyperGroup):
    """A group that handles Ctrl-C itself, and keeps what was typed."""

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Keep the typed words in the `obj` of the context, for every command."""
        return super().make_context(info_name, args, parent, **{"obj": [*args]} | extra)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command; for a recipe or a script without one, suggest `run`."""
        if self.get_command(ctx, args[0]) is None and (args[0] in recipes.names() or args[0].endswith(".py")):
            command = shlex.join([ctx.command_path, "run", args[0]])
            ctx.fail(f"No such command {args[0]!r}. Did you mean `{command}`?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            with script_names.scope():
                return super().invoke(ctx)
        except _NoSuchOption as error:
            explain_option(error)
            raise
        except Interrupted as error:
            _say(str(error))
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            if ctx.invoked_subcommand not in _VIEWERS:
                _say("stopped before anything was saved.")
            raise typer.Exit(Interrupted.exit_code) from None


def _say(message: str) -> None:
    """Print a message; of several processes that were stopped together, only the first does."""
    if not environment.is_member():
        print(message, file=sys.stderr)


app = typer.Typer(
    cls=_Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)


def _version(asked: bool) -> None:
    if asked:
        from orchestra import __version__

        typer.echo(f"orchestra {__version__}")
        raise typer.Exit


def orchestra(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Train one model on several processes with any strategy, and see which strategy is best for you.

    Start here:

      orchestra demo                                 five strategies, on real data
      orchestra recommend digits --network 50mbit    which strategy for a cluster
      orchestra compare digits                       strategies side by side
      orchestra run digits --strategy slowmo         one run
      orchestra sim digits --workers 16              a run on simulated machines
      orchestra report runs/demo                     what happened, in a browser
      orchestra doctor                               what works on this machine

    Exit codes: 0 done, 1 failed, 2 cannot be run as asked, 3 this machine lacks something, 4 the processes did not
    come together, 5 diverged, 6 a process was lost, 7 checkpoint not usable, 8 reachable without a token, 9 an
    assertion does not hold, 10 another process ended the run, 130 stopped by Ctrl-C, 143 stopped by SIGTERM.
    """


app.callback(help=flowing(orchestra.__doc__ or ""))(orchestra)
_PANELS: dict[str, tuple[Callable[..., Any], ...]] = {
    "Choose a strategy": (recommend, compare, sweep, strategies, explain),
    "Train": (run, resume, sim, demo),
    "Look at runs": (top, watch, report, export, trace),
    "Machines and data": (doctor, probe, launch),
}
for _panel, _verbs in _PANELS.items():
    for _verb in _verbs:
        # Options after the command to launch belong to that command: `launch --hosts hosts.txt -- run digits`.
        _settings = {"allow_interspersed_args": _verb is not launch}
        _about = flowing(_verb.__doc__ or "")
        app.command(cls=Verb, help=_about, rich_help_panel=_panel, context_settings=_settings)(_verb)
app.add_typer(lab.app, rich_help_panel="Machines and data")
app.add_typer(data.app, rich_help_panel="Machines and data")
