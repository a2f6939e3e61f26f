# SPDX-License-Identifier: Apache-2.0
"""The optimizer that `prepare` returns: it has the interface of the loop's own, but its step is the strategy's."""

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
    """A torch optimizer whose `step` does a step of a strategy, together with other processes.

    Groups and state are those of the given optimizer, so schedulers work with either. The attribute `orchestra` has the
    methods that concern the run, such as `score` and `mean`.
    """

    # A GradScaler then calls `step` even if it found infinities, so that the others need not wait for this worker.
    _step_supports_amp_scaling = True

    def __init__(self, inner: optim.Optimizer, driver: StepDriver, handle: LoopHandle, *, usual: int) -> None:
        # Without torch's initialisation: groups, state and hooks are those of `inner`.
        self._inner, self._driver = inner, driver
        self.orchestra = handle
        self._saving = StateDict(inner, driver, handle)
        self._replica = driver.replica
        ours = {*self._replica.parameters}
        self._others = [p for p in self._replica.module.parameters() if p not in ours]
        self._usual = usual  # samples of a step, if no number is given
        self._fetched = 0  # samples since the last step
        self._known = self._settings() if handle.informs_servers else {}  # what servers know: they begin with the same
        self._guard: RemovableHandle | None = None
        with contextlib.suppress(AttributeError):  # optimizers that only imitate torch's have no hooks
            self._guard = inner.register_step_pre_hook(self._not_alone)

    # The interface of torch.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the given optimizer."""
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the given optimizer."""
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the given optimizer."""
        return self._inner.defaults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # hooks

    def __repr__(self) -> str:
        return f"Prepared({expression.show(self._driver.runtime.spec.strategy)}, {self._inner!r})"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as torch does."""
        self._inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise: the parameters already form one vector, equal in all processes."""
        message = "cannot be added after orchestra.prepare: add all groups before"
        raise ConfigError([Problem("param_group", list(param_group), message)])

    # A step.

    def _not_alone(self, *_: Any) -> None:
        """Raise if the given optimizer is stepped directly: only the strategy may step it."""
        if not self._driver.stepping:
            raise OrchestraError(
                "the optimizer that was given to orchestra.prepare was stepped without the other workers: the "
                "models would differ. Step the one that it returned: model, optimizer, loader = orchestra.prepare(...)."
            )

    def fetched(self, samples: int) -> None:
        """Count samples that the loader has returned."""
        self._fetched += samples

    def begin(self) -> None:
        """Set the parameters at which the strategy wants the next gradient. Calling the model in training does this."""
        self._driver.begin()

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        loss: Tensor | float | None = None,
        samples: int | None = None,
    ) -> Any:
        """Do a step of the strategy with the gradients in the parameters' `.grad`.

        Args:
            closure: computes the loss and the gradients, and returns the loss; it is called once.
            loss: for the log, and for strategies that need it.
            samples: behind the gradient; by default as many as the loader has returned since the last step.

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
        shared = self._fetched > 0  # the samples come from the divided loader, so other workers have others
        size = self._fetched or self._usual if samples is None else samples
        self._usual, self._fetched = (self._fetched or self._usual), 0
        if self.orchestra.informs_servers:
            self._inform_servers()
        vars(self._inner)["_opt_called"] = True  # schedulers check it, even if only a server's optimizer steps
        loss = loss.detach() if isinstance(loss, Tensor) else loss
        size = size if self._usable() else 0
        grads = [] if shared or not size else [p.grad for p in self._replica.parameters if p.grad is not None]
        self.orchestra.before_step(grads, self.param_groups)
        self._driver.step(size, None if loss is None else float(loss))
        self._driver.runtime.node.clip = None
        return value

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Bound the norm of the gradient in the next `step`; return the norm of this worker's own gradient.

        `torch.nn.utils.clip_grad_norm_` clips this worker's gradient, before any mean. This method clips the gradient
        that the optimizer uses: the mean over the workers if the strategy averages gradients (all-reduce, most
        servers), as after DistributedDataParallel; each worker's own if every gradient is applied by itself. Call it
        after `backward` in every step, on every worker and with the same value: workers in lockstep compare it every
        10 steps, and servers of other strategies use that of worker 0.
        """
        runtime = self._driver.runtime
        problems = [
            *checks.check_norm("max_norm", max_norm),
            *checks.check_whole(runtime.spec.strategy, "max_norm", max_norm),
        ]
        if problems and max_norm != math.inf:  # infinity only returns the norm
            raise ConfigError(problems)
        runtime.node.clip = None if max_norm == math.inf else float(max_norm)
        norms = [torch.linalg.vector_norm(p.grad) for p in self._replica.parameters if p.grad is not None]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.tensor(0.0)

    def _usable(self) -> bool:
        """Unscale the gradients of a GradScaler; return whether there are gradients and it found no infinity."""
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

    def _inform_servers(self) -> None:
        """Send changed settings to the servers, whose own optimizers schedulers do not reach."""
        settings = self._settings()
        for name, values in settings.items():
            if values != self._known.get(name):
                self.orchestra.tell_settings(name, values)
        self._known = settings

    def _settings(self) -> dict[str, list[Any]]:
        """Return the numeric settings by group, such as learning rates and momenta, without entries of schedulers."""
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
        """Return all state besides the model's own state_dict, in torch's form, including state that servers hold.

        Any worker may call it alone, between two steps.
        """
        return self._saving.save()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned on this worker or on another; the model has its own state_dict.

        Every worker must call it. Servers then take the model of worker 0 at the next step. The state of a plain
        optimizer can be loaded as well.
        """
        self._saving.load(state_dict)


def _number(value: Any) -> Any:
    """Return a setting as a number or a list of numbers, for a control message; None for other values."""
    if isinstance(value, tuple | list):
        some = [_number(v) for v in value]
        return None if None in some else some
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else None
    return value if isinstance(value, int | float) else None
