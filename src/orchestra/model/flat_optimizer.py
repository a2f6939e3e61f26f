# SPDX-License-Identifier: Apache-2.0
"""The inner optimizer: any `torch.optim` class, on a flat vector.

Element-wise optimizers (SGD, Adam, ...) see one flat parameter, or one range of it, so that the owner of a range can
update it. Optimizers that use whole layers (LARS, LAMB, Muon) see the module's own parameters, and those with several
parameter groups the pieces of the parameters that a node holds.

A layer without a gradient (see gradient_mask) is not updated. The first such gradient cuts a flat parameter, and the
optimizer's state for it, at the edges of the layer: from then on each piece has its own count of steps.
"""

from __future__ import annotations

import bisect
import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn, optim

from orchestra.core import optimizer_state as kept
from orchestra.core.gradient_mask import GradientMask
from orchestra.core.vectors import LINE
from orchestra.model import param_groups as groups
from orchestra.model.optimizers import ProximalSGD

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
    """Return whether the optimizers of a factory are element-wise, so that they can update ranges of a flat vector."""
    made = factory(list(params))
    return type(made) in ELEMENTWISE and groups.is_one(made, params)


class FlatOptimizer:
    """An optimizer over a flat vector `x` (`layers` None), or over a module's layers that are views of it.

    `pieces`: the layers of which `x` consists; without them no layer of x may lack a gradient.
    """

    def __init__(
        self,
        factory: Factory,
        x: Tensor,
        *,
        layers: Sequence[nn.Parameter] | None = None,
        pieces: Sequence[slice] = (),
        schedule: Schedule | None = None,
        fused: bool = False,
    ) -> None:
        self._flat = None if layers is not None else nn.Parameter(x, requires_grad=True)
        # The optimizer's parameters, in the order of x: layers, or pieces of x, initially all of it.
        self._params = list(layers or []) if self._flat is None else [self._flat]
        self._given: Tensor | None = None  # the last g, and the parameters' parts of it
        self._parts: tuple[Tensor, ...] = ()
        self.optimizer = factory(list(self._params))
        self._alike = self._flat is not None or groups.is_one(self.optimizer, self._params)  # one rate for all of x
        self._line = LINE if fused else 1
        if fused:
            self._fuse()
        own = () if self._flat is not None else (part for part in self._slices() if part.start < part.stop)
        self._marks = GradientMask(pieces or own, x.device if self._flat is not None else _device(self._params))
        # A user's own optimizer may draw random numbers; those of torch and ours do not.
        self.draws = not type(self.optimizer).__module__.startswith(("torch.optim.", "orchestra.model.optimizers."))
        self._schedule = schedule
        self._base = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._scales = [1.0 for _ in self._base]  # factors on the rates of the groups
        self._momentum: float | None = None  # replaces the optimizer's own, if it was set
        self._lent = False  # the caller sets the learning rate, which is scaled only during a step
        self.factor = 1.0  # on all rates of a lent optimizer, besides the scales of the groups

    @classmethod
    def around(cls, optimizer: optim.Optimizer, layers: Sequence[nn.Parameter], factor: float = 1.0) -> FlatOptimizer:
        """Wrap an optimizer that the caller keeps using, for example with schedulers of torch.

        A step multiplies the learning rates by `factor`; the caller sees and sets them without the factor.
        """
        inner = cls(lambda _: optimizer, torch.empty(0), layers=layers)
        inner._lent, inner.factor = True, factor
        return inner

    def _momentary(self) -> list[float]:
        """Return the factor on each group's rate that is applied only during a step: 1 unless the optimizer is lent."""
        return [scale * self.factor if self._lent else 1.0 for scale in self._scales]

    @property
    def lr(self) -> float:
        """The learning rate in force."""
        return float(self.optimizer.param_groups[0]["lr"]) * self._momentary()[0]

    def _fuse(self) -> None:
        """Use torch's fused kernels, which traverse memory once, unless the user chose otherwise."""
        for group in self.optimizer.param_groups:
            if type(self.optimizer) in _FUSABLE and group["fused"] is None and group["foreach"] is None:
                group["fused"] = not (group.get("differentiable") or group.get("capturable"))

    def set_progress(self, epochs: float) -> None:
        """Set the learning rates by the schedule at this epoch."""
        if self._schedule is None:
            return
        factor = self._schedule(epochs)
        for group, base in zip(self.optimizer.param_groups, self._base, strict=True):
            group["lr"] = base * factor

    def rates(self) -> Iterator[tuple[slice, float]]:
        """Yield the learning rate of each range of x, always the same ranges: the whole, or layers if there are groups.

        A layer in no group has rate zero.
        """
        if self._alike:
            yield slice(None), self.lr
            return
        scaled = zip(self.optimizer.param_groups, self._momentary(), strict=True)
        rates = [(group["params"], float(group["lr"]) * scale) for group, scale in scaled]
        by_layer = {p: rate for layers, rate in rates for p in layers}
        start = 0
        for p in self._params:
            yield slice(start, start := start + p.numel()), by_layer.get(p, 0.0)

    def follow(self, name: str, first: int, values: Sequence[Any]) -> None:
        """Set what a schedule elsewhere says for the groups from `first` on: learning rates, momenta, ..."""
        if name == "momentum" and self._momentum is not None:
            return
        followers = zip(self.optimizer.param_groups[first:], self._scales[first:], values, strict=False)
        for group, scale, value in followers:
            if name in groups.settings(group):  # schedules store other entries there, too
                group[name] = value * scale if name == "lr" else value

    def step(self, g: Tensor) -> None:
        """Do one update with gradient g; layers without a gradient are not updated."""
        self._hand_out(g)
        if self._lent and (self._momentum is not None or any(scale != 1 for scale in self._momentary())):
            self._step_scaled()
        else:
            self.optimizer.step()

    def _step_scaled(self) -> None:
        groups = self.optimizer.param_groups
        before = [(group["lr"], group.get("momentum")) for group in groups]
        try:
            for group, scale in zip(groups, self._momentary(), strict=True):
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
        """Set every parameter's gradient to its part of g; None if it is absent there."""
        absent = self._marks.absent(g)
        if absent and self._flat is not None:
            self._cut(absent)
        if self._flat is not None and len(self._params) == 1:
            self._params[0].grad = None if absent else g
            return
        if g is not self._given:
            pieces = torch.split_with_sizes(g, [p.numel() for p in self._params])
            self._given = g
            self._parts = tuple(piece.view(p.shape) for p, piece in zip(self._params, pieces, strict=True))
        for p, part in zip(self._params, self._parts, strict=True):
            p.grad = part
        if absent:
            starts = [piece.start for piece in absent]
            for p, where in zip(self._params, self._slices(), strict=True):
                number = bisect.bisect_right(starts, where.start) - 1
                if number >= 0 and where.start < absent[number].stop:
                    p.grad = None

    def _slices(self) -> Iterator[slice]:
        """Return the range of x of each parameter."""
        return (slice(*ends) for ends in pairwise(self._edges()))

    def _edges(self) -> list[int]:
        return [*accumulate((p.numel() for p in self._params), initial=0)]

    def _cut(self, absent: Sequence[slice]) -> None:
        """Cut x between layers with and without a gradient.

        Fused kernels treat the last elements of a vector slightly differently (see core.vectors), so for them x is also
        cut at the cache lines before and after: then the result does not depend on the number of ranges of x.
        """
        edges, line = {*self._edges()}, self._line
        last = max(edges)
        for edge in {piece.start for piece in absent} ^ {piece.stop for piece in absent}:
            edges |= {edge, edge // line * line, min(last, -(-edge // line) * line)}
        if len(edges) > len(self._params) + 1:
            self._arrange(sorted(edges))

    def _arrange(self, edges: Sequence[int]) -> None:
        """Give the optimizer x in pieces with these edges. Its state is cut likewise, never joined."""
        assert self._flat is not None
        before = [
            (part, self.optimizer.state.pop(p, None)) for part, p in zip(self._slices(), self._params, strict=True)
        ]
        self._params, self._given = [nn.Parameter(self._flat.data[a:b]) for a, b in pairwise(edges)], None
        (group,) = self.optimizer.param_groups
        group["params"] = list(self._params)
        for p, piece in zip(self._params, self._slices(), strict=True):
            part, state = next((part, state) for part, state in before if part.start <= piece.start < part.stop)
            if state is not None:
                inside = slice(piece.start - part.start, piece.stop - part.start)
                length = part.stop - part.start
                self.optimizer.state[p] = {name: _of_piece(v, inside, length) for name, v in state.items()}

    def reset(self) -> None:
        """Clear the optimizer's state, as if the next step were the first."""
        self.optimizer.state.clear()

    def vectors(self) -> list[Tensor]:
        """Return the optimizer's vectors, such as momenta, in a fixed order: each for all of x, zero where it has none.

        They may be copies, which `put` writes back. Vectors of another length than their layer's come last, one by one.
        """
        if len(self._params) == 1:
            return [v.view(-1) for v in self._kept(self._params[0], odd=False).values()]
        found = [self._kept(p, odd=False) for p in self._params]
        like = self._params[0] if self._params else torch.empty(0)
        rows = list(zip(self._params, found, strict=True))
        whole = [
            torch.cat([mine[name].reshape(-1) if name in mine else like.new_zeros(p.numel()) for p, mine in rows])
            for name in sorted({name for mine in found for name in mine})
        ]
        return whole + [v.view(-1) for p in self._params for v in self._kept(p, odd=True).values()]

    def put(self, vectors: Sequence[Tensor]) -> None:
        """Write new values of the vectors that `vectors` returned."""
        names = sorted({name for p in self._params for name in self._kept(p, odd=False)})
        for p, part in zip(self._params, self._slices(), strict=True):
            for name, vector in self._kept(p, odd=False).items():
                vector.copy_(vectors[names.index(name)][part].view_as(vector))

    def _kept(self, p: nn.Parameter, *, odd: bool) -> dict[str, Tensor]:
        """Return the vectors of a parameter's state, by name: those of its length, or with `odd` those of another."""
        state = sorted(self.optimizer.state.get(p, {}).items())
        return {n: v for n, v in state if isinstance(v, Tensor) and v.dim() and (v.numel() != p.numel()) == odd}

    def first_moments(self) -> list[Tensor]:
        """Return the first moments: means of gradients, not of their squares."""
        return [
            kept[name]
            for group in self.optimizer.param_groups
            for p in group["params"]
            for kept in [self.optimizer.state.get(p, {})]
            for name in _FIRST
            if isinstance(kept.get(name), Tensor)
        ]

    def rescale(self, factor: float) -> None:
        """Multiply the learning rate by a factor, now and in its schedule."""
        self._scales = [scale * factor for scale in self._scales]
        self._base = [base * factor for base in self._base]
        for group in () if self._lent else self.optimizer.param_groups:
            group["lr"] *= factor

    @property
    def momentum(self) -> float | None:
        """The present μ of the first group; None if the optimizer has none."""
        own = self.optimizer.param_groups[0].get("momentum")
        return self._momentum if own and self._momentum is not None else own

    def set_momentum(self, momentum: float, *, keep: bool) -> None:
        """Set μ in every group that has one; `keep` γ/(1 − μ), or else γ.

        v ← μ v + g adds g to x 1/(1 − μ) times in total. Groups in which μ is zero or missing do not change: Adam's β₁
        is the weight of a mean, without such a factor.
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
        """Return the state besides `vectors`, and the names of those, for JSON (see core.optimizer_state)."""
        if self._flat is None:
            return {}
        states = (kept.outline(self.optimizer.state.get(p, {}), p.numel()) for p in self._params)
        return kept.by_range((part.start, part.stop, s) for part, s in zip(self._slices(), states, strict=True))

    def adopt(self, outline: dict[str, Any], vectors: Sequence[Tensor]) -> None:
        """Take over the state of another optimizer: its outline, and its vectors."""
        self.reset()
        if not outline:  # no state, or that of an empty range
            return
        assert self._flat is not None, "layers cannot take over what was kept for a flat vector"
        found = kept.ranges(outline, self._flat.numel())
        named = dict(zip(kept.names(outline), vectors, strict=True))
        self._arrange([0, *(stop for _, stop, _ in found)])
        for p, (start, stop, words) in zip(self._params, found, strict=True):
            if words:
                self.optimizer.state[p] = kept.state(words, named, slice(start, stop))

    def by_layer(self) -> list[dict[str, Any]]:
        """Return the optimizer's state of each layer, or of each piece of a layer in a flat x, in the order of x."""
        if self._flat is None:
            return [dict(self.optimizer.state.get(p, {})) for p in self._params]
        outline, named = self.outline(), dict(zip(kept.names(self.outline()), self.vectors(), strict=True))
        found = []
        for piece in self._marks.pieces:
            _, _, words = next(r for r in kept.ranges(outline, self._flat.numel()) if r[0] <= piece.start < r[1])
            found.append(kept.state(words, named, piece))
        return found

    def restore_by_layer(self, states: Sequence[dict[str, Any]], pace: dict[str, Any]) -> None:
        """Restore the states that `by_layer` returned, and the `pace` of that time; other settings of groups stay."""
        for group, factor in zip(self.optimizer.param_groups, self._set_pace(pace), strict=True):
            group["lr"] *= factor
            if group.get("momentum") and self._momentum is not None:
                group["momentum"] = self._momentum
        if self._flat is not None:
            self.adopt(*kept.of_pieces(self._marks.pieces, states, self._flat))
            return
        found = dict(zip(self._params, states, strict=True))
        saved = self.optimizer.state_dict()
        numbered = enumerate(p for group in self.optimizer.param_groups for p in group["params"])
        saved["state"] = {number: found[p] for number, p in numbered if found[p]}
        self.optimizer.load_state_dict(saved)

    @property
    def pace(self) -> dict[str, Any]:
        """The changes of the rates and the momentum since the beginning, without those of a schedule."""
        return {"scales": list(self._scales), "momentum": self._momentum}

    def _set_pace(self, pace: dict[str, Any]) -> list[float]:
        """Restore a saved `pace`; return the resulting factor on the rate of each group."""
        factors = [after / before for after, before in zip(pace["scales"], self._scales, strict=True)]
        self._base = [base * factor for base, factor in zip(self._base, factors, strict=True)]
        self._scales, self._momentum = list(pace["scales"]), pace["momentum"]
        return factors

    def state(self) -> dict[str, Any]:
        """Return all state, for a checkpoint."""
        cut = {"edges": self._edges()} if self._flat is not None and len(self._params) > 1 else {}
        return {"optimizer": self.optimizer.state_dict(), **self.pace, **cut}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        self._set_pace(state)
        if self._flat is not None:
            self.reset()
            self._arrange(state.get("edges", [0, self._flat.numel()]))
        self.optimizer.load_state_dict(state["optimizer"])


_FIRST = ("momentum_buffer", "exp_avg")  # what torch calls first moments


def _of_piece(value: Any, piece: slice, length: int) -> Any:
    """Return an entry of the state for a piece of a parameter of this length, from the entry for all of it."""
    return value[piece] if kept.is_vector(value, length) else copy.deepcopy(value)


def _gain(group: dict[str, Any], momentum: float) -> float:
    """Return how often a gradient is added to x in total, in units of γ; torch ignores the dampening if μ is zero."""
    return (1 - group.get("dampening", 0) if momentum else 1) / (1 - momentum)


def _device(params: Sequence[nn.Parameter]) -> torch.device:
    return params[0].device if params else torch.device("cpu")
