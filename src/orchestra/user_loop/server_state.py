# SPDX-License-Identifier: Apache-2.0
"""Saving and loading of the optimizer's state that servers hold, in torch's form.

    a worker between two steps                      a server between two messages of the strategy
    state_dict:        "send-state"          →      answers with x and the state of its range
    load_state_dict, before the next step:
                       "load-state"          →      waits for it from every worker, then
    worker 0:          x and the state       →      takes its range of both, and begins again from there
                                             ←      "state-loaded", to every worker

Only the worker that asks for the state takes part in `state_dict`; the other workers continue. Requests are control
messages and answers are pieces, so neither mixes with the messages of the strategy. A server answers when it has
processed all earlier messages of the worker. A server holds its range as one flat vector, or as pieces of layers: see
`orchestra.model.param_groups`.

The loaded x is that of worker 0 at the next step. If that equals the worker's x when the state was saved, it is instead
the servers' x of that time, which may be newer; the worker's x is a copy of it in every strategy but EASGD.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from orchestra.engine import checkpoint
from orchestra.engine.node_loop import NodeRuntime
from orchestra.engine.spec import RunSpec
from orchestra.errors import CheckpointError
from orchestra.model import param_groups
from orchestra.user_loop.peers import Peers
from orchestra.worlds.sockets.messenger import Messenger
from orchestra.worlds.sockets.wire import body_of

SEND, LOAD, LOADED = "send-state", "load-state", "state-loaded"  # kinds of control messages
_PIECE = 1 << 20  # maximum bytes of a state per message
_PER_PARAMETER = ("step", "eta", "mu", "mu_product")  # entries that torch's element-wise optimizers keep per parameter

States = list[dict[str, Any]]  # by layer, or by piece of a layer


# Splitting and joining.


def joined(spec: RunSpec, found: Sequence[States]) -> States:
    """Return the state of every layer, from the servers' states of their ranges."""
    states: States = [{} for _ in spec.layers]
    pieces: dict[tuple[int, str], list[Tensor]] = {}
    for part, kept in zip(spec.placement, found, strict=True):
        for (layer, _, as_is), state in zip(_pieces(spec, part), kept, strict=True):
            for name, value in state.items():
                if not isinstance(value, Tensor) or name in _PER_PARAMETER or as_is:
                    states[layer][name] = value.clone() if isinstance(value, Tensor) else value
                else:
                    pieces.setdefault((layer, name), []).append(value)
    for (layer, name), parts in pieces.items():
        states[layer][name] = torch.cat(parts).view(spec.layers[layer])
    return states


def cut(spec: RunSpec, states: States) -> list[States]:
    """Return each server's part of a state by layer."""

    def of(layer: int, piece: slice, as_is: bool) -> dict[str, Any]:
        return {
            name: value
            if as_is or name in _PER_PARAMETER or not isinstance(value, Tensor)
            else value.reshape(-1)[piece].clone()
            for name, value in states[layer].items()
        }

    return [[of(*piece) for piece in _pieces(spec, part)] for part in spec.placement]


def _pieces(spec: RunSpec, part: slice) -> Iterator[tuple[int, slice, bool]]:
    """Yield the layers of a server's range: their numbers, the pieces, and whether a piece keeps the layer's shape."""
    starts = [0, *accumulate(map(math.prod, spec.layers))]
    for layer, piece, whole in param_groups.cut(spec.layers, part):
        if spec.layerwise or piece.start < piece.stop:
            yield layer, slice(piece.start - starts[layer], piece.stop - starts[layer]), whole and spec.layerwise


# Sending and receiving.


def _give(messenger: Messenger, to: int, tree: Any) -> None:
    """Send a tree of tensors and plain values, apart from the messages of the strategy."""
    tensors: dict[str, Tensor] = {}
    structure = json.dumps(checkpoint.outline(tree, tensors))
    whole = torch.frombuffer(bytearray(save(tensors, {"tree": structure})), dtype=torch.uint8)
    for piece in torch.split(whole, min(_PIECE, messenger.largest)):
        messenger.send_piece(to, piece, float(len(whole))).wait()


def _take(messenger: Messenger, source: int) -> Any:
    """Receive a tree that `_give` sent."""
    first = messenger.receive_piece(source)
    found, missing = [first.x], int(first.weight) - len(first.x)
    while missing > 0:
        found.append(messenger.receive_piece(source).x)
        missing -= len(found[-1])
    data = bytes(torch.cat(found).numpy().data)
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return checkpoint.fill(json.loads(header["__metadata__"]["tree"]), load(data))
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"the state that node {source} sent cannot be read: {error}.") from None


def _begin_again(runtime: NodeRuntime) -> None:
    """Restart the strategy at the present x: versions, clocks and held gradients are reset."""
    spec, node, state = runtime.spec, runtime.node, runtime.state
    strategy, inner = spec.strategy.phase(state)
    tensors: dict[str, Tensor] = {}
    structure = checkpoint.outline(strategy.init(node), tensors)
    checkpoint.restore_into(inner, checkpoint.fill(structure, tensors))
    node.adopt(spec.strategy, state)


class OnServer:
    """The server's side, which handles requests between two messages of the strategy."""

    def __init__(self, runtime: NodeRuntime, peers: Peers) -> None:
        self._runtime, self._node, self._peers, self._messenger = runtime, runtime.node, peers, peers.messenger

    def on_idle(self, *, at_rest: bool) -> None:
        """Handle requests before this server sleeps because there is no message."""
        self.settle()

    def settle(self) -> None:
        """Answer requests for the state, and load a state once every worker has requested it."""
        asked = self._peers.about_state
        if not asked:
            return
        for worker, kind in [*asked]:
            if kind == SEND and not self._messenger.has_mail(worker):
                asked.remove((worker, kind))
                _give(self._messenger, worker, {"states": self._node.optimizer.by_layer(), "x": self._node.x})
        workers = self._node.comm.workers.members
        if {(worker, LOAD) for worker in workers} <= {*asked} and not self._messenger.has_mail():
            for worker in workers:
                asked.remove((worker, LOAD))
            self._load(workers)

    def _load(self, workers: Sequence[int]) -> None:
        node, tree = self._node, _take(self._messenger, workers[0])
        node.x.copy_(tree["x"])
        if tree["states"] is not None:
            node.optimizer.restore_by_layer(tree["states"], tree["pace"])
        _begin_again(self._runtime)
        for worker in workers:
            self._messenger.send_control(worker, {"kind": LOADED})


@dataclass(frozen=True)
class StateToLoad:
    """A state for the servers to load. `x`: the servers' at the save; `digest`: that of the worker's x at the save."""

    states: States | None
    pace: dict[str, Any]
    x: Tensor | None = None
    digest: str = ""


def digest(x: Tensor) -> str:
    """Return a hash of the values of a vector."""
    return hashlib.sha256(body_of(x.cpu().contiguous())).hexdigest()


class OnWorker:
    """The worker's side, which asks the servers for the state, and lets them load another."""

    def __init__(self, runtime: NodeRuntime, peers: Peers) -> None:
        self._runtime, self._node, self._peers, self._messenger = runtime, runtime.node, peers, peers.messenger
        self.loading: StateToLoad | None = None  # until the next step
        self._loads = 0

    def ask(self) -> tuple[States, Tensor]:
        """Return the state of every layer, and x, as the servers have them now."""
        servers = self._node.comm.servers.members
        for server in servers:
            self._messenger.send_control(server, {"kind": SEND})
        found = [_take(self._messenger, server) for server in servers]
        states, x = (
            joined(self._runtime.spec, [each["states"] for each in found]),
            torch.cat([each["x"] for each in found]),
        )
        if self.loading is None:
            return states, x
        return self.loading.states or states, x if self.loading.x is None else self.loading.x

    def settle(self) -> None:
        """Load a pending state before a step. Every worker calls this."""
        if self.loading is None:
            return
        to, self.loading = self.loading, None
        node, servers = self._node, self._node.comm.servers.members
        x = node.x
        if to.x is not None and digest(x) == to.digest:
            x = to.x
            if self._runtime.layout.optimizer_at == "servers":
                node.x.copy_(x)
        for server in servers:
            self._messenger.send_control(server, {"kind": LOAD})
        if node.rank == node.comm.workers.members[0]:
            parts = [None] * len(servers) if to.states is None else cut(self._runtime.spec, to.states)
            for server, part, piece in zip(servers, parts, node.parts(x), strict=True):
                _give(self._messenger, server, {"x": piece.clone(), "states": part, "pace": to.pace})
        self._loads += 1
        expected = [(server, LOADED) for server in servers for _ in range(self._loads)]
        self._messenger.wait_until(
            lambda: sorted(self._peers.about_state) == expected,
            lambda: "the servers to load a state, which they do when every worker has called optimizer.load_state_dict",
        )
        _begin_again(self._runtime)
