# SPDX-License-Identifier: Apache-2.0
"""The state_dict of an optimizer under a strategy: torch's own form, with the strategy's entries under one key.

If servers step the optimizer, its state is exchanged with them: see `orchestra.user_loop.server_state`. All workers may
load the state that one worker saved: each then continues from that worker's replica.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn, optim

from orchestra.core.strategy import Strategy
from orchestra.engine import checkpoint, expression
from orchestra.errors import CheckpointError
from orchestra.user_loop.handle import LoopHandle
from orchestra.user_loop.server_state import OnWorker, States, StateToLoad, digest
from orchestra.user_loop.step_driver import StepDriver

_OURS = "orchestra"  # in a state_dict


class StateDict:
    """Saves and loads the state of one worker's optimizer."""

    def __init__(self, optimizer: optim.Optimizer, driver: StepDriver, handle: LoopHandle) -> None:
        self._optimizer, self._driver, self._handle = optimizer, driver, handle
        self._servers = OnWorker(driver.runtime, handle.peers)
        driver.before_step = self._servers.settle

    def _resumes_as(self) -> tuple[Strategy[Any], Any]:
        """Return the strategy that can continue from a state saved now, and its state."""
        strategy, state = self._driver.runtime.spec.strategy, self._driver.runtime.state
        switched = strategy.layout.then is not None and strategy.layout_at(state).then is None
        # After a switch with servers only the second strategy can continue: servers of a new run begin with the first.
        return strategy.phase(state) if switched and strategy.layout.servers else (strategy, state)

    @property
    def _on_servers(self) -> bool:
        """Whether servers hold the optimizer's state now."""
        return self._driver.runtime.layout.optimizer_at == "servers"

    def _layers(self) -> list[tuple[int, nn.Parameter]]:
        """Return the parameters of x with their numbers in a state_dict, without those in no group."""
        numbers = {p: number for number, p in enumerate(_members(self._optimizer.param_groups))}
        return [(numbers[p], p) for p in self._driver.replica.parameters if p in numbers]

    def save(self) -> dict[str, Any]:
        """Return all state of this worker besides the model's own state_dict, and the state that servers hold."""
        if self._driver.asking and self._driver.touched:
            raise CheckpointError(
                "the strategy is in the middle of a step: the model was called in training since the last "
                "optimizer.step(). Save after a step, or call model.eval() for forward passes outside steps."
            )
        plain, ours, x = self._optimizer.state_dict(), self._ours(), self._driver.runtime.node.x
        if self._driver.runtime.layout.model_location == "servers":
            if self._driver.over:
                raise CheckpointError(
                    "the servers had a part of the state, and ended with optimizer.finish(). Call "
                    "optimizer.state_dict() before optimizer.finish()."
                )
            states, theirs = self._servers.ask()
            if self._on_servers:
                plain["state"] = self._as_torch(states)
            ours |= {"x": None if torch.equal(theirs, x.cpu()) else theirs, "digest": digest(x)}
        return plain | {_OURS: ours}

    def _as_torch(self, states: States) -> dict[int, dict[str, Any]]:
        by_parameter = dict(zip(self._driver.replica.parameters, states, strict=True))
        found = {number: by_parameter[p] for number, p in self._layers() if by_parameter[p]}
        for number, p in self._layers():
            for name, value in found.get(number, {}).items():
                if isinstance(value, Tensor) and value.shape == p.shape and value.dim():
                    found[number][name] = value.to(p.device)
        return dict(sorted(found.items()))

    def _ours(self) -> dict[str, Any]:
        runtime, node = self._driver.runtime, self._driver.runtime.node
        strategy, state = self._resumes_as()
        tensors: dict[str, Tensor] = {}
        structure = checkpoint.outline(state, tensors)
        return {
            "strategy": expression.show(strategy),
            "workers": runtime.spec.workers,
            "rank": runtime.rank,
            "structure": structure,
            "tensors": {name: tensor.clone() for name, tensor in tensors.items()},
            "counts": [node.steps, node.samples, node.skipped],
            "position": self._handle.position(),
            "pace": node.optimizer.pace,
            "rng": node.rng.get_state(),
        }

    def load(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that `save` returned, on this worker or on another; or that of a plain optimizer."""
        saved = state_dict.get(_OURS)
        plain = {name: value for name, value in state_dict.items() if name != _OURS}
        if saved is not None:
            self._check(saved)
        runtime, node = self._driver.runtime, self._driver.runtime.node
        pace = node.optimizer.pace if saved is None else saved["pace"]
        states = self._by_layer(plain) if self._on_servers else None
        self._driver.drop()
        self._handle.loaded = True
        node.optimizer.restore({"optimizer": plain if states is None else plain | {"state": {}}, **pace})
        if saved is not None:
            self._restore(saved)
        if runtime.layout.model_location == "servers":
            found = saved or {}
            self._servers.loading = StateToLoad(states, pace, found.get("x"), found.get("digest", ""))

    def _check(self, saved: dict[str, Any]) -> None:
        here = {"strategy": expression.show(self._resumes_as()[0]), "workers": self._driver.runtime.spec.workers}
        for key, value in here.items():
            if saved[key] != value:
                raise CheckpointError(
                    f"{key} is {value!r} here and was {saved[key]!r} when this was saved. Load it with the same "
                    "strategy and as many workers; after a switch to or from servers, load it with the second strategy "
                    "alone."
                )

    def _by_layer(self, plain: dict[str, Any]) -> States:
        """Return the state of every parameter of x, in the order of x."""
        whole = self._driver.runtime.spec.layerwise  # layer-wise optimizers may keep tensors of any shape
        # Torch uses the order of the parameters, whatever their numbers are.
        by_parameter: dict[nn.Parameter, dict[str, Any]] = {}
        for p, number in zip(_members(self._optimizer.param_groups), _members(plain["param_groups"]), strict=False):
            by_parameter[p] = plain["state"].get(number, {})
            for name, value in by_parameter[p].items():
                if isinstance(value, Tensor) and value.dim() and value.shape != p.shape and not whole:
                    shapes = f"{tuple(value.shape)}, its parameter {tuple(p.shape)}"
                    raise CheckpointError(f"{name} of parameter {number} has shape {shapes}: this is of another model.")
        return [by_parameter.get(p, {}) for p in self._driver.replica.parameters]

    def _restore(self, saved: dict[str, Any]) -> None:
        runtime, node = self._driver.runtime, self._driver.runtime.node
        node.steps, node.samples, node.skipped = saved["counts"]
        if saved["rank"] == runtime.rank:
            node.rng.set_state(saved["rng"].cpu())
        self._handle.seek(saved["position"])
        state = self._resumes_as()[1]
        if state is not None:
            checkpoint.restore_into(state, checkpoint.fill(saved["structure"], saved["tensors"]))
            node.adopt(runtime.spec.strategy, runtime.state)


def _members(groups: list[dict[str, Any]]) -> list[Any]:
    return [member for group in groups for member in group["params"]]
