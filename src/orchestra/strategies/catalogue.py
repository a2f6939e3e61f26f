# SPDX-License-Identifier: Apache-2.0
"""The catalogue: one row for each strategy.

A row holds all that the rest of the system knows of a strategy besides its class: its other names, the bytes that it
must send, the variants that `orchestra recommend` tries, the option to tune, and more examples for the tests of the
laws. Exports, command line, documentation and tests are made from the rows.

Another package adds its strategies by entry points of the group `orchestra.strategies`, each a `Row`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from orchestra.core.strategy import Strategy
from orchestra.core.traffic import ExpectedTraffic, RunSize, TrafficOf
from orchestra.strategies import all_reduce, downpour, easgd, hogwild, local_sgd, slowmo, solo, sync_easgd
from orchestra.strategies.all_reduce import AllReduce as AllReduce
from orchestra.strategies.downpour import Downpour as Downpour
from orchestra.strategies.easgd import EASGD as EASGD
from orchestra.strategies.hogwild import Hogwild as Hogwild
from orchestra.strategies.local_sgd import LocalSGD as LocalSGD
from orchestra.strategies.parameter_server import server
from orchestra.strategies.parameter_server.consistency import CONSISTENCIES, CORRECTIONS
from orchestra.strategies.parameter_server.filters import FILTERS
from orchestra.strategies.parameter_server.server import ParameterServer as ParameterServer
from orchestra.strategies.slowmo import SlowMo as SlowMo
from orchestra.strategies.solo import Solo as Solo
from orchestra.strategies.switch import transfer
from orchestra.strategies.switch.switch import StrategySwitch as StrategySwitch
from orchestra.strategies.switch.triggers import TRIGGERS
from orchestra.strategies.sync_easgd import SyncEASGD as SyncEASGD

GROUP = "orchestra.strategies"  # of entry points


@dataclass(frozen=True, kw_only=True)
class Row:
    """All that the rest of the system knows of a strategy besides its class."""

    strategy: type[Strategy[Any]]
    traffic: TrafficOf = lambda strategy, run: None  # the bytes that a run must send; None: not known beforehand
    formula: str | None = None  # of the bytes that a worker sends; S: bytes of the model, N: number of workers
    short: str | None = None  # a second, shorter name
    other_names: Mapping[str, str] = field(
        default_factory=dict
    )  # names from elsewhere: how what they mean there differs
    search_space: tuple[str, ...] = ()  # variants that orchestra recommend compares
    tuned_option: tuple[str, tuple[Any, ...]] | None = None  # the main option, and values to try, the usual one first
    must_log: str | None = None  # a run that never logs this figure never used the strategy's feature
    examples: tuple[str, ...] = ()  # more instances for the tests of the laws, besides one for each value of an option
    alone: Mapping[str, Any] = field(default_factory=dict)  # options with which one worker is plain training

    @property
    def name(self) -> str:
        """The long name on the command line."""
        return self.strategy.__name__.lower()

    @property
    def names(self) -> tuple[str, ...]:
        """All names."""
        return (self.name, *([self.short] if self.short else ()), *self.other_names)


_AVERAGE = "2 (N−1)/N · S"

ROWS = (
    Row(
        strategy=AllReduce,
        traffic=all_reduce.traffic,
        formula=f"{_AVERAGE} a step",
        other_names={
            "ddp": "Like torch's DistributedDataParallel it averages the gradients in every step. Differences: the "
            "means are weighted by samples where batches are of unequal size, and the buffers of BatchNorm are "
            "averaged over the workers when a model is scored or saved, not copied from worker 0 in every step."
        },
        search_space=("allreduce",),
        examples=("allreduce(algorithm='hierarchical', group=2)",),
    ),
    Row(
        strategy=Downpour,
        traffic=downpour.traffic,
        formula="S every n_push steps",
        search_space=("downpour",),
        examples=("downpour(n_push=3, n_fetch=2)", "downpour(n_push=2, n_fetch=4, servers=2)"),
        alone={"n_push": 1, "n_fetch": 1},
    ),
    Row(
        strategy=EASGD,
        traffic=easgd.traffic,
        formula="S every τ steps, once more at the end",
        search_space=("easgd",),
        tuned_option=("tau", (10, 40)),
        alone={"tau": 1000, "alpha": 1.0},  # the centre moves only at the end, all the way to the worker
    ),
    Row(strategy=Hogwild, traffic=hogwild.traffic, formula="0"),
    Row(
        strategy=LocalSGD,
        traffic=local_sgd.traffic,
        formula=f"{_AVERAGE} every τ steps",
        other_names={
            "fedavg": "Like FederatedAveraging (McMahan et al. 2017, https://arxiv.org/abs/1602.05629) it averages "
            "models, weighted by samples. Differences: tau counts local steps, not local epochs (E epochs are tau = "
            "E * samples of a worker / batch), all workers take part in every round instead of a random fraction of "
            "them, and the workers average by an all-reduce, without a server. For clients with different data add "
            "--partition dirichlet:0.5."
        },
        search_space=("localsgd(tau=4)", "localsgd(tau=16)", "localsgd(tau=64)"),
        tuned_option=("tau", (16, 4, 64)),
    ),
    Row(
        strategy=ParameterServer,
        traffic=server.traffic,
        formula="S a step",
        short="ps",
        search_space=(
            "ps", "ps(servers=4)", "ps(consistency=backupworkers(b=1))", "ps(consistency=ssp(staleness=3))",
            "ps(consistency=asp)", "ps(consistency=asp, servers=4)",
        ),
        examples=(
            "ps(servers=3)",
            "ps(servers=3, placement='layers')",
            "ps(servers=3, colocated=True)",
            "ps(consistency=asp, servers=4, colocated=True)",
            "ps(consistency=asp, servers=2)",
            "ps(consistency=ssp(staleness=0), servers=2)",
            "ps(consistency=backupworkers(b=1), pieces=2)",
            "ps(consistency=ksync(k=2))",
            "ps(consistency=ksync(k=3))",
            "ps(consistency=kasync(k=2), pieces=3)",
            "ps(filter=significant(threshold=0.01), cache_keys=True)",
            "ps(consistency=asp, correction=delaycompensated(lam=2.0, adaptive=True))",
        ),
    ),
    Row(
        strategy=SlowMo,
        traffic=slowmo.traffic,
        formula=f"{_AVERAGE} every τ steps, and what the base sends",
        search_space=("slowmo(tau=4)", "slowmo(tau=16)", "slowmo(tau=64)"),
        tuned_option=("tau", (16, 4, 64)),
        examples=("slowmo(tau=2, base=allreduce)", "slowmo(tau=4, base=localsgd(tau=2))"),
        alone={"alpha": 1.0, "beta": 0.0, "buffers": "maintain"},
    ),
    Row(strategy=Solo, traffic=solo.traffic, formula="0", search_space=("solo",)),
    Row(
        strategy=StrategySwitch,
        traffic=transfer.traffic,
        short="switch",
        search_space=("switch(when=atshare(share=0.25))",),
        must_log="switched",
        examples=(
            "switch(when=atshare(share=0.5), then=ps(servers=2))",
            "switch(when=atshare(share=0.4), then=ps(consistency=asp, servers=2))",
            "switch(when=atshare(share=0.4), first=ps, then=localsgd(tau=2))",
            "switch(when=atshare(share=0.4), then=ps, promote=True)",
            "switch(when=atshare(share=0.4), then=ps(consistency=asp, servers=2), promote=True)",
            "switch(when=atshare(share=0.4), first=ps(consistency=asp), then=allreduce)",
            "switch(when=atshare(share=0.4), first=localsgd(tau=2), then=allreduce(algorithm='ring'))",
        ),
        alone={"promote": False},
    ),
    Row(
        strategy=SyncEASGD,
        traffic=sync_easgd.traffic,
        formula=f"{_AVERAGE} every τ steps, once more at the end",
        search_space=("synceasgd",),
        tuned_option=("tau", (10, 4, 40)),
        examples=("synceasgd(tau=1, alpha=0.4)",),
        alone={"alpha": 0.0, "beta": 1.0},
    ),
)  # fmt: skip

STRATEGIES: tuple[type[Strategy[Any]], ...] = tuple(row.strategy for row in ROWS)
PARTS: tuple[type[Any], ...] = (*CONSISTENCIES, *CORRECTIONS, *FILTERS, *TRIGGERS)

ABSENT = {  # strategies that are not available, and the nearest ones
    "diloco": "DiLoCo is not available; the nearest is slowmo, whose slow step has plain instead of Nesterov momentum: "
    'slowmo(tau=500, alpha=0.7, beta=0.9, buffers="maintain") with the optimizer AdamW',
}


def rows() -> tuple[Row, ...]:
    """Return the rows of this package and of other installed packages."""
    return (*ROWS, *_installed())


@cache
def _installed() -> tuple[Row, ...]:
    """Import the rows that other packages declare; warn about and skip unusable ones."""
    found: list[Row] = []
    for entry in entry_points(group=GROUP):
        try:
            row = entry.load()
            if not isinstance(row, Row):
                raise TypeError(f"must be a Row of orchestra.strategies.catalogue, not a {type(row).__name__}")
            if taken := {*row.names} & {name for other in (*ROWS, *found) for name in other.names}:
                raise ValueError(f"the name {', '.join(sorted(taken))} is taken by another strategy")
            found.append(row)
        except Exception as error:  # an error in another package must not stop runs that do not use it
            print(f"warning: strategy {entry.value} is left out: {type(error).__name__}: {error}", file=sys.stderr)
    return tuple(found)


def row_of(strategy: Strategy[Any] | type[Strategy[Any]]) -> Row:
    """Return the row of a strategy, or a row of defaults if it is in no catalogue, as when defined in a script."""
    cls = strategy if isinstance(strategy, type) else type(strategy)
    return _by_class().get(cls) or Row(strategy=cls)


@cache
def _by_class() -> dict[type[Strategy[Any]], Row]:
    return {row.strategy: row for row in rows()}


def expected_traffic(strategy: Strategy[Any], run: RunSize) -> ExpectedTraffic | None:
    """Return the bytes that a run of this size must send, or None if they cannot be known beforehand."""
    return row_of(strategy).traffic(strategy, replace(run, of=expected_traffic))
