# SPDX-License-Identifier: Apache-2.0
"""The optimizer that a loop gets in place of its own: the same to look at, but its step is the strategy's."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils.hooks import RemovableHandle

from orchestra.engine import checks, expression
from orchestra.errors import ConfigError, OrchestraError, Problem
from orchestra.user_loop.handle import CLIP, LoopHandle
from orchestra.user_loop.state_dict import StateDict
from orchestra.user_loop.step_driver import StepDriver


class PreparedOptimizer(optim.Optimizer):
    """A torch optimizer whose `step` makes a step of a strategy, together with other processes.

    Groups and state are those of the optimizer that was given, so schedulers work on either. `orchestra` is this
    process among the others.
    """

    # A GradScaler then calls `step` also where it found infinities, so that the others need not wait for this worker.
    _step_supports_amp_scaling = True

    def __init__(self, inner: optim.Optimizer, driver: StepDriver, handle: LoopHandle, *, usual: int) -> None:
        # Not as torch begins: groups, state and hooks are those of `inner`.
        self._inner, self._driver = inner, driver
        self.orchestra = handle
        self._saving = StateDict(inner, driver, handle)
        self._replica = driver.replica
        ours = {*self._replica.parameters}
        self._others = [p for p in self._replica.module.parameters() if p not in ours]
        self._usual = usual  # samples of a step, where nobody says
        self._fetched = 0  # samples since the last step
        self._told = self._settings() if handle.tells_servers else {}  # what servers know: they begin with the same
        self._guard: RemovableHandle | None = None
        with contextlib.suppress(AttributeError):  # some that only look like torch's have no hooks
            self._guard = inner.register_step_pre_hook(self._not_alone)

    # What torch knows of an optimizer.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the optimizer that was given."""
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the optimizer that was given."""
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of the optimizer that was given."""
        return self._inner.defaults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # hooks

    def __repr__(self) -> str:
        return f"Prepared({expression.show(self._driver.runtime.spec.strategy)}, {self._inner!r})"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ever."""
        self._inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Too late: the parameters of all processes lie in one vector."""
        message = "cannot be added after orchestra.prepare: add all groups before"
        raise ConfigError([Problem("param_group", list(param_group), message)])

    # A step.

    def _not_alone(self, *_: Any) -> None:
        """A hook of the optimizer that was given: only the strategy may step it."""
        if not self._driver.playing:
            raise OrchestraError(
                "the optimizer that was given to orchestra.prepare was stepped, which the others know nothing of: the "
                "models would differ. Step the one that it returned: model, optimizer, loader = orchestra.prepare(...)."
            )

    def fetched(self, samples: int) -> None:
        """The loader gave out so many."""
        self._fetched += samples

    def begin(self) -> None:
        """Have the parameters at which the strategy wants the next gradient. Calling the model in training does it."""
        self._driver.begin()

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        loss: Tensor | float | None = None,
        samples: int | None = None,
    ) -> Any:
        """A step of the strategy with the gradients that are in the parameters' `.grad`.

        Args:
            closure: computes the loss and the gradients, and gives the loss; it is called once.
            loss: for the log, and for strategies that look at it.
            samples: behind the gradient; as many as the loader gave out since the last step, unless told.

        """
        value: Any = loss
        if closure is not None:
            with torch.enable_grad():
                value = closure()
            loss = value if loss is None else loss
        for p in self._others:
            if p.grad is not None:
                message = "was frozen when orchestra.prepare was called, and has a gradient now: thaw it before"
                raise ConfigError([Problem("model", tuple(p.shape), message)])
        self._replica.require_in_place()
        shared = self._fetched > 0  # the samples are of the loader that was shared out, so others have others
        size = self._fetched or self._usual if samples is None else samples
        self._usual, self._fetched = (self._fetched or self._usual), 0
        if self.orchestra.tells_servers:
            self._tell_servers()
        vars(self._inner)["_opt_called"] = True  # schedulers look for it, also where only a server's optimizer steps
        loss = loss.detach() if isinstance(loss, Tensor) else loss
        size = size if self._usable() else 0
        grads = [] if shared or not size else [p.grad for p in self._replica.parameters if p.grad is not None]
        self.orchestra.before_step(grads, self.param_groups)
        self._driver.step(size, None if loss is None else float(loss))
        self._driver.runtime.node.clip = None
        return value

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Bound the norm of the gradient in the next `step`; gives the norm of this worker's own gradient.

        `torch.nn.utils.clip_grad_norm_` clips what this worker computed, before any mean. This clips what the optimizer
        sees: the mean over the workers where the strategy averages gradients (all-reduce, most servers), as after
        DistributedDataParallel; each worker's own gradient where every gradient is applied by itself. Call it after
        `backward` in every step, on every worker and with the same value: workers in lockstep compare it every 10
        steps, and servers of other strategies use that of worker 0.
        """
        runtime = self._driver.runtime
        problems = [
            *checks.check_norm("max_norm", max_norm),
            *checks.check_whole(runtime.spec.strategy, "max_norm", max_norm),
        ]
        if problems and max_norm != math.inf:  # which bounds nothing: a way to ask for the norm
            raise ConfigError(problems)
        runtime.node.clip = None if max_norm == math.inf else float(max_norm)
        norms = [torch.linalg.vector_norm(p.grad) for p in self._replica.parameters if p.grad is not None]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.tensor(0.0)

    def _usable(self) -> bool:
        """Whether there are gradients that are finite as far as a GradScaler knows; they are unscaled here."""
        grads = [p.grad for p in self._replica.parameters if p.grad is not None]
        found_inf, scale = self.__dict__.get("found_inf"), self.__dict__.get("grad_scale")
        if not grads:
            return False
        if found_inf is not None and float(found_inf):
            self._driver.spare_buffers()
            return False
        if scale is not None:
            torch._foreach_mul_(grads, float(scale.double().reciprocal().float()))
        return True

    def _tell_servers(self) -> None:
        """Servers have optimizers of their own, which schedules do not reach."""
        settings = self._settings()
        for name, values in settings.items():
            if values != self._told.get(name):
                self.orchestra.tell_settings(name, values)
        self._told = settings

    def _settings(self) -> dict[str, list[Any]]:
        """What is a number, or some of them, by group: the learning rates, the momenta; not what schedulers keep."""
        found = {name: [_number(group.get(name)) for group in self.param_groups] for name in self.defaults}
        node = self._driver.runtime.node
        clip = {CLIP: [node.clip or False]}
        if None not in found.get("lr", [None]):
            found["lr"] = [rate * node.optimizer.factor for rate in found["lr"]]
        return clip | {name: values for name, values in found.items() if None not in values}

    def finish(self, *, also: Iterable[nn.Module | Tensor] = ()) -> None:
        """End the run after the last step: all workers then have one model.

        Args:
            also: modules or tensors that the loop updates by itself, such as a moving average of the model. Each
                becomes its mean over the workers, weighted as the model is; whole numbers become those of worker 0.

        """
        self.orchestra.finish(also)
        if self._guard is not None:
            self._guard.remove()

    # Saving.

    def state_dict(self) -> dict[str, Any]:
        """All that changes but the model's own state_dict, in torch's form; also where servers hold it.

        Any worker may call it by itself, between two steps.
        """
        return self._saving.save()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to what `state_dict` gave on this worker or on another; the model has a state_dict of its own.

        Every worker calls it. Servers then take the model of worker 0 as it is at the next step. The state of a plain
        optimizer is taken as well.
        """
        self._saving.load(state_dict)


def _number(value: Any) -> Any:
    """A setting as a note can hold it; None if it is neither a number nor some of them."""
    if isinstance(value, tuple | list):
        some = [_number(v) for v in value]
        return None if None in some else some
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else None
    return value if isinstance(value, int | float) else None
