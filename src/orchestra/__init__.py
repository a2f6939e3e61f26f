# SPDX-License-Identifier: Apache-2.0
"""Neural Orchestra: every way of training one model on many machines, one argument apart."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from orchestra._version import __version__ as __version__

if TYPE_CHECKING:
    from orchestra._prepare import prepare as prepare
    from orchestra._train import train as train
    from orchestra.clusters.attached import Attached as Attached
    from orchestra.clusters.local import Local as Local
    from orchestra.clusters.simulated import Simulated as Simulated
    from orchestra.core.node import Node as Node
    from orchestra.core.strategy import Layout as Layout
    from orchestra.core.strategy import Needs as Needs
    from orchestra.core.strategy import Strategy as Strategy
    from orchestra.core.strategy import Updates as Updates
    from orchestra.core.strategy import option as option
    from orchestra.data.partitions import IID as IID
    from orchestra.data.partitions import Dirichlet as Dirichlet
    from orchestra.data.partitions import LabelSorted as LabelSorted
    from orchestra.engine.training import Result as Result
    from orchestra.errors import ConfigError as ConfigError
    from orchestra.errors import OrchestraError as OrchestraError
    from orchestra.model.optimizers import LAMB as LAMB
    from orchestra.model.optimizers import LARS as LARS
    from orchestra.model.optimizers import ProximalSGD as ProximalSGD
    from orchestra.model.schedules import Polynomial as Polynomial
    from orchestra.model.schedules import StepDecay as StepDecay
    from orchestra.model.schedules import Warmup as Warmup
    from orchestra.recipes.recipe import Recipe as Recipe
    from orchestra.runs.budget import Budget as Budget
    from orchestra.runs.budget import Epochs as Epochs
    from orchestra.runs.budget import Samples as Samples
    from orchestra.runs.budget import Seconds as Seconds
    from orchestra.runs.budget import Steps as Steps
    from orchestra.runs.budget import Target as Target
    from orchestra.runs.status import RunStatus as RunStatus
    from orchestra.strategies.catalogue import *
    from orchestra.strategies.parameter_server.consistency import *
    from orchestra.strategies.parameter_server.filters import *
    from orchestra.strategies.switch.triggers import AtShare as AtShare
    from orchestra.strategies.switch.triggers import Plateau as Plateau
    from orchestra.user_loop.ranks import rank as rank
    from orchestra.user_loop.ranks import world_size as world_size
    from orchestra.worlds.simulated.networks import Ethernet as Ethernet

__all__: list[str]  # made when asked for: see `__getattr__`

# Names are imported when they are first used: `orchestra --help` must not wait for torch. Strategies, and what they are
# made from, come from the catalogue.
_HOMES = {
    "_prepare": ("prepare",),
    "_train": ("train",),
    "clusters.attached": ("Attached",),
    "clusters.local": ("Local",),
    "clusters.simulated": ("Simulated",),
    "core.node": ("Node",),
    "core.strategy": ("Layout", "Needs", "Strategy", "Updates", "option"),
    "data.partitions": ("IID", "Dirichlet", "LabelSorted"),
    "engine.training": ("Result",),
    "errors": ("ConfigError", "OrchestraError"),
    "model.optimizers": ("LAMB", "LARS", "ProximalSGD"),
    "model.schedules": ("Polynomial", "StepDecay", "Warmup"),
    "recipes.recipe": ("Recipe",),
    "runs.budget": ("Budget", "Epochs", "Samples", "Seconds", "Steps", "Target"),
    "runs.status": ("RunStatus",),
    "user_loop.ranks": ("rank", "world_size"),
    "worlds.simulated.networks": ("Ethernet",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    value: object
    if name == "__all__":
        value = sorted([*_HOME_OF, *_catalogue()], key=lambda n: (not n.isupper(), not n[0].isupper(), n))
    elif name in _HOME_OF:
        value = getattr(importlib.import_module(f"orchestra.{_HOME_OF[name]}"), name)
    elif name[0].isupper() and name in (known := _catalogue()):
        value = known[name]
    else:
        raise AttributeError(f"module 'orchestra' has no attribute {name!r}")
    globals()[name] = value
    return value


def _catalogue() -> dict[str, type[object]]:
    """Import the strategies and the parts they consist of, by name."""
    from orchestra.strategies.catalogue import PARTS, STRATEGIES

    return {cls.__name__: cls for cls in (*STRATEGIES, *PARTS)}


def __dir__() -> list[str]:
    names: list[str] = importlib.import_module("orchestra").__all__
    return names
