# SPDX-License-Identifier: Apache-2.0
"""The catalogue. The command line, the table in the README and the tests of the laws find strategies here."""

from typing import Any, NamedTuple

from orchestra.strategies.all_reduce import AllReduce
from orchestra.strategies.downpour import Downpour
from orchestra.strategies.easgd import EASGD
from orchestra.strategies.hogwild import Hogwild
from orchestra.strategies.local_sgd import LocalSGD
from orchestra.strategies.parameter_server.consistency import CONSISTENCIES, CORRECTIONS
from orchestra.strategies.parameter_server.filters import FILTERS
from orchestra.strategies.parameter_server.server import ParameterServer
from orchestra.strategies.slowmo import SlowMo
from orchestra.strategies.solo import Solo
from orchestra.strategies.switch.switch import StrategySwitch
from orchestra.strategies.switch.triggers import TRIGGERS
from orchestra.strategies.sync_easgd import SyncEASGD

STRATEGIES = (
    AllReduce,
    Downpour,
    EASGD,
    Hogwild,
    LocalSGD,
    ParameterServer,
    SlowMo,
    Solo,
    StrategySwitch,
    SyncEASGD,
)
PARTS = (*CONSISTENCIES, *CORRECTIONS, *FILTERS, *TRIGGERS)


class Alias(NamedTuple):
    """Another name of a strategy, and how what usually goes by that name differs from it."""

    strategy: type[Any]
    differs: str


ALIASES = {
    "ddp": Alias(
        AllReduce,
        "Like torch's DistributedDataParallel it averages the gradients in every step. Differences: the means are "
        "weighted by samples where batches are of unequal size, and the buffers of BatchNorm are averaged over the "
        "workers when a model is scored or saved, not copied from worker 0 in every step.",
    ),
    "fedavg": Alias(
        LocalSGD,
        "Like FederatedAveraging (McMahan et al. 2017, https://arxiv.org/abs/1602.05629) it averages models, weighted "
        "by samples. Differences: tau counts local steps, not local epochs (E epochs are tau = E * samples of a worker "
        "/ batch), all workers take part in every round instead of a random fraction of them, and the workers take the "
        "mean among themselves, without a server. For clients with different data add --partition dirichlet:0.5.",
    ),
}

ABSENT = {  # names that people look for, and what is nearest here
    "diloco": "DiLoCo is not available; the nearest is slowmo, whose slow step has plain instead of Nesterov momentum: "
    'slowmo(tau=500, alpha=0.7, beta=0.9, buffers="maintain") with the optimizer AdamW',
}

__all__ = [
    "ABSENT",
    "ALIASES",
    "EASGD",
    "PARTS",
    "STRATEGIES",
    "Alias",
    "AllReduce",
    "Downpour",
    "Hogwild",
    "LocalSGD",
    "ParameterServer",
    "SlowMo",
    "Solo",
    "StrategySwitch",
    "SyncEASGD",
]
