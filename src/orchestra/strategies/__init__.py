# SPDX-License-Identifier: Apache-2.0
"""The catalogue. The command line, the table in the README and the tests of the laws find strategies here."""

from orchestra.consistency import CONSISTENCIES, CORRECTIONS
from orchestra.filters import FILTERS
from orchestra.strategies.all_reduce import AllReduce
from orchestra.strategies.local_sgd import LocalSGD
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.strategies.slowmo import SlowMo
from orchestra.strategies.solo import Solo

STRATEGIES = (AllReduce, LocalSGD, ParameterServer, SlowMo, Solo)
PARTS = (*CONSISTENCIES, *CORRECTIONS, *FILTERS)

__all__ = ["PARTS", "STRATEGIES", "AllReduce", "LocalSGD", "ParameterServer", "SlowMo", "Solo"]
