# SPDX-License-Identifier: Apache-2.0
"""The inner optimizer: any `torch.optim` class, on a flat vector.

Optimizers that treat every element alike (SGD, Adam, ...) see one flat parameter, or one range of it, so a range can
be updated by whoever owns it. Those that look at whole layers (LARS, LAMB, Muon) see the module's own parameters, and
those with several parameter groups the pieces of them that there are.

A layer without a gradient (marks.py) is left alone. When a flat parameter is first given one it is cut there, and what
the optimizer keeps for it as well: each piece then has its own count of steps. Before that nothing is different.
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
    """Whether the optimizer a factory makes may be given ranges of a flat vector."""
    made = factory(list(params))
    return type(made) in ELEMENTWISE and groups.is_one(made, params)


class FlatOptimizer:
    """An optimizer over a flat vector `x` (`layers` None), or over a module's layers that are views of it.

    `pieces`: the layers of which `x` consists; without them none of its elements can lack a gradient.
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
        # What the optimizer sees, in the order of x: a layer each, or a piece of x, at first all of it.
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
        # A user's own may add noise; torch's and ours draw nothing.
        self.draws = not type(self.optimizer).__module__.startswith(("torch.optim.", "orchestra.model.optimizers."))
        self._schedule = schedule
        self._base = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._scales = [1.0 for _ in self._base]  # factors on the rates of the groups
        self._momentum: float | None = None  # in place of the optimizer's own, if it was set
        self._lent = False  # somebody else sets the learning rate: it is scaled for the moment of a step only
        self.factor = 1.0  # of one that is lent: on all its rates, beside what is done to them meanwhile

    @classmethod
    def around(cls, optimizer: optim.Optimizer, layers: Sequence[nn.Parameter], factor: float = 1.0) -> FlatOptimizer:
        """One that the caller keeps using, with schedulers of torch; a step multiplies its learning rates by `factor`.

        The rates that its maker sees and sets stay without the factor.
        """
        inner = cls(lambda _: optimizer, torch.empty(0), layers=layers)
        inner._lent, inner.factor = True, factor
        return inner

    def _momentary(self) -> list[float]:
        """The factor on the rate of each group that is not in the group: of one that is lent."""
        return [scale * self.factor if self._lent else 1.0 for scale in self._scales]

    @property
    def lr(self) -> float:
        """The learning rate in force."""
        return float(self.optimizer.param_groups[0]["lr"]) * self._momentary()[0]

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
        scaled = zip(self.optimizer.param_groups, self._momentary(), strict=True)
        rates = [(group["params"], float(group["lr"]) * scale) for group, scale in scaled]
        by_layer = {p: rate for layers, rate in rates for p in layers}
        start = 0
        for p in self._params:
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
        """One update with gradient g; layers without a gradient are left alone."""
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
        """Let every parameter's gradient be its part of g; None if it is absent there."""
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
        """The range of x that each parameter is."""
        return (slice(*ends) for ends in pairwise(self._edges()))

    def _edges(self) -> list[int]:
        return [*accumulate((p.numel() for p in self._params), initial=0)]

    def _cut(self, absent: Sequence[slice]) -> None:
        """Cut x where layers with a gradient and layers without one meet.

        Fused kernels treat the last elements of a vector a little differently (vectors.py), so for them the cut is also
        at the cache lines before and after: then the result does not depend on how many ranges of x there are.
        """
        edges, line = {*self._edges()}, self._line
        last = max(edges)
        for edge in {piece.start for piece in absent} ^ {piece.stop for piece in absent}:
            edges |= {edge, edge // line * line, min(last, -(-edge // line) * line)}
        if len(edges) > len(self._params) + 1:
            self._arrange(sorted(edges))

    def _arrange(self, edges: Sequence[int]) -> None:
        """Let the optimizer see x in pieces with these edges. What it keeps is cut likewise, never joined."""
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
        """Forget all momenta, as if the next step were the first."""
        self.optimizer.state.clear()

    def vectors(self) -> list[Tensor]:
        """The optimizer's own vectors (momenta and the like), in a fixed order: each of all x, zero where it has none.

        They may be copies, which `put` writes back. Those that are not as long as their layer are last, one by one.
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
        """Keep what `vectors` gave, with other numbers."""
        names = sorted({name for p in self._params for name in self._kept(p, odd=False)})
        for p, part in zip(self._params, self._slices(), strict=True):
            for name, vector in self._kept(p, odd=False).items():
                vector.copy_(vectors[names.index(name)][part].view_as(vector))

    def _kept(self, p: nn.Parameter, *, odd: bool) -> dict[str, Tensor]:
        """The vectors kept for a parameter, by name: those of its length, or those of another."""
        state = sorted(self.optimizer.state.get(p, {}).items())
        return {n: v for n, v in state if isinstance(v, Tensor) and v.dim() and (v.numel() != p.numel()) == odd}

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
        """What the optimizer keeps beside `vectors`, and what those are called, as JSON can hold it (kept.py)."""
        if self._flat is None:
            return {}
        states = (kept.outline(self.optimizer.state.get(p, {}), p.numel()) for p in self._params)
        return kept.by_range((part.start, part.stop, s) for part, s in zip(self._slices(), states, strict=True))

    def adopt(self, outline: dict[str, Any], vectors: Sequence[Tensor]) -> None:
        """Go on with what another one kept: its outline, and its vectors."""
        self.reset()
        if not outline:  # nothing was kept, or nothing for an empty range
            return
        assert self._flat is not None, "layers cannot take over what was kept for a flat vector"
        found = kept.ranges(outline, self._flat.numel())
        named = dict(zip(kept.names(outline), vectors, strict=True))
        self._arrange([0, *(stop for _, stop, _ in found)])
        for p, (start, stop, words) in zip(self._params, found, strict=True):
            if words:
                self.optimizer.state[p] = kept.state(words, named, slice(start, stop))

    def by_layer(self) -> list[dict[str, Any]]:
        """The optimizer's state of each layer, or of each piece of a layer in a flat x, in the order of x."""
        if self._flat is None:
            return [dict(self.optimizer.state.get(p, {})) for p in self._params]
        outline, named = self.outline(), dict(zip(kept.names(self.outline()), self.vectors(), strict=True))
        found = []
        for piece in self._marks.pieces:
            _, _, words = next(r for r in kept.ranges(outline, self._flat.numel()) if r[0] <= piece.start < r[1])
            found.append(kept.state(words, named, piece))
        return found

    def restore_by_layer(self, states: Sequence[dict[str, Any]], pace: dict[str, Any]) -> None:
        """Go back to what `by_layer` gave, at the `pace` of then; the other settings of the groups stay."""
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
        """What was done to the rates and the momentum since the beginning, beside a schedule."""
        return {"scales": list(self._scales), "momentum": self._momentum}

    def _set_pace(self, pace: dict[str, Any]) -> list[float]:
        """Go back to it; gives the factor on the rate of each group."""
        factors = [after / before for after, before in zip(pace["scales"], self._scales, strict=True)]
        self._base = [base * factor for base, factor in zip(self._base, factors, strict=True)]
        self._scales, self._momentum = list(pace["scales"]), pace["momentum"]
        return factors

    def state(self) -> dict[str, Any]:
        """All that changes, for a checkpoint."""
        cut = {"edges": self._edges()} if self._flat is not None and len(self._params) > 1 else {}
        return {"optimizer": self.optimizer.state_dict(), **self.pace, **cut}

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a saved state."""
        self._set_pace(state)
        if self._flat is not None:
            self.reset()
            self._arrange(state.get("edges", [0, self._flat.numel()]))
        self.optimizer.load_state_dict(state["optimizer"])


_FIRST = ("momentum_buffer", "exp_avg")  # what torch calls first moments


def _of_piece(value: Any, piece: slice, length: int) -> Any:
    """What an optimizer keeps for a piece of a parameter of some length, from what it kept for all of it."""
    return value[piece] if kept.is_vector(value, length) else copy.deepcopy(value)


def _gain(group: dict[str, Any], momentum: float) -> float:
    """How often a gradient is added to x in the end, in units of γ; torch ignores the dampening if μ is zero."""
    return (1 - group.get("dampening", 0) if momentum else 1) / (1 - momentum)


def _device(params: Sequence[nn.Parameter]) -> torch.device:
    return params[0].device if params else torch.device("cpu")
