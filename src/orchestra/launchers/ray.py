# SPDX-License-Identifier: Apache-2.0
"""A run on a Ray cluster: an actor for each node, which starts the agent that ssh would start elsewhere.

    launcher ── actor ── orchestra.launchers.agent ── the process

Ray finds room for all nodes at once, or reports that there is none; everything else is as over ssh. The environment,
with the token in it, goes to the actor in a call, and from there through a pipe.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from queue import Empty
from typing import Any

from orchestra.engine.environment import STARTED_ON
from orchestra.errors import ClusterError, EnvironmentProblem
from orchestra.launchers.agent import check_machine
from orchestra.launchers.hosts import PORT, argv, place
from orchestra.launchers.preflight import agree
from orchestra.launchers.process_group import GRACE, SILENCE, AgentProcess, News, ProcessGroup

_CONNECT = 5.0  # seconds to connect to the cluster
_ROOM = 60.0  # seconds for Ray to find room
_ANSWER = 120.0  # seconds for an actor's first answer: it may have to start a process, which imports Ray
_SLICE = 1.0  # seconds that an actor waits for news


class NodeActor:
    """An actor on a machine of the cluster: starts one process, passes on messages to it and its output."""

    def __init__(self) -> None:
        self._news = News()
        self._agent: AgentProcess | None = None

    def check_machine(self, orders: Mapping[str, Any]) -> dict[str, Any]:
        """Report this machine's versions, and what it lacks."""
        import ray

        address = ray.util.get_node_ip_address()
        node = ray.get_runtime_context().get_node_id()
        return {"node": node, "address": address, **check_machine({"master": address, **orders})}

    def start(self, rank: int, orders: Mapping[str, Any]) -> None:
        """Start the process, with this machine's own Python."""
        whole = {**orders, "argv": argv(orders["command"], sys.executable)}
        # An actor that ends kills its children at once. Its grandchild, the agent, only sees its input close.
        agent = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-P", "-m", "orchestra.launchers.agent"]
        self._agent = AgentProcess(rank, agent, json.dumps(whole), self._news)

    def send(self, message: str) -> None:
        """Send a line to the agent."""
        assert self._agent is not None
        self._agent.send(message)

    def news(self) -> list[Any]:
        """Return all news; if there is none, wait for the next."""
        found = []
        with contextlib.suppress(Empty):
            found.append(self._news.get(timeout=_SLICE))
            while True:
                found.append(self._news.get_nowait())
        return found


class _ActorLink:
    """Connection to one process through its actor."""

    def __init__(self, rank: int, actor: Any, orders: Mapping[str, Any], news: News) -> None:
        self._rank, self._actor, self._news = rank, actor, news
        actor.start.remote(rank, orders)
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, message: str) -> None:
        """Send a line to the agent."""
        self._actor.send.remote(message)

    def close(self) -> None:
        """End the actor: the agent's input closes with it."""
        import ray

        ray.kill(self._actor)

    def _listen(self) -> None:
        import ray

        try:
            while True:
                for item in ray.get(self._actor.news.remote()):
                    self._news.put(item)
                    if item[1][0] == "end":
                        return
        except ray.exceptions.RayError as error:
            self._news.put((self._rank, ("err", f"{str(error).splitlines()[0]}\n".encode())))
            self._news.put((self._rank, ("end", 255)))


def launch(command: Sequence[str], size: int, token: str, *, address: str = "auto", gpus: int = 0) -> int:
    """Carry out a command as `size` nodes of one run; return its exit code."""
    try:
        import ray
    except ImportError:
        raise EnvironmentProblem("ray is not installed: pip install 'neural-orchestra[ray]'") from None
    try:
        _connect(address)
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
    except (OSError, ray.exceptions.RayError) as error:
        why = str(error).strip().splitlines()[0]
        raise ClusterError(
            f"there is no Ray cluster at {address!r} ({why}). Start one with `ray start --head`, and `ray start "
            "--address HOST:6379` on the other machines; or give --ray-address."
        ) from None
    try:
        again = shlex.join(["--on", "ray", *(["--ray-address", address] if address != "auto" else [])])
        return _run(command, token, _actors(size, gpus), again)
    except ray.exceptions.RayError as error:
        raise ClusterError(
            f"the Ray cluster cannot carry the run: {str(error).strip().splitlines()[-1]}. This package must be "
            "installed on all of its machines."
        ) from None
    finally:
        ray.shutdown()  # and with it the actors


def _connect(address: str) -> None:
    """Raise OSError if nothing listens at the address: Ray itself would wait for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), _CONNECT).close()


def _actors(size: int, gpus: int) -> list[Any]:
    """Start an actor for each node, on as many machines as there are; all or none."""
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    need = {"CPU": 1} | ({"GPU": gpus} if gpus else {})
    room = placement_group([need] * size, strategy="SPREAD")
    if not room.wait(_ROOM):
        free = {name: f"{ray.available_resources().get(name, 0):g}" for name in need}
        raise ClusterError(
            f"the Ray cluster found no room for {size} nodes with {need} each within {_ROOM:.0f} s; {free} are free. "
            "Ask for fewer --workers, or add machines."
        )
    return [
        ray.remote(NodeActor)
        .options(
            num_cpus=1,
            num_gpus=gpus,
            max_concurrency=4,  # it receives messages while it waits for news
            scheduling_strategy=PlacementGroupSchedulingStrategy(room, placement_group_bundle_index=i),
        )
        .remote()
        for i in range(size)
    ]


def _run(command: Sequence[str], token: str, actors: Sequence[Any], again: str) -> int:
    import ray

    asked = {"cwd": os.getcwd(), "port": PORT, "any_port": True, "first": False}
    answers = ray.get([actor.check_machine.remote(asked) for actor in actors], timeout=_ANSWER)
    machines = list(dict.fromkeys(answer["node"] for answer in answers))
    # Nodes of one machine have ranks in a row, as torchrun has it.
    order = sorted(range(len(actors)), key=lambda i: machines.index(answers[i]["node"]))
    actors, answers = [actors[i] for i in order], [answers[i] for i in order]
    answers[0] = ray.get(actors[0].check_machine.remote(asked | {"first": True}), timeout=_ANSWER)
    first = agree([(answer["address"], answer) for answer in answers])[0]
    mark, news, links = secrets.token_hex(8), News(), {}
    for rank, (actor, answer) in enumerate(zip(actors, answers, strict=True)):
        mates = [k for k in range(len(actors)) if answers[k]["node"] == answer["node"]]
        found = place(rank, len(actors), mates.index(rank), len(mates), first["address"], first["port"])
        orders = {
            "do": "run",
            "command": list(command),
            "cwd": asked["cwd"],
            "environment": found | {"ORCHESTRA_TOKEN": token, STARTED_ON: again},
            "mark": f"{mark}:{rank}.",
            "silence": SILENCE,
            "grace": GRACE,
        }
        links[rank] = _ActorLink(rank, actor, orders, news)
    return ProcessGroup([answer["address"] for answer in answers], news).run(links)
