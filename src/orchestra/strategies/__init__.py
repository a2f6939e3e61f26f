# SPDX-License-Identifier: Apache-2.0
"""The catalogue. The command line, the table in the README and the tests of the laws find strategies here."""

from orchestra.consistency import CONSISTENCIES, CORRECTIONS
from orchestra.filters import FILTERS
from orchestra.strategies.all_reduce import AllReduce
from orchestra.strategies.downpour import Downpour
from orchestra.strategies.easgd import EASGD
from orchestra.strategies.hogwild import Hogwild
from orchestra.strategies.local_sgd import LocalSGD
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.strategies.slowmo import SlowMo
from orchestra.strategies.solo import Solo
from orchestra.strategies.strategy_switch import StrategySwitch
from orchestra.strategies.sync_easgd import SyncEASGD
from orchestra.triggers import TRIGGERS

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

__all__ = [
    "EASGD",
    "PARTS",
    "STRATEGIES",
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
