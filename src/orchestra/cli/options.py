# SPDX-License-Identifier: Apache-2.0
"""The options that describe a run, as the command line declares them, and their values."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestra import recipes
from orchestra.cli import train_arguments
from orchestra.engine.overrides import Change
from orchestra.errors import ConfigError, Problem

_WHAT = (
    f"A recipe ({', '.join(recipes.names())}), or a .py file with a RECIPE in it or that calls orchestra.train or "
    "orchestra.prepare."
)

NETWORK, DELAY = "10gbit,0.1ms", "constant:0.05"  # those of `Simulated`, which would have to wait for torch

What = Annotated[str, typer.Argument(metavar="RECIPE|SCRIPT", help=_WHAT, show_default=False)]
Args = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS", help="After --: arguments for the script.", show_default=False)
]
Strategy = Annotated[
    str | None, typer.Option("--strategy", "-s", metavar="EXPR", help='Such as "slowmo(tau=8)". Default: allreduce.')
]
Servers = Annotated[
    int | None, typer.Option(metavar="M", help="Server processes, for strategies that have them. Default: 1.")
]
Seed = Annotated[int | None, typer.Option(metavar="S", help="Of everything random. Default: 0.")]
Goal = Annotated[
    str | None, typer.Option(metavar="SCORE=VALUE", help="Stop once a test score is reached, e.g. accuracy=0.95.")
]
Out = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder for the results. Default: a new one under runs/.")
]
Workers = Annotated[
    int | None,
    typer.Option("--workers", "-n", help="Workers. Default: 2; of orchestra sim 8.", metavar="N"),
]
Epochs = Annotated[
    float | None,
    typer.Option(help="Passes over the data, by all workers together. Default: the recipe's own.", metavar="E"),
]
Seconds = Annotated[float | None, typer.Option(help="Seconds of training, set-up not counted.", metavar="T")]
Steps = Annotated[int | None, typer.Option(help="Steps of each worker.", metavar="K")]
Batch = Annotated[
    int | None, typer.Option(help="Samples of each worker and step. Default: the recipe's own.", metavar="B")
]
Lr = Annotated[
    float | None, typer.Option(help="Learning rate of the inner optimizer. Default: the recipe's own.", metavar="RATE")
]
LrFactor = Annotated[
    float | None,
    typer.Option("--lr-factor", help="Learning rate times this, in every parameter group. Default: 1.", metavar="F"),
]
Momentum = Annotated[
    float | None, typer.Option(help="Momentum of the inner optimizer. Default: the recipe's own.", metavar="MU")
]
Optimizer = Annotated[
    str | None,
    typer.Option(
        metavar="EXPR",
        help='Such as "lars(lr=0.5)" or "adamw(lr=3e-3)". Default: the recipe\'s own. '
        "More: orchestra explain optimizer.",
    ),
]
Schedule = Annotated[
    str | None,
    typer.Option(
        metavar="EXPR",
        help='Of the learning rate, such as "warmup(epochs=5, reference=16)". Default: the recipe\'s own. '
        "More: orchestra explain schedule.",
    ),
]
Clip = Annotated[float | None, typer.Option(help="Largest norm of the gradient. Default: any.", metavar="NORM")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or auto. Default: cpu.", metavar="DEVICE")]
Precision = Annotated[str | None, typer.Option(help="float32 or bf16 (mixed). Default: float32.", metavar="TYPE")]
Spread = Annotated[
    str | None,
    typer.Option(
        "--partition",
        help="How samples are divided among workers: iid, label-sorted, dirichlet:0.5. Default: iid.",
        metavar="HOW",
    ),
]
CheckpointEvery = Annotated[
    int | None,
    typer.Option(help="Save everything every so many steps, and at the end. Ctrl-C always does.", metavar="K"),
]
EvaluateEvery = Annotated[
    float | None, typer.Option(help="Epochs between two scores, taken off the clock. Default: 1.", metavar="E")
]
ScoreAfterwards = Annotated[
    bool, typer.Option("--score-afterwards", help="Score snapshots after training, not while it goes on.")
]
Network = Annotated[
    str | None,
    typer.Option(
        metavar="RATE,LATENCY",
        help="Such as 100mbit,1ms, with racks:4x8 behind it if you like, a YAML file of hosts, or a probe's file. "
        f"Default: {NETWORK}. More: orchestra explain network.",
    ),
]
Delay = Annotated[
    str | None,
    typer.Option(
        metavar="KIND:NUMBERS",
        help="Seconds a worker takes for a mini-batch: constant:0.05, exponential:0.05,0.02, lognormal:0.05,0.3, "
        "pareto:0.05,2, markov:0.05,5,0.02,0.2, or a probe's file; behind it slow:1x5 or pause:0.01,2 if you like. "
        f"Default in rehearsals: {DELAY}. More: orchestra explain delay.",
    ),
]
Numerics = Annotated[
    str | None,
    typer.Option(
        metavar="HOW",
        help="real: one gradient at a time; batched: many in one call; off: timing only. Default: what pays.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Under torchrun: the run's token, by which its processes know each other; a file that only you can read. "
        "Default: ORCHESTRA_TOKEN_FILE, or ORCHESTRA_TOKEN itself.",
    ),
]
Trusted = Annotated[
    bool,
    typer.Option(
        "--trusted-network",
        help="Under torchrun: encrypt nothing. Whoever is on the network can read along, and change what is sent.",
    ),
]
Order = Annotated[
    str | None,
    typer.Option(
        metavar="HOW",
        help="Under torchrun: which process is which node. measured: by latencies and rates; given; or 0,2,1,3. "
        "Default: measured.",
    ),
]
Grace = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Under torchrun: how long a machine that is silent, or whose connection broke, is sought before it counts "
        "as lost. More on a network with pauses; 0 ends the run at the first break. Default: 10.",
    ),
]
On = Annotated[
    str | None, typer.Option("--on", metavar="CLUSTER", help="ray: on a Ray cluster. Default: on this machine.")
]
RayAddress = Annotated[
    str,
    typer.Option(metavar="ADDRESS", help="Of the Ray cluster: HOST:6379, auto (the one this machine is in), local."),
]
Sim = Annotated[bool, typer.Option("--sim", help="Rehearse in virtual time: see --network and --delay.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Nothing but the outcome: no progress, no messages.")]
Trace = Annotated[
    bool,
    typer.Option("--trace", help="Write down every op and message, for `orchestra trace` and the report's timeline."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object as the last line of standard output.")]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options as they were given; None leaves the recipe's or the script's own value."""

    strategy: str | None = None
    workers: int | None = None
    servers: int | None = None
    epochs: float | None = None
    steps: int | None = None
    seconds: float | None = None
    target: str | None = None
    seed: int | None = None
    batch: int | None = None
    lr: float | None = None
    lr_factor: float | None = None
    momentum: float | None = None
    optimizer: str | None = None
    schedule: str | None = None
    out: str | None = None
    device: str | None = None
    checkpoint_every: int | None = None
    partition: str | None = None
    precision: str | None = None
    clip: float | None = None
    sim: bool | None = None
    network: str | None = None
    delay: str | None = None
    numerics: str | None = None
    token_file: str | None = None
    trusted: bool | None = None
    order: str | None = None
    grace: float | None = None
    evaluate_every: float | None = None
    score_afterwards: bool | None = None
    trace: bool | None = None

    def given(self) -> dict[str, Any]:
        """Those that were given, as JSON takes them."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def changes(self, *, of_script: bool = False) -> dict[str, Change]:
        """What they change in a call of `train`. Raises a `ConfigError` with all that cannot be understood."""
        found, problems = self.read(of_script=of_script)
        if problems:
            raise ConfigError(problems)
        return found

    def read(self, *, of_script: bool = False) -> tuple[dict[str, Change], list[Problem]]:
        """What they change in a call of `train`, as far as they can be understood, and what cannot be.

        A script may define a strategy of its own: then the name is looked up when the script calls `train`.
        """
        return train_arguments.read(self, of_script=of_script)


def split_strategies(text: str) -> list[str]:
    """The strategies in a list, cut at commas outside parentheses.

    >>> split_strategies("ps, slowmo(tau=4, beta=0.5),solo")
    ['ps', 'slowmo(tau=4, beta=0.5)', 'solo']
    """
    depth, pieces = 0, [""]
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return [piece.strip() for piece in pieces if piece.strip()]
