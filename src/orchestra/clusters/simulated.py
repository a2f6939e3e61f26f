# SPDX-License-Identifier: Apache-2.0
"""`Simulated`: a run on virtual machines, in virtual time, with the strategies unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import nn
from torch.utils.data import IterableDataset

from orchestra.core.fibers import Kind
from orchestra.data.feed import SampleStore
from orchestra.engine import compute_times
from orchestra.engine.cluster import Abilities, Cluster, Device, Resources, resolve_device, share_of_cores
from orchestra.engine.compute_times import ComputeTime, RecordedTimes
from orchestra.errors import ConfigError, Problem
from orchestra.runs.budget import Target, parts
from orchestra.runs.events import Sampled, Stepped, read
from orchestra.worlds.simulated import networks, numerics
from orchestra.worlds.simulated.networks import Ethernet, Network

if TYPE_CHECKING:
    from orchestra.core.strategy import Strategy
    from orchestra.engine.spec import TrainArguments

Numerics = Literal["auto", "real", "batched", "off"]


@dataclass(frozen=True, kw_only=True)
class Simulated(Cluster):
    """N virtual machines in one process: real gradients, virtual seconds.

    Same inputs, same events: a simulation can be repeated to the last digit, so it is never resumed.

    `numerics` is how gradients are computed. "real": one at a time, equal to a real worker's bit for bit. "batched":
    the current ones of all workers in one call, equal but for rounding. "off": not at all, only time passes. "auto" is
    batched where that is faster and where no result could be compared bit for bit: on a GPU, and for asynchronous
    strategies with many workers on small models of dense layers; else real.
    """

    workers: int = 8
    network: Network | str = field(default_factory=lambda: Ethernet(gbit=10))
    compute_time: ComputeTime | str = "constant:0.05"  # how long a worker computes on a mini-batch
    device: Device = "cpu"
    numerics: Numerics = "auto"
    fidelity: Literal["auto", "flows"] = "auto"  # flows: the time of collectives is never computed by a formula
    ties: int | None = None  # order of events at equal times: None for that in which they arose, else a seed
    fibers: Kind = "auto"

    @classmethod
    def like(cls, run: str | Path, **more: Any) -> Simulated:
        """Return a cluster with the computing times of a real run, step by step, and by default its workers."""
        times = recorded(Path(run))
        return cls(**{"workers": len(times.times), "compute_time": times, **more})

    def problems(self) -> Iterator[Problem]:
        """Yield what is wrong with this description."""
        yield from super().problems()
        try:
            network = self.get_network()
        except ValueError as error:
            yield Problem("cluster.network", self.network, str(error))
        else:
            if isinstance(network, Network):
                yield from network.problems()
            else:
                kind = 'must be a network such as Ethernet(gbit=10), or text such as "100mbit,1ms"'
                yield Problem("cluster.network", network, kind)
        if self.ties is not None and not isinstance(self.ties, int):
            yield Problem(
                "cluster.ties", self.ties, "must be a whole number, or None for the order in which they arose"
            )
        yield from compute_times.problems_of(self.compute_time)
        choices = {
            "numerics": get_args(Numerics),
            "fidelity": ("auto", "flows"),
            "fibers": ("auto", "greenlet", "thread"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                yield Problem(f"cluster.{name}", getattr(self, name), f"must be one of {', '.join(known)}")

    @property
    def abilities(self) -> Abilities:
        """What runs can do there: they are repeated, not resumed; without numerics they train nothing."""
        return Abilities(checkpoints=False, trains=self.numerics != "off")

    def check_model(self, given: TrainArguments, module: nn.Module, data: Any) -> Iterator[Problem]:
        """Yield why gradients cannot be batched, if they should be, and what needs gradients if there are none."""
        if not self.abilities.trains and any(isinstance(part, Target) for part in parts(given.budget)):
            yield Problem("cluster.numerics", "off", "a target is never reached where nothing is trained")
        if self.numerics == "batched" and (reason := self._why_not(given, module, data)) is not None:
            yield Problem("cluster.numerics", "batched", f'{reason}: use "real"')

    def resolved(self, given: TrainArguments, strategy: Strategy[Any], module: nn.Module, data: Any) -> Simulated:
        """Return a copy in which "auto" is replaced by how gradients are computed."""
        if self.numerics != "auto":
            return self
        device = resolve_device(self.device)
        exact = device == "cpu" and strategy.layout.updates.synchronous  # could be compared with a real run bit for bit
        if exact or not numerics.pays(module, device, self.workers) or self._why_not(given, module, data):
            return replace(self, numerics="real")
        return replace(self, numerics="batched")

    def _why_not(self, given: TrainArguments, module: nn.Module, data: Any) -> str | None:
        """Return why gradients cannot be batched; None if they can."""
        if given.accumulate > 1 or given.precision != "float32":
            return "accumulate= and precision= need one gradient at a time"
        if isinstance(data, IterableDataset):
            return "a stream is read one mini-batch at a time"
        return numerics.why_not(module, given.loss, SampleStore(data).take(range(min(4, given.batch))))

    def get_network(self) -> Network:
        """Return the network, parsed if it was given as text."""
        return networks.parse(self.network) if isinstance(self.network, str) else self.network

    def resources(self, nodes: int) -> Resources:
        """Return what each virtual worker has: all run in this process, on the threads that one process would have."""
        return Resources(
            resolve_device(self.device), share_of_cores(nodes), compute_time=compute_times.read(self.compute_time)
        )

    def about(self) -> dict[str, Any]:
        """Return what a run folder records of the cluster."""
        return {
            "kind": "simulated",
            "network": str(self.get_network()),
            "compute_time": str(compute_times.read(self.compute_time)),
            "numerics": self.numerics,
            "fidelity": self.fidelity,
            "ties": self.ties,
        }


def _computed(before: Stepped | None, step: Stepped) -> float:
    """Return the seconds of computing in a step; where steps before it were dropped, their mean."""
    count = step.step - before.step if isinstance(step, Sampled) and before is not None else 1
    return (step.compute - (0.0 if before is None else before.compute)) / max(1, count)


def recorded(folder: Path) -> RecordedTimes:
    """Return how long each worker of a run computed in each of its steps."""
    found = []
    numbered = [p for p in folder.glob("events-*.jsonl") if p.stem.removeprefix("events-").isdigit()]
    for path in sorted(numbered, key=lambda p: int(p.stem.removeprefix("events-"))):
        steps = [None, *(event for event in read(path) if isinstance(event, Stepped))]
        if len(steps) > 1:  # servers take no steps
            found.append(tuple(_computed(before, step) for before, step in pairwise(steps) if step is not None))
    if not found:
        raise ConfigError([Problem("run", str(folder), "holds no events of workers: name the folder of a run")])
    return RecordedTimes(tuple(found))
