# SPDX-License-Identifier: Apache-2.0
"""Filters: which entries of a vector are sent to a server, and back. One file for each rule.

Li, Andersen, Park, Smola, et al. "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014, §3.6.
https://www.usenix.org/conference/osdi14/technical-sessions/presentation/li_mu

    Everything      no filter                                           S
    Significant     entries that changed by more than a threshold       pushes and answers
    RandomSkip      entries drawn at random                             pushes
    KKT             entries that an l1 penalty does not hold at zero    pushes

Bytes of a filtered vector of S bytes of which k entries pass: 16 + min(S, k values and k keys of 4 bytes), and with
`cache_keys=True` only 16 + k values while the keys are those of the message before (`sparse.py`). Where vectors have no
numbers (`numerics="off"`) everything passes.

A parameter of which no entry passes counts as one without a gradient in that push: neither momentum nor weight decay
is applied to it.
"""

from orchestra.strategies.parameter_server.filters.base import Everything, Filter
from orchestra.strategies.parameter_server.filters.kkt import KKT
from orchestra.strategies.parameter_server.filters.random_skip import RandomSkip
from orchestra.strategies.parameter_server.filters.significant import Significant

FILTERS = (Everything, Significant, RandomSkip, KKT)

__all__ = ["FILTERS", "KKT", "Everything", "Filter", "RandomSkip", "Significant"]
