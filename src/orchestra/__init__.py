# SPDX-License-Identifier: Apache-2.0
"""Neural Orchestra: every way of training one model on many machines, one argument apart."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestra.attached import Attached
    from orchestra.board import Progress
    from orchestra.budget import Budget, Epochs, Samples, Seconds, Steps, Target
    from orchestra.cluster import Local
    from orchestra.consistency import (
        ASP,
        BSP,
        SSP,
        AsPushed,
        BackupWorkers,
        BoundedDelay,
        DelayCompensated,
        KAsync,
        KBatchAsync,
        KBatchSync,
        KSync,
        SoftSync,
        StalenessAware,
    )
    from orchestra.data.partitions import IID, Dirichlet, LabelSorted
    from orchestra.errors import ConfigError, OrchestraError
    from orchestra.filters import KKT, Everything, RandomSkip, Significant
    from orchestra.loop.preparing import prepare
    from orchestra.loop.ranks import rank, world_size
    from orchestra.networks import Ethernet
    from orchestra.node import Node
    from orchestra.optimizers import LAMB, LARS, ProximalSGD
    from orchestra.recipe import Recipe
    from orchestra.schedules import Polynomial, StepDecay, Warmup
    from orchestra.sim.simulated import Simulated
    from orchestra.strategies import (
        EASGD,
        AllReduce,
        Downpour,
        Hogwild,
        LocalSGD,
        ParameterServer,
        SlowMo,
        Solo,
        StrategySwitch,
        SyncEASGD,
    )
    from orchestra.strategy import Strategy, knob
    from orchestra.training import Result, train
    from orchestra.triggers import AtShare, Plateau

__version__ = "0.1.0"

__all__ = [
    "ASP",
    "BSP",
    "EASGD",
    "IID",
    "KKT",
    "LAMB",
    "LARS",
    "SSP",
    "AllReduce",
    "AsPushed",
    "AtShare",
    "Attached",
    "BackupWorkers",
    "BoundedDelay",
    "Budget",
    "ConfigError",
    "DelayCompensated",
    "Dirichlet",
    "Downpour",
    "Epochs",
    "Ethernet",
    "Everything",
    "Hogwild",
    "KAsync",
    "KBatchAsync",
    "KBatchSync",
    "KSync",
    "LabelSorted",
    "Local",
    "LocalSGD",
    "Node",
    "OrchestraError",
    "ParameterServer",
    "Plateau",
    "Polynomial",
    "Progress",
    "ProximalSGD",
    "RandomSkip",
    "Recipe",
    "Result",
    "Samples",
    "Seconds",
    "Significant",
    "Simulated",
    "SlowMo",
    "SoftSync",
    "Solo",
    "StalenessAware",
    "StepDecay",
    "Steps",
    "Strategy",
    "StrategySwitch",
    "SyncEASGD",
    "Target",
    "Warmup",
    "knob",
    "prepare",
    "rank",
    "train",
    "world_size",
]

# Names are imported when they are first used: `orchestra --help` must not wait for torch.
_HOMES = {
    "attached": ("Attached",),
    "board": ("Progress",),
    "budget": ("Budget", "Epochs", "Samples", "Seconds", "Steps", "Target"),
    "cluster": ("Local",),
    "consistency": (
        "ASP",
        "BSP",
        "SSP",
        "AsPushed",
        "BackupWorkers",
        "BoundedDelay",
        "DelayCompensated",
        "KAsync",
        "KBatchAsync",
        "KBatchSync",
        "KSync",
        "SoftSync",
        "StalenessAware",
    ),
    "data.partitions": ("IID", "Dirichlet", "LabelSorted"),
    "errors": ("ConfigError", "OrchestraError"),
    "filters": ("KKT", "Everything", "RandomSkip", "Significant"),
    "loop.preparing": ("prepare",),
    "loop.ranks": ("rank", "world_size"),
    "networks": ("Ethernet",),
    "node": ("Node",),
    "optimizers": ("LAMB", "LARS", "ProximalSGD"),
    "recipe": ("Recipe",),
    "schedules": ("Polynomial", "StepDecay", "Warmup"),
    "sim.simulated": ("Simulated",),
    "strategies": (
        "EASGD",
        "AllReduce",
        "Downpour",
        "Hogwild",
        "LocalSGD",
        "ParameterServer",
        "SlowMo",
        "Solo",
        "StrategySwitch",
        "SyncEASGD",
    ),
    "strategy": ("Strategy", "knob"),
    "training": ("Result", "train"),
    "triggers": ("AtShare", "Plateau"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'orchestra' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"orchestra.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
