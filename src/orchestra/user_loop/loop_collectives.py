# SPDX-License-Identifier: Apache-2.0
"""All-reduce by torch.distributed under the user's own loop: for trusted networks, as in `train`.

Torch does not report which process is missing. So before a mean, while it takes long, and when it fails, this process
handles the control messages of the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orchestra.errors import Stalled
from orchestra.user_loop.peers import Peers
from orchestra.worlds.sockets.messenger import Messenger
from orchestra.worlds.torch_collectives import TorchCollectives, tcp_store


class LoopCollectives(TorchCollectives):
    """Weighted means over all workers by Gloo, with control messages of the loop."""

    def __init__(self, peers: Peers, messenger: Messenger, rank: int, workers: int, host: str, patience: float) -> None:
        self._peers = peers
        store = tcp_store(messenger, rank, workers, host, patience)
        cpu = torch.device("cpu")
        TorchCollectives.__init__(
            self, store, rank, workers, cpu, host=host, patience=patience, on_waiting=peers.listen
        )
        peers.hang_up = self.close

    def mean(self, x: Tensor, weight: float) -> tuple[Tensor, float]:
        """Return the mean as `TorchCollectives.mean` does, or raise if another process has ended."""
        self._peers.listen()
        try:
            return TorchCollectives.mean(self, x, weight)
        except Stalled:
            self._peers.listen(seconds=1.0)  # a broken connection shows which process is lost, but not at once
            raise
