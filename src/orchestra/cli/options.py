# SPDX-License-Identifier: Apache-2.0
"""The options that describe a run, as the command line declares them, and their values."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestra import recipes
from orchestra.cli import train_arguments
from orchestra.engine.overrides import Change
from orchestra.errors import ConfigError, Problem

NETWORK, COMPUTE_TIME = "10gbit,0.1ms", "constant:0.05"  # those of `Simulated`, which would have to wait for torch

_WHAT = (
    f"A recipe ({', '.join(recipes.names())}), or a .py file with a RECIPE in it or that calls orchestra.train or "
    "orchestra.prepare."
)
What = Annotated[str, typer.Argument(metavar="RECIPE|SCRIPT", help=_WHAT, show_default=False)]
Args = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS", help="After --: arguments for the script.", show_default=False)
]


def panel(title: str) -> Callable[..., Any]:
    """Return a function that declares an option in one panel of a command's help."""
    return functools.partial(typer.Option, rich_help_panel=title)


comparison = panel("Comparison")
training = panel("Training")
budget = panel("Budget")
cluster = panel("Cluster")
simulation = panel("Simulation")
machines = panel("Several machines")
output = panel("Output")

# Training.

Strategy = Annotated[
    str | None, training("--strategy", "-s", metavar="EXPR", help='Such as "slowmo(tau=8)". Default: allreduce.')
]
Batch = Annotated[
    int | None,
    training(metavar="B", help="Samples of each worker in a step. Default: the recipe's own. Also --batch-size."),
]
Lr = Annotated[
    float | None, training(metavar="RATE", help="Learning rate of the inner optimizer. Default: the recipe's own.")
]
LrFactor = Annotated[
    float | None,
    training("--lr-factor", metavar="F", help="Factor on the learning rate of every parameter group. Default: 1."),
]
Momentum = Annotated[
    float | None, training(metavar="MU", help="Momentum of the inner optimizer. Default: the recipe's own.")
]
Optimizer = Annotated[
    str | None,
    training(
        metavar="EXPR",
        help='Such as "lars(lr=0.5)" or "adamw(lr=3e-3)". Default: the recipe\'s own. '
        "More: orchestra explain optimizer.",
    ),
]
Schedule = Annotated[
    str | None,
    training(
        metavar="EXPR",
        help='Of the learning rate, such as "warmup(epochs=5, reference=16)". Default: the recipe\'s own. '
        "More: orchestra explain schedule.",
    ),
]
Clip = Annotated[float | None, training(metavar="NORM", help="Largest norm of the gradient. Default: no limit.")]
Precision = Annotated[str | None, training(metavar="TYPE", help="float32 or bf16 (mixed). Default: float32.")]
Spread = Annotated[
    str | None,
    training(
        "--partition",
        metavar="HOW",
        help="How samples are divided among workers: iid, label-sorted, dirichlet:0.5. Default: iid.",
    ),
]
Seed = Annotated[int | None, training(metavar="S", help="Of every random number. Default: 0.")]

# Budget.

Epochs = Annotated[
    float | None, budget(metavar="E", help="Passes over the data, by all workers together. Default: the recipe's own.")
]
Steps = Annotated[int | None, budget(metavar="K", help="Steps of each worker.")]
Seconds = Annotated[float | None, budget(metavar="T", help="Seconds of training, without the set-up.")]
Goal = Annotated[
    str | None, budget(metavar="SCORE=VALUE", help="Stop once a test score is reached, e.g. accuracy=0.95.")
]

# Cluster.

Workers = Annotated[
    int | None,
    cluster(
        "--workers",
        "-n",
        metavar="N",
        help="Default: 2; 8 in sim, 4 in recommend. Also --nproc-per-node, --num-processes.",
    ),
]
Servers = Annotated[
    int | None, cluster(metavar="M", help="Server processes, for strategies that have them. Default: 1.")
]
Device = Annotated[str | None, cluster(metavar="DEVICE", help="cpu, cuda or auto. Default: cpu.")]
ComputeTime = Annotated[
    str | None,
    cluster(
        "--compute-time",
        metavar="KIND:NUMBERS",
        help="Seconds that a worker takes for a mini-batch: constant:0.05, exponential:0.05,0.02, lognormal:0.05,0.3, "
        "pareto:0.05,2, markov:0.05,5,0.02,0.2, or a probe's file. Real processes sleep to take as long. "
        f"Default: {COMPUTE_TIME} in simulations and with --straggler. More: orchestra explain compute-time.",
    ),
]
Straggler = Annotated[
    str | None,
    cluster(metavar="NxF", help="N of the workers are F times slower than the others. 1x5: worker 0, five times."),
]

# Simulation.

Sim = Annotated[bool, simulation("--sim", help="Simulate the runs, in virtual time.")]
Network = Annotated[
    str | None,
    simulation(
        metavar="RATE,LATENCY",
        help="Such as 100mbit,1ms, and racks:4x8 after it for racks; a YAML file of hosts; or a probe's file. "
        f"Default: {NETWORK}. More: orchestra explain network.",
    ),
]
Numerics = Annotated[
    str | None,
    simulation(
        metavar="HOW",
        help="real: one gradient at a time; batched: many in one call; off: timing only. Default: the faster of the "
        "first two.",
    ),
]

# Several machines.

TokenFile = Annotated[
    Path | None,
    machines(
        metavar="FILE",
        help="Under torchrun: the run's token, which proves that a process belongs to it; a file that only you can "
        "read. Default: ORCHESTRA_TOKEN_FILE, or ORCHESTRA_TOKEN itself.",
    ),
]
Trusted = Annotated[
    bool,
    machines(
        "--trusted-network",
        help="Under torchrun: encrypt nothing. Anyone on the network can then read and change what is sent.",
    ),
]
Order = Annotated[
    str | None,
    machines(
        metavar="HOW",
        help="Under torchrun: which process is which node. measured: by latencies and rates; given; or 0,2,1,3. "
        "Default: measured.",
    ),
]
Grace = Annotated[
    float | None,
    machines(
        metavar="SECONDS",
        help="Under torchrun: how long to reconnect to a machine that is silent before it counts as lost. More on a "
        "network with pauses; 0 ends the run at the first break. Default: 10.",
    ),
]
On = Annotated[str | None, machines("--on", metavar="CLUSTER", help="ray: on a Ray cluster. Default: on this machine.")]
RayAddress = Annotated[
    str,
    machines(metavar="ADDRESS", help="Of the Ray cluster: HOST:6379, auto (the one this machine is in), local."),
]

# Output.

Out = Annotated[Path | None, output(metavar="DIR", help="Folder for the results. Default: a new one under runs/.")]
CheckpointEvery = Annotated[
    int | None,
    output(metavar="K", help="Write a checkpoint every K steps, and at the end. Ctrl-C always writes one."),
]
EvaluateEvery = Annotated[
    float | None, output(metavar="E", help="Epochs between two scores; scoring time is not counted. Default: 1.")
]
ScoreAfterwards = Annotated[
    bool, output("--score-afterwards", help="Score snapshots after training instead of during it.")
]
Trace = Annotated[
    bool, output("--trace", help="Record every op and message, for `orchestra trace` and the report's timeline.")
]
Json = Annotated[bool, output("--json", help="One JSON object as the last line of standard output.")]
Quiet = Annotated[bool, output("--quiet", "-q", help="Nothing but the outcome: no progress, no messages.")]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a run as they were given; None leaves the recipe's or the script's own value."""

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
    compute_time: str | None = None
    straggler: str | None = None
    numerics: str | None = None
    token_file: str | None = None
    trusted: bool | None = None
    order: str | None = None
    grace: float | None = None
    evaluate_every: float | None = None
    score_afterwards: bool | None = None
    trace: bool | None = None

    def given(self) -> dict[str, Any]:
        """Return the options that were given, as JSON values."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def changes(self, *, of_script: bool = False) -> dict[str, Change]:
        """Return what the options change in a call of `train`; raise a `ConfigError` with all that is wrong."""
        found, problems = self.read(of_script=of_script)
        if problems:
            raise ConfigError(problems)
        return found

    def read(self, *, of_script: bool = False) -> tuple[dict[str, Change], list[Problem]]:
        """Return what the options change in a call of `train`, and what is wrong with them.

        A script may define a strategy of its own: then the name is looked up when the script calls `train`.
        """
        return train_arguments.read(self, of_script=of_script)


def split_strategies(text: str) -> list[str]:
    """Split a list of strategies at commas outside parentheses.

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
