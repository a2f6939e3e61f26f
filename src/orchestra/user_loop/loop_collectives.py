# SPDX-License-Identifier: Apache-2.0
"""Means by torch.distributed under a loop of one's own: for networks that are trusted, as in `train`.

Torch does not say whom it waited for. So before a mean, while it takes long, and when it breaks off, this process hears
what others said.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orchestra.errors import Stalled
from orchestra.user_loop.peers import Peers
from orchestra.worlds.sockets.messenger import Messenger
from orchestra.worlds.torch_collectives import TorchCollectives, tcp_store


class LoopCollectives(TorchCollectives):
    """Those of all workers, by Gloo."""

    def __init__(self, peers: Peers, messenger: Messenger, rank: int, workers: int, host: str, patience: float) -> None:
        self._peers = peers
        store = tcp_store(messenger, rank, workers, host, patience)
        cpu = torch.device("cpu")
        TorchCollectives.__init__(
            self, store, rank, workers, cpu, host=host, patience=patience, on_waiting=peers.listen
        )
        peers.hang_up = self.close

    def mean(self, x: Tensor, weight: float) -> tuple[Tensor, float]:
        """As ever, unless somebody is known not to take part."""
        self._peers.listen()
        try:
            return TorchCollectives.mean(self, x, weight)
        except Stalled:
            self._peers.listen(seconds=1.0)  # a connection that breaks tells who is lost, but not at once
            raise
