# SPDX-License-Identifier: Apache-2.0
"""The handle of a loop: this process's rank, its scores and means, and its end together with the other processes."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from orchestra.core.comm import Comm
from orchestra.core.ops import Message, Recv, ReservedTag
from orchestra.engine import checkpoint, node_loop, snapshot
from orchestra.errors import ClusterError, ConfigError, EnvironmentProblem, OrchestraError, RunFolderGone
from orchestra.formatting import plural
from orchestra.model.replica import persistent_buffers
from orchestra.runs import run_lock
from orchestra.runs.events import EventLog
from orchestra.runs.facts import facts_of
from orchestra.user_loop import final_model
from orchestra.user_loop.comparisons import WorkerReport
from orchestra.user_loop.earlier_calls import EARLIER
from orchestra.user_loop.exit_hooks import Exit
from orchestra.user_loop.loader import Loader
from orchestra.user_loop.outcome import LoopOutcome
from orchestra.user_loop.peers import Peers
from orchestra.user_loop.run_folder import LoopRunFolder
from orchestra.user_loop.scores import LoopScores, figures
from orchestra.user_loop.step_driver import StepDriver

CLIP = "clip_grad_norm_"  # setting of servers: the largest norm of the mean, or False
PIECE = 1 << 20  # bytes of frozen parameters per message


class LoopHandle:
    """The attribute `orchestra` of a prepared optimizer: this process's part in the run."""

    def __init__(
        self, driver: StepDriver, peers: Peers, folder: LoopRunFolder, module: nn.Module, loader: Loader | None
    ) -> None:
        self._driver, self._peers, self._folder = driver, peers, folder
        self._module, self._loader = module, loader
        self._runtime, self._node = driver.runtime, driver.runtime.node
        peers.shares_loader = loader is not None
        if self._runtime.spec.workers + self._runtime.spec.servers > 1:
            EARLIER.begin(self._runtime.spec.strategy)
        self.hooks: list[RemovableHandle] = []  # on the model
        self.loaded = False  # whether the loop continues from a saved state
        self._report = WorkerReport(peers.send_to_coordinator) if self.workers > 1 else None
        self._scores = LoopScores(peers, folder.path, self.rank)
        self._ended: float | None = None  # when this worker's training did
        self._complete = False  # whether `finish` has returned
        self._exit = Exit(peers, self.finish, self._how_far, self._loop_failed)

    @property
    def peers(self) -> Peers:
        """The control messages of the other processes."""
        return self._peers

    @property
    def rank(self) -> int:
        """The rank of this worker."""
        return self._node.rank

    @property
    def workers(self) -> int:
        """The number of workers."""
        return self._runtime.spec.workers

    @property
    def is_coordinator(self) -> bool:
        """Whether this is worker 0, which prints and saves for all."""
        return self.rank == 0

    @property
    def steps(self) -> int:
        """The number of this worker's steps so far."""
        return self._node.steps

    @property
    def samples(self) -> int:
        """The number of this worker's samples so far."""
        return self._node.samples

    def log(self, name: str, value: float) -> None:
        """Log a number under a name in the run folder, if there is one."""
        self._node.log(name, value)

    def score(self, **given: Tensor | float) -> None:
        """Give the model a score, such as `accuracy=0.9`: for the run folder, if there is one, and `orchestra compare`.

        Every worker may call it, at the same places of the loop, or worker 0 alone; scores of several workers are
        averaged, and no worker waits for another. The time of computing it counts as training. After `finish`, when all
        workers have one model, only the score of worker 0 counts.
        """
        metrics = figures(given)
        if self._ended is not None and not self.is_coordinator:
            return
        now = self._node.now() if self._ended is None else self._ended
        self._scores.give(now, self.steps, self.samples * self.workers, metrics)
        if self._ended is not None and self._folder.path is not None:
            self._scores.write()
            self._sum_up()

    def mean(self, value: Tensor | float, *, weight: float = 1.0) -> float:
        """Return the weighted mean of a number over the workers. All must call it, at the same place of the loop."""
        if self._driver.over:
            raise OrchestraError(
                "optimizer.finish() has already ended the connections between the workers. Take means before it."
            )
        mean = torch.as_tensor(value, dtype=torch.float64).detach().reshape(1).cpu().clone()
        traffic = self._runtime.meter.traffic
        sent, received = traffic.sent, traffic.received
        total = self._node.comm.mean_(mean, weight=weight)
        traffic.sent, traffic.received = sent, received  # this mean is not part of the strategy's traffic
        return float(mean) if total else math.nan

    @property
    def informs_servers(self) -> bool:
        """Whether there are servers, and this worker is the one that sends them changes of schedules."""
        return self.is_coordinator and bool(self._node.comm.servers.members)

    def tell_settings(self, name: str, values: list[Any]) -> None:
        """Send new values of a setting, such as the learning rate, of every group to the servers."""
        self._peers.tell_settings(self._node.comm.servers.members, name, values)

    def before_step(self, gradients: Sequence[Tensor], groups: Sequence[Mapping[str, Any]]) -> None:
        """Announce the step to the others, and send gradient checksums and rates to worker 0."""
        self._peers.messenger.stepped(self.steps + 1)
        if self._report is not None and not self._driver.over:
            rates = [float(group["lr"]) for group in groups] if self._runtime.lockstep else []
            self._report.before_step(self.steps + 1, gradients, rates, self._node.clip or math.inf)

    def position(self) -> list[int] | None:
        """Return the position of the loader: an epoch, and the batches taken of it."""
        return None if self._loader is None else [self._loader.epoch, self._loader.taken]

    def seek(self, position: list[int] | None) -> None:
        """Set the position of the loader."""
        if self._loader is not None and position is not None:
            self._loader.seek(*position)

    # The end.

    def outcome(self) -> LoopOutcome | None:
        """Return what this worker knows of the run; None before its end."""
        if not self._complete or (ended := self._ended) is None:
            return None
        return LoopOutcome.of(self._runtime, ended, self._scores.last, self._folder.path)

    def _how_far(self) -> str:
        """Return how far an interrupted loop got, and how to continue it."""
        kept = "" if self._folder.path is None else f" Its events are in {self._folder.path}."
        return (
            f"after {plural(self.steps, 'step')}. A loop continues from what it saved itself, model.state_dict() and "
            f"optimizer.state_dict(): nothing else was saved.{kept}"
        )

    def _loop_failed(self, error: BaseException) -> None:
        """Write the events and the error to the run folder."""
        with contextlib.suppress(OSError):
            if isinstance(self._runtime.log, EventLog):
                self._runtime.log.flush()
        self._folder.leave(error)

    def finish(self, also: Iterable[nn.Module | Tensor] = ()) -> None:
        """End together with the others, with one model and one of each of `also`; a second call does nothing."""
        if self._driver.over:
            return
        also = list(also)
        extra, statistics = final_model.named(also), final_model.running(also)
        self._driver.rest()
        runtime, node, left = self._runtime, self._node, None if self._loader is None else self._loader.left
        if runtime.lockstep:
            if self._report is not None:
                self._report.at_end(node.steps)
            self._peers.finish(node.steps, left)
            self._require_steps()
            self._driver.finish()
        else:
            self._driver.finish()
            self._peers.finish(node.steps, left)
            self._require_steps()
        node_loop.end(runtime)
        self._ended = node.now()
        if isinstance(runtime.log, EventLog):
            runtime.log.flush()
        self._folder.deliver()
        self._receive_model()
        if runtime.layout.model_location == "apart":
            average_(node.comm, [node.x])
        self._average_buffers(persistent_buffers(self._module).values())
        self._average_also(extra, statistics)
        self._require_one_model()
        if self.is_coordinator and isinstance(runtime.log, EventLog):
            self._conclude()
        self._folder.close()
        self._part_from_script()
        self._peers.part()
        EARLIER.finish(runtime.spec.strategy)
        self._complete = True

    def _require_steps(self) -> None:
        """Raise if no worker did a step, so that the strategy trained nothing.

        A loop that loaded a state may have no step left to do.
        """
        if not (self.loaded or self._peers.any_steps):
            message = (
                "optimizer.finish() was called after 0 steps, so nothing was trained together with the other workers. "
                "Call optimizer.step() after every backward pass: it is what changes the parameters."
            )
            self._fail(OrchestraError(message))

    def _average_buffers(self, buffers: Iterable[Tensor], most: int | None = None) -> None:
        left_out = average_buffers_(self._node.comm, buffers, self._node.samples, most=most)
        if left_out and self.is_coordinator:
            self._peers.warn(final_model.about_left_out(left_out))

    def _average_also(self, extra: Mapping[str, Tensor], statistics: Sequence[Tensor]) -> None:
        """Average the user's other tensors, weighted like the model; copy whole numbers from worker 0."""
        comm, most = self._node.comm, self._node.x.numel()
        if (problem := final_model.other_layout(comm, extra)) is not None:
            self._fail(ConfigError([problem]))
        seen = set(map(id, statistics))
        average_(comm, [t for t in extra.values() if t.is_floating_point() and id(t) not in seen], most=most)
        if statistics:
            self._average_buffers(statistics, most)
        whole = [t for t in extra.values() if not t.is_floating_point()]
        _together(whole, torch.int64, _in_pieces(comm.broadcast_, most))

    def _require_one_model(self) -> None:
        differing = final_model.differing(self._node.comm, dict(self._module.named_parameters()))
        if differing is not None:
            message = (
                f"the workers do not have one model in the end: {differing}. Let only optimizer.step() change what is "
                "trained, or change it alike in every process. Give what the loop updates by itself, such as a teacher "
                "or a moving average, to optimizer.finish(also=[...]), which takes the mean over the workers."
            )
            self._fail(ClusterError(message))

    def _fail(self, error: OrchestraError) -> NoReturn:
        """Raise an error that every worker finds by itself, after ending the run."""
        self._driver.over = True
        self._peers.give_up(str(error), error.exit_code)
        self._loop_failed(error)
        self._part_from_script()
        raise error

    def _part_from_script(self) -> None:
        """Leave the model and the interpreter as they were before `prepare`."""
        for hook in self.hooks:
            hook.remove()
        self._exit.close()

    def _receive_model(self) -> None:
        """Receive the final model from the servers, if they have it, after all workers have left."""
        node = self._node
        for server, part in zip(node.comm.servers.members, node.placement, strict=True):
            while True:
                came = node.comm.transport.start(Recv(server, node.comm.workers)).wait()
                if not isinstance(came, Message):
                    raise ClusterError(f"node {server} ended without giving its part of the model")
                if came.tag == ReservedTag.FINAL:
                    break
            if self._runtime.layout.model_location == "servers":
                node.x[part].copy_(came.x)

    def _conclude(self) -> None:
        """Write the same files to the run folder as `train` does."""
        self._folder.collect()
        folder = self._runtime.spec.run
        if run_lock.is_gone(folder):
            raise RunFolderGone(folder)
        snapshot.export_or_rescue(self._module, folder, self._runtime.spec.launch)

        def write() -> None:
            ending = {"stopped_by": "loop", "warnings": self._peers.warnings}
            checkpoint.write_text(folder / "ending.json", json.dumps(ending, indent=1))
            self._scores.write()
            facts = facts_of(folder)
            if facts.warning is not None and facts.warning not in self._peers.warnings:
                self._peers.warn(facts.warning)
                checkpoint.write_text(folder / "ending.json", json.dumps(ending, indent=1))
            self._sum_up()

        try:
            snapshot.trying_again(write)
        except OSError as error:
            if not snapshot.is_full(error):
                raise
            whole = f"The trained model is whole: {folder / snapshot.MODEL}."
            raise EnvironmentProblem(f"the disk of {folder} is full: {error.strerror}. {whole}") from None

    def _sum_up(self) -> None:
        folder = self._runtime.spec.run
        checkpoint.write_text(folder / "summary.json", json.dumps(facts_of(folder).as_dict(), indent=1))


@torch.no_grad()
def _together(tensors: Sequence[Tensor], dtype: torch.dtype, do: Callable[[Tensor], object]) -> None:
    """Apply a function to tensors as one vector of a wide dtype."""
    if tensors:
        vector = torch.cat([t.detach().reshape(-1).to("cpu", dtype) for t in tensors])
        do(vector)
        for t, part in zip(tensors, torch.split_with_sizes(vector, [t.numel() for t in tensors]), strict=True):
            t.copy_(part.view(t.shape))


def _in_pieces(do: Callable[[Tensor], object], most: int) -> Callable[[Tensor], None]:
    """Return a function that applies `do` to pieces of a vector, at most `most` numbers at a time."""

    def each(vector: Tensor) -> None:
        for piece in torch.split(vector, most):
            do(piece)

    return each


def average_(comm: Comm, tensors: Sequence[Tensor], *, most: int | None = None) -> None:
    """Average each tensor over the workers, in double precision, at most `most` numbers at a time.

    Equal values stay exactly as they are.
    """
    _together(tensors, torch.float64, comm.mean_ if most is None else _in_pieces(comm.mean_, most))


def average_buffers_(comm: Comm, buffers: Iterable[Tensor], seen: int, *, most: int | None = None) -> list[int]:
    """Average over the workers, weighted by samples seen; copy whole numbers from the first worker with samples.

    Return the workers that were left out because they have more non-finite numbers than others.
    """
    floats, wholes = _by_kind(buffers)
    bad = sum(int((~t.isfinite()).sum()) for t in floats)
    rows = [row.tolist() for row in comm.gather(torch.tensor([seen, bad], dtype=torch.float64))]
    least = min(row[1] for row in rows if row[0] or not any(row[0] for row in rows))
    counts = [int(samples) if not_finite <= least else 0 for samples, not_finite in rows]
    weight = float(counts[comm.rank]) if any(counts) else 1.0

    def mean_(vector: Tensor) -> None:
        mean = comm.mean(vector, weight=weight)
        vector.copy_(torch.where(mean.isnan() & vector.isinf(), vector, mean))  # a mask's −inf is its own mean
        comm.broadcast_(vector)  # so that all workers end with the same values

    _together(floats, torch.float64, mean_ if most is None else _in_pieces(mean_, most))
    first = next((rank for rank, count in enumerate(counts) if count), 0)
    _together(wholes, torch.int64, partial(comm.broadcast_, root=first))
    return [rank for rank, (samples, _) in enumerate(rows) if samples and not counts[rank]]


@torch.no_grad()
def spread_frozen_(comm: Comm, tensors: Sequence[Tensor]) -> None:
    """Broadcast frozen parameters of worker 0 as bytes, in pieces: they may be much larger than the trained ones."""
    for t in tensors:
        whole = t.detach().reshape(-1).view(torch.uint8)
        for piece in torch.split(whole, PIECE):
            comm.broadcast_(piece)
        first = whole.view(t.dtype).view(t.shape)
        if not torch.equal(t, first):  # an expanded tensor cannot be written, and is equal
            t.copy_(first)


def spread_(comm: Comm, tensors: Sequence[Tensor]) -> None:
    """Broadcast tensors of worker 0."""
    floats, wholes = _by_kind(tensors)
    _together(floats, torch.float64, comm.broadcast_)
    _together(wholes, torch.int64, comm.broadcast_)


def _by_kind(tensors: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return floating-point tensors, and the others."""
    found = list(tensors)
    return [t for t in found if t.is_floating_point()], [t for t in found if not t.is_floating_point()]
