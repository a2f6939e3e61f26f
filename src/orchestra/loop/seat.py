# SPDX-License-Identifier: Apache-2.0
"""This process among the others: who it is, what it tells them, how it ends together with them."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from orchestra import checkpoint, run, snapshot
from orchestra.errors import ClusterError, OrchestraError
from orchestra.events import EventLog
from orchestra.loop.company import Company
from orchestra.loop.folder import Folder
from orchestra.loop.leaving import Exit
from orchestra.loop.loader import Loader
from orchestra.loop.player import Player
from orchestra.node import Comm
from orchestra.ops import Message, Recv
from orchestra.replica import persistent_buffers
from orchestra.report.facts import facts_of
from orchestra.words import plural

FINAL = 0xFFFE  # the tag of a server's last message
PIECE = 1 << 20  # bytes of what is never trained that are sent at a time


class Seat:
    """This process among the others."""

    def __init__(
        self, player: Player, company: Company, folder: Folder, module: nn.Module, loader: Loader | None
    ) -> None:
        self._player, self._company, self._folder = player, company, folder
        self._module, self._loader = module, loader
        self._life, self._node = player.life, player.life.node
        self.hook: RemovableHandle | None = None  # on the model
        self.warnings: list[str] = []  # for the run folder
        self._exit = Exit(company, self.finish, self._how_far, self._broken_off)

    @property
    def rank(self) -> int:
        """Which worker this is."""
        return self._node.rank

    @property
    def workers(self) -> int:
        """How many there are."""
        return self._life.job.workers

    @property
    def is_home(self) -> bool:
        """Whether this is worker 0, who prints and saves for all."""
        return self.rank == 0

    @property
    def steps(self) -> int:
        """This worker's steps so far."""
        return self._node.steps

    @property
    def samples(self) -> int:
        """This worker's samples so far."""
        return self._node.samples

    def log(self, name: str, value: float) -> None:
        """Put a figure into the run folder, if there is one."""
        self._node.log(name, value)

    def mean(self, value: Tensor | float, *, weight: float = 1.0) -> float:
        """The weighted mean of a number over the workers. All must ask, at the same place of the loop."""
        if self._player.over:
            raise OrchestraError(
                "the workers have parted since optimizer.finish(), with one and the same model. Take means before it."
            )
        mean = torch.as_tensor(value, dtype=torch.float64).detach().reshape(1).cpu().clone()
        traffic = self._life.meter.traffic
        sent, received = traffic.sent, traffic.received
        total = self._node.comm.mean_(mean, weight=weight)
        traffic.sent, traffic.received = sent, received  # what is asked out of curiosity is not the strategy's cost
        return float(mean) if total else math.nan

    @property
    def tells_servers(self) -> bool:
        """Whether there are servers, and this is who tells them what schedules say."""
        return self.is_home and bool(self._node.comm.servers.members)

    def tell_settings(self, name: str, values: list[Any]) -> None:
        """A schedule says something new of every group, such as learning rates: let the servers know."""
        self._company.tell_settings(self._node.comm.servers.members, name, values)

    def position(self) -> list[int] | None:
        """Where the loader is: an epoch, and the batches taken of it."""
        return None if self._loader is None else [self._loader.epoch, self._loader.taken]

    def seek(self, position: list[int] | None) -> None:
        """Go there."""
        if self._loader is not None and position is not None:
            self._loader.seek(*position)

    # The end.

    def _how_far(self) -> str:
        """What is left of a loop that is broken off: nothing but what it has saved itself."""
        kept = "" if self._folder.path is None else f" What happened is in {self._folder.path}."
        return (
            f"after {plural(self.steps, 'step')}. A loop goes on from what it saved itself, model.state_dict() and "
            f"optimizer.state_dict(): nothing else was saved.{kept}"
        )

    def _broken_off(self, error: BaseException) -> None:
        """Keep what happened, and why it went no farther."""
        with contextlib.suppress(OSError):
            if isinstance(self._life.log, EventLog):
                self._life.log.flush()
        self._folder.leave(error)

    def finish(self) -> None:
        """End together with the others, with one model; twice is once."""
        if self._player.over:
            return
        self._player.rest()
        life, node, left = self._life, self._node, None if self._loader is None else self._loader.left
        if life.in_step:
            self._company.finish(node.steps, left)
            self._player.finish()
        else:
            self._player.finish()
            self._company.finish(node.steps, left)
        run.end(life)
        if isinstance(life.log, EventLog):
            life.log.flush()
        self._folder.deliver()
        self._receive_model()
        if life.where == "apart":
            average_(node.comm, [node.x])
        average_(node.comm, [b for b in persistent_buffers(self._module).values() if b.is_floating_point()])
        if self.is_home and isinstance(life.log, EventLog):
            self._conclude()
        self._folder.close()
        if self.hook is not None:
            self.hook.remove()
        self._exit.close()
        self._company.part()

    def _receive_model(self) -> None:
        """From the servers, if they have it: all workers have left, so it changes no more."""
        node = self._node
        for server, part in zip(node.comm.servers.members, node.placement, strict=True):
            while True:
                came = node.comm.transport.start(Recv(server, node.comm.workers)).wait()
                if not isinstance(came, Message):
                    raise ClusterError(f"node {server} ended without giving its part of the model")
                if came.tag == FINAL:
                    break
            if self._life.where == "servers":
                node.x[part].copy_(came.x)

    def _conclude(self) -> None:
        """What `train` leaves in a run folder."""
        self._folder.collect()
        folder = self._life.job.run
        snapshot.export(self._module, folder / "model.safetensors")
        ending = {"stopped_by": "loop", "warnings": self.warnings}
        checkpoint.write_text(folder / "ending.json", json.dumps(ending, indent=1))
        facts = facts_of(folder)
        checkpoint.write_text(folder / "summary.json", json.dumps(facts.as_dict(), indent=1))


@torch.no_grad()
def _together(tensors: Sequence[Tensor], dtype: torch.dtype, do: Callable[[Tensor], object]) -> None:
    """Do something to tensors as one vector of a wide dtype."""
    if tensors:
        vector = torch.cat([t.detach().reshape(-1).to(dtype) for t in tensors])
        do(vector)
        for t, part in zip(tensors, torch.split_with_sizes(vector, [t.numel() for t in tensors]), strict=True):
            t.copy_(part.view(t.shape))


def average_(comm: Comm, tensors: Sequence[Tensor]) -> None:
    """The mean of each over the workers, in double precision: what is equal everywhere stays as it is."""
    _together(tensors, torch.float64, comm.mean_)


@torch.no_grad()
def spread_frozen_(comm: Comm, tensors: Sequence[Tensor]) -> None:
    """What worker 0 has, to all, byte by byte and a piece at a time: there may be much more of it than is trained."""
    for t in tensors:
        whole = t.detach().reshape(-1).view(torch.uint8)
        for piece in torch.split(whole, PIECE):
            comm.broadcast_(piece)
        first = whole.view(t.dtype).view(t.shape)
        if not torch.equal(t, first):  # elements of one that was expanded share their memory, and cannot be written
            t.copy_(first)


def spread_(comm: Comm, tensors: Sequence[Tensor]) -> None:
    """What worker 0 has, to all."""
    whole = [t for t in tensors if not t.is_floating_point()]
    _together([t for t in tensors if t.is_floating_point()], torch.float64, comm.broadcast_)
    _together(whole, torch.int64, comm.broadcast_)
