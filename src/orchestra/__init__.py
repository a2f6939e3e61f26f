# SPDX-License-Identifier: Apache-2.0
"""Neural Orchestra: every way of training one model on many machines, one argument apart."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from orchestra._version import __version__ as __version__

if TYPE_CHECKING:
    from orchestra._prepare import prepare
    from orchestra._train import Result, train
    from orchestra.clusters.attached import Attached
    from orchestra.clusters.local import Local
    from orchestra.clusters.simulated import Simulated
    from orchestra.core.node import Node
    from orchestra.core.strategy import Strategy, knob
    from orchestra.data.partitions import IID, Dirichlet, LabelSorted
    from orchestra.errors import ConfigError, OrchestraError
    from orchestra.model.optimizers import LAMB, LARS, ProximalSGD
    from orchestra.model.schedules import Polynomial, StepDecay, Warmup
    from orchestra.recipes.recipe import Recipe
    from orchestra.runs.budget import Budget, Epochs, Samples, Seconds, Steps, Target
    from orchestra.runs.status import RunStatus
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
    from orchestra.strategies.parameter_server.consistency import (
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
    from orchestra.strategies.parameter_server.filters import KKT, Everything, RandomSkip, Significant
    from orchestra.strategies.switch.triggers import AtShare, Plateau
    from orchestra.user_loop.ranks import rank, world_size
    from orchestra.worlds.simulated.networks import Ethernet

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
    "ProximalSGD",
    "RandomSkip",
    "Recipe",
    "Result",
    "RunStatus",
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
    "clusters.attached": ("Attached",),
    "runs.status": ("RunStatus",),
    "runs.budget": ("Budget", "Epochs", "Samples", "Seconds", "Steps", "Target"),
    "clusters.local": ("Local",),
    "strategies.parameter_server.consistency": (
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
    "strategies.parameter_server.filters": ("KKT", "Everything", "RandomSkip", "Significant"),
    "_prepare": ("prepare",),
    "user_loop.ranks": ("rank", "world_size"),
    "worlds.simulated.networks": ("Ethernet",),
    "core.node": ("Node",),
    "model.optimizers": ("LAMB", "LARS", "ProximalSGD"),
    "recipes.recipe": ("Recipe",),
    "model.schedules": ("Polynomial", "StepDecay", "Warmup"),
    "clusters.simulated": ("Simulated",),
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
    "core.strategy": ("Strategy", "knob"),
    "_train": ("Result", "train"),
    "strategies.switch.triggers": ("AtShare", "Plateau"),
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
