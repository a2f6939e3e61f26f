# SPDX-License-Identifier: Apache-2.0
"""The inner optimizer: any `torch.optim` class, on a flat vector.

Optimizers that treat every element alike (SGD, Adam, ...) see one flat parameter, or one range of it, so a range can
be updated by whoever owns it. Those that look at whole layers (LARS, LAMB, Muon) see the module's own parameters, and
those with several parameter groups the pieces of them that there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from orchestra import groups
from orchestra.optimizers import ProximalSGD

Factory = Callable[..., optim.Optimizer]
Schedule = Callable[[float], float]

ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adagrad,
    optim.Adadelta,
    optim.Adamax,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    ProximalSGD,
)

_FUSABLE = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)


def elementwise(factory: Factory, params: Sequence[nn.Parameter]) -> bool:
    """Whether the optimizer a factory makes may be given ranges of a flat vector."""
    made = factory(list(params))
    return type(made) in ELEMENTWISE and groups.is_one(made, params)


class Inner:
    """An optimizer over a flat vector `x` (`layers` None), or over a module's layers that are views of it."""

    def __init__(
        self,
        factory: Factory,
        x: Tensor,
        *,
        layers: Sequence[nn.Parameter] | None = None,
        schedule: Schedule | None = None,
        clip: float | None = None,
        fused: bool = False,
    ) -> None:
        self._flat = None if layers is not None else nn.Parameter(x, requires_grad=True)
        self._layers = list(layers or [])
        self._given: Tensor | None = None  # the last g, and the layers' parts of it
        self._parts: tuple[Tensor, ...] = ()
        self.optimizer = factory(list(self._layers) if self._flat is None else [self._flat])
        self._alike = self._flat is not None or groups.is_one(self.optimizer, self._layers)  # one rate for all of x
        if fused:
            self._fuse()
        # A user's own may add noise; torch's and ours draw nothing.
        self.draws = not type(self.optimizer).__module__.startswith(("torch.optim.", "orchestra.optimizers."))
        self._schedule = schedule
        self._clip = clip
        self._base = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._scales = [1.0 for _ in self._base]  # factors on the rates of the groups
        self._momentum: float | None = None  # in place of the optimizer's own, if it was set
        self._lent = False  # somebody else sets the learning rate: it is scaled for the moment of a step only

    @classmethod
    def around(cls, optimizer: optim.Optimizer, layers: Sequence[nn.Parameter]) -> Inner:
        """One that stays in the hands of whoever made it, schedulers of torch among them."""
        inner = cls(lambda _: optimizer, torch.empty(0), layers=layers)
        inner._lent = True
        return inner

    @property
    def lr(self) -> float:
        """The learning rate in force."""
        rate = float(self.optimizer.param_groups[0]["lr"])
        return rate * self._scales[0] if self._lent else rate

    def _fuse(self) -> None:
        """Use torch's fused kernels, which pass over memory once, unless the user chose otherwise."""
        for group in self.optimizer.param_groups:
            if type(self.optimizer) in _FUSABLE and group["fused"] is None and group["foreach"] is None:
                group["fused"] = not (group.get("differentiable") or group.get("capturable"))

    def set_progress(self, epochs: float) -> None:
        """Follow the learning-rate schedule to where the run is."""
        if self._schedule is None:
            return
        factor = self._schedule(epochs)
        for group, base in zip(self.optimizer.param_groups, self._base, strict=True):
            group["lr"] = base * factor

    def rates(self) -> Iterator[tuple[slice, float]]:
        """The learning rate of each range of x, the same ranges every time: all of it, or layers if there are groups.

        That of what is in no group is zero.
        """
        if self._alike:
            yield slice(None), self.lr
            return
        scaled = zip(self.optimizer.param_groups, self._scales, strict=True)
        rates = [(group["params"], float(group["lr"]) * (scale if self._lent else 1.0)) for group, scale in scaled]
        by_layer = {p: rate for layers, rate in rates for p in layers}
        start = 0
        for p in self._layers:
            yield slice(start, start := start + p.numel()), by_layer.get(p, 0.0)

    def follow(self, name: str, first: int, values: Sequence[Any]) -> None:
        """Go on with what a schedule elsewhere says of the groups from `first` on: learning rates, momenta, ..."""
        if name == "momentum" and self._momentum is not None:
            return
        followers = zip(self.optimizer.param_groups[first:], self._scales[first:], values, strict=False)
        for group, scale, value in followers:
            if name in groups.settings(group):  # schedules keep things of their own there, too
                group[name] = value * scale if name == "lr" else value

    def step(self, g: Tensor) -> None:
        """One update with gradient g, clipped in place if asked for; a layer's is its range of g."""
        if self._clip is not None:
            with torch.no_grad():
                g.mul_(torch.clamp(self._clip / (torch.linalg.vector_norm(g) + 1e-6), max=1.0))
        if self._flat is not None:
            self._flat.grad = g
        else:
            self._hand_out(g)
        if self._lent and (self._momentum is not None or any(scale != 1 for scale in self._scales)):
            self._step_scaled()
        else:
            self.optimizer.step()

    def _step_scaled(self) -> None:
        groups = self.optimizer.param_groups
        before = [(group["lr"], group.get("momentum")) for group in groups]
        try:
            for group, scale in zip(groups, self._scales, strict=True):
                group["lr"] = group["lr"] * scale
                if group.get("momentum") and self._momentum is not None:
                    group["momentum"] = self._momentum
            self.optimizer.step()
        finally:
            for group, (rate, momentum) in zip(groups, before, strict=True):
                group["lr"] = rate
                if momentum is not None:
                    group["momentum"] = momentum

    def _hand_out(self, g: Tensor) -> None:
        """Let every layer's gradient be its part of g, whoever filled it."""
        if g is not self._given:
            pieces = zip(self._layers, torch.split_with_sizes(g, [p.numel() for p in self._layers]), strict=True)
            self._given, self._parts = g, tuple(piece.view(p.shape) for p, piece in pieces)
        for p, part in zip(self._layers, self._parts, strict=True):
            p.grad = part

    def reset(self) -> None:
        """Forget all momenta, as if the next step were the first."""
        self.optimizer.state.clear()

    def vectors(self) -> list[Tensor]:
        """The optimizer's own vectors (momenta and the like), in a fixed order."""
        return [
            value.view(-1)
            for group in self.optimizer.param_groups
            for p in group["params"]
            for _, value in sorted(self.optimizer.state.get(p, {}).items())
            if isinstance(value, Tensor) and value.dim() > 0
        ]

    def first_moments(self) -> list[Tensor]:
        """Those of them that are means of gradients, not of their squares."""
        return [
            kept[name]
            for group in self.optimizer.param_groups
            for p in group["params"]
            for kept in [self.optimizer.state.get(p, {})]
            for name in _FIRST
            if isinstance(kept.get(name), Tensor)
        ]

    def rescale(self, factor: float) -> None:
        """Multiply the learning rate, now and wherever a schedule takes it."""
        self._scales = [scale * factor for scale in self._scales]
        self._base = [base * factor for base in self._base]
        for group in () if self._lent else self.optimizer.param_groups:
            group["lr"] *= factor

    @property
    def momentum(self) -> float | None:
        """μ in force, in the first group; None if the optimizer has none."""
        own = self.optimizer.param_groups[0].get("momentum")
        return self._momentum if own and self._momentum is not None else own

    def set_momentum(self, momentum: float, *, keep: bool) -> None:
        """Use another μ in every group that has one; `keep` γ/(1 − μ), or else γ.

        v ← μ v + g adds g to x 1/(1 − μ) times in the end. Nothing changes where μ is zero or missing: Adam's β₁ is
        the weight of a mean, which has no such factor.
        """
        for i, group in enumerate(self.optimizer.param_groups):
            if own := group.get("momentum"):
                factor = _gain(group, own) / _gain(group, momentum) if keep else 1.0
                self._scales[i] *= factor
                self._base[i] *= factor
                if not self._lent:
                    group["lr"] *= factor
                    group["momentum"] = momentum
        self._momentum = momentum

    def outline(self) -> dict[str, Any]:
        """What the optimizer keeps beside `vectors`, and what those are called, as JSON can hold it."""
        if self._flat is None:
            return {}
        return {name: _outline(value) for name, value in sorted(self.optimizer.state.get(self._flat, {}).items())}

    def adopt(self, outline: dict[str, Any], vectors: Sequence[Tensor]) -> None:
        """Go on with what another one kept: its outline, and its vectors."""
        if not outline and not vectors:
            self.reset()
            return
        assert self._flat is not None, "layers cannot take over what was kept for a flat vector"
        left = iter(vectors)
        self.optimizer.state[self._flat] = {
            name: next(left) if value == _VECTOR else _value(value) for name, value in outline.items()
        }

    def state(self) -> dict[str, Any]:
        """All that changes, for a checkpoint."""
        return {"optimizer": self.optimizer.state_dict(), "scales": self._scales, "momentum": self._momentum}

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a saved state."""
        factors = [after / before for after, before in zip(state["scales"], self._scales, strict=True)]
        self._base = [base * factor for base, factor in zip(self._base, factors, strict=True)]
        self._scales, self._momentum = list(state["scales"]), state["momentum"]
        self.optimizer.load_state_dict(state["optimizer"])


_VECTOR = "vector"
_FIRST = ("momentum_buffer", "exp_avg")  # what torch calls first moments


def _gain(group: dict[str, Any], momentum: float) -> float:
    """How often a gradient is added to x in the end, in units of γ; torch ignores the dampening if μ is zero."""
    return (1 - group.get("dampening", 0) if momentum else 1) / (1 - momentum)


def _outline(value: Any) -> Any:
    """Numbers are tensors without a dimension, or plain."""
    if isinstance(value, Tensor):
        return _VECTOR if value.dim() else {"tensor": value.item()}
    return value


def _value(outline: Any) -> Any:
    return torch.tensor(outline["tensor"]) if isinstance(outline, dict) else outline
