# SPDX-License-Identifier: Apache-2.0
"""Neural Orchestra: every way of training one model on many machines, one argument apart."""

from orchestra.budget import Budget, Epochs, Samples, Seconds, Steps, Target
from orchestra.cluster import Local
from orchestra.data.partitions import IID, Dirichlet, LabelSorted
from orchestra.errors import ConfigError, OrchestraError
from orchestra.node import Node
from orchestra.recipe import Recipe
from orchestra.strategies import ASP, BSP, AllReduce, LocalSGD, ParameterServer, SlowMo, Solo
from orchestra.strategy import Strategy, knob
from orchestra.train import Result, train

__version__ = "0.1.0"

__all__ = [
    "ASP",
    "BSP",
    "IID",
    "AllReduce",
    "Budget",
    "ConfigError",
    "Dirichlet",
    "Epochs",
    "LabelSorted",
    "Local",
    "LocalSGD",
    "Node",
    "OrchestraError",
    "ParameterServer",
    "Recipe",
    "Result",
    "Samples",
    "Seconds",
    "SlowMo",
    "Solo",
    "Steps",
    "Strategy",
    "Target",
    "knob",
    "train",
]
