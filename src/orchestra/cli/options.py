# SPDX-License-Identifier: Apache-2.0
"""What may be said about a run on the command line, and what it changes in a call of `train`."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestra import recipes
from orchestra.cli.cluster_options import read_cluster
from orchestra.engine.overrides import Change
from orchestra.errors import ConfigError, Problem, nearest

if TYPE_CHECKING:
    from orchestra.data.partitions import Partition
    from orchestra.runs.budget import Target

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
        problems: list[Problem] = []
        found: dict[str, Change] = {}
        for read in (_plain, _strategy, read_cluster, _budget, _optimizer, _schedule, _partition):
            try:
                found |= _later(self) if of_script and read is _strategy else read(self)
            except ConfigError as error:
                problems.extend(error.problems)
        return found, problems


def read_target(text: str) -> Target:
    """`accuracy=0.95` as a `Target`."""
    from orchestra.runs.budget import Target

    name, equals, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not name.strip() or not equals or not math.isfinite(number):
        raise ConfigError([Problem("target", text, "must be a score and a number, e.g. accuracy=0.95")])
    return Target(name.strip(), number)


def read_partition(text: str) -> Partition:
    """`iid`, `label-sorted` or `dirichlet:ALPHA` as a partition."""
    from orchestra.data.partitions import IID, Dirichlet, LabelSorted

    name, colon, value = text.partition(":")
    match name:
        case "iid" if not colon:
            return IID()
        case "label-sorted" if not colon:
            return LabelSorted()
        case "dirichlet":
            try:
                return Dirichlet(alpha=float(value)) if colon else Dirichlet()
            except ValueError:
                raise ConfigError([Problem("partition", text, "needs a number, e.g. dirichlet:0.5")]) from None
    known = ("iid", "label-sorted", "dirichlet")
    message = f"takes no number: {name}" if name in known else f"is no way to divide samples; {nearest(name, known)}"
    raise ConfigError([Problem("partition", text, message)])


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


# One function for each argument of `train`.


def _set(value: Any) -> Change:
    return lambda old: value


def _plain(o: Options) -> dict[str, Change]:
    """Arguments that take the option's value as it is."""
    from orchestra.runs.budget import Epochs, Steps

    every = None if o.checkpoint_every is None else Steps(o.checkpoint_every)
    scored = None if o.evaluate_every is None else Epochs(o.evaluate_every)
    if o.checkpoint_every is not None and o.checkpoint_every < 1:
        raise ConfigError([Problem("checkpoint-every", o.checkpoint_every, "must be at least 1 step")])
    values = {
        "seed": o.seed, "batch": o.batch, "clip": o.clip, "precision": o.precision, "out": o.out,
        "checkpoint_every": every, "evaluate_every": scored, "trace": o.trace,
        "score_afterwards": o.score_afterwards,
    }  # fmt: skip
    return {name: _set(value) for name, value in values.items() if value is not None}


def _strategy(o: Options) -> dict[str, Change]:
    from orchestra.engine import expression

    if o.strategy is None and o.servers is None:
        return {}
    chosen = None if o.strategy is None else expression.parse(o.strategy)

    def change(old: Any) -> Any:
        strategy = chosen or (expression.parse(old) if isinstance(old, str) else old)
        return strategy if o.servers is None else _with_servers(strategy, o.servers)

    if chosen is not None:
        change(None)  # whether it has servers shows now, beside the other problems
    return {"strategy": change}


def _later(o: Options) -> dict[str, Change]:
    """The strategy, read when it is needed."""
    if o.strategy is None and o.servers is None:
        return {}
    return {"strategy": lambda old: _strategy(o)["strategy"](old)}


def _with_servers(strategy: Any, servers: int) -> Any:
    from orchestra.engine import expression

    if "servers" not in {field.name for field in dataclasses.fields(strategy)}:
        name = expression.show(strategy)
        raise ConfigError([Problem("servers", servers, f"{name} has no servers: leave it out, or use ps")])
    return dataclasses.replace(strategy, servers=servers)


def _budget(o: Options) -> dict[str, Change]:
    """Ends given replace the ends there were, a target given replaces the target there was."""
    from orchestra.runs import budget as budgets

    kinds: tuple[tuple[Any, Any], ...] = (
        (budgets.Epochs, o.epochs),
        (budgets.Steps, o.steps),
        (budgets.Seconds, o.seconds),
    )
    ends: list[Any] = [kind(count) for kind, count in kinds if count is not None]
    targets: list[Any] = [] if o.target is None else [read_target(o.target)]
    if not ends and not targets:
        return {}

    def change(old: Any) -> Any:
        before = budgets.parts(old)
        old_targets = [part for part in before if isinstance(part, budgets.Target)]
        old_ends = [part for part in before if not isinstance(part, budgets.Target)]
        return functools.reduce(lambda a, b: a | b, [*(ends or old_ends), *(targets or old_targets)])

    return {"budget": change}


def _optimizer(o: Options) -> dict[str, Change]:
    if o.optimizer is None and o.lr is None and o.lr_factor is None and o.momentum is None:
        return {}
    from orchestra.engine import expression
    from orchestra.model.adjusted_optimizer import Adjusted, at_rate

    if o.lr is not None and not 0 <= o.lr < math.inf:
        raise ConfigError([Problem("lr", o.lr, "must be a finite number of at least 0")])
    if o.lr_factor is not None and not 0 < o.lr_factor < math.inf:
        raise ConfigError([Problem("lr-factor", o.lr_factor, "must be a finite number above 0")])
    if o.momentum is not None and not 0 <= o.momentum < 1:
        raise ConfigError([Problem("momentum", o.momentum, "must be at least 0 and below 1")])
    chosen = None if o.optimizer is None else expression.parse_optimizer(o.optimizer)

    def change(old: Any) -> Any:
        made = chosen or old
        made = made if o.lr is None else at_rate(made, o.lr)
        return made if o.lr_factor is None and o.momentum is None else Adjusted(made, o.lr_factor or 1.0, o.momentum)

    return {"optimizer": change}


def _schedule(o: Options) -> dict[str, Change]:
    if o.schedule is None:
        return {}
    from orchestra.engine import expression

    return {"schedule": _set(expression.parse_schedule(o.schedule))}


def _partition(o: Options) -> dict[str, Change]:
    return {} if o.partition is None else {"partition": _set(read_partition(o.partition))}
