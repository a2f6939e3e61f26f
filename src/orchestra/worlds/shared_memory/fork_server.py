# SPDX-License-Identifier: Apache-2.0
"""The fork server: a process with torch imported, from which nodes are forked, so that a run starts in milliseconds.

    client                                               server
    start()       a subprocess, which imports torch
    spawn(n, fds) {"nodes": n} + descriptors       →     fork n children, each runs node_main(rank, descriptors)
                                                   ←     {"pids": [...]}
                                                   ←     {"node": rank, "status": ...} as each one ends
    kill          one byte                         →     SIGKILL to those of this run still alive
    EOF           the client has ended or is done  →     likewise

Every run has its own socket. Children die with the server, and the server with its client, at any time: the kernel
kills it while it imports torch, and later it watches the client's pidfd. Sockets alone are not enough, because forks of
the client hold copies of them. The server has its own session, so Ctrl-C reaches only the client, which then decides.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_MAX = 1 << 16
_PR_SET_PDEATHSIG = 1
# The first lines precede any slow import. Until torch is imported nothing else notices that the client has died.
_PROGRAM = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGKILL)})
if os.getppid() != int(sys.argv[2]):  # the client died before the line above took effect
    os._exit(1)
from orchestra.worlds.shared_memory import fork_server
fork_server.main()
"""


class ForkServer:
    """The client's side."""

    def __init__(self) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        source = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
        # Threads that spin while they wait would take the cores from other processes.
        environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ | _hash_seed() | {"PYTHONPATH": path}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
        )
        theirs.close()
        self._socket = mine
        self._lock = threading.Lock()
        self._owner = os.getpid()

    @property
    def pid(self) -> int:
        """The pid of the server."""
        return self._process.pid

    def alive(self) -> bool:
        """Return whether the server runs, and this process started it: a fork of the client must not use its socket."""
        return self._owner == os.getpid() and self._process.poll() is None

    def spawn(self, nodes: int, fds: Sequence[int]) -> socket.socket:
        """Fork `nodes` processes, each with these descriptors; return a socket that reports their pids and exits."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with self._lock, theirs:
            socket.send_fds(self._socket, [json.dumps({"nodes": nodes}).encode()], [theirs.fileno(), *fds])
        return mine

    def close(self) -> None:
        """Kill the server, and with it all its children."""
        if self.alive():
            self._socket.close()
            self._process.kill()
            self._process.wait()


def _hash_seed() -> dict[str, str]:
    """Return the PYTHONHASHSEED with which this program was started; os.environ may have changed since."""
    if sys.flags.ignore_environment:
        return {}
    started = [os.fsdecode(entry).partition("=") for entry in Path("/proc/self/environ").read_bytes().split(b"\0")]
    return {name: value for name, _, value in started if name == "PYTHONHASHSEED"}


_server: ForkServer | None = None


def warm() -> ForkServer:
    """Return the fork server of this process, started at the first call; it imports torch in the background."""
    global _server
    if _server is None or not _server.alive():
        _server = ForkServer()
        atexit.register(_server.close)
    return _server


# The server's side.


class _Run:
    """The children of one request."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.alive: dict[int, int] = {}  # pid → rank

    def tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the client may have ended
            self.channel.send(json.dumps(message).encode())

    def kill(self) -> None:
        for pid in self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def serve(channel: socket.socket, client: int) -> None:
    """Fork on request until the client ends. `client`: its pidfd."""
    wake, woken = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    runs: list[_Run] = []
    while True:
        channels: list[Any] = [channel, client, woken, *(run.channel for run in runs)]
        readable, _, _ = select.select(channels, [], [])
        if client in readable:
            return _leave(runs)
        if woken in readable:
            woken.recv(4096)
            _reap(runs)
        for run in [run for run in runs if run.channel in readable]:
            run.kill()
            if not run.channel.recv(16):
                run.channel.close()
                runs.remove(run)
        if channel in readable:
            request, fds, _, _ = socket.recv_fds(channel, _MAX, 16)
            if not request:
                return _leave(runs)
            runs.append(_fork(json.loads(request)["nodes"], fds))


def _leave(runs: list[_Run]) -> None:
    for run in runs:
        run.kill()
    signal.set_wakeup_fd(-1)  # the sockets close before the last child has ended


def _reap(runs: list[_Run]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        for run in runs:
            if pid in run.alive:
                run.tell({"node": run.alive.pop(pid), "status": os.waitstatus_to_exitcode(status)})


def _fork(nodes: int, fds: Sequence[int]) -> _Run:
    run = _Run(socket.socket(fileno=fds[0]))
    parent = os.getpid()
    for rank in range(nodes):
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _child(parent, rank, fds[1:])
        run.alive[pid] = rank
    for fd in fds[1:]:
        os.close(fd)
    run.tell({"pids": list(run.alive)})
    return run


def _child(parent: int, rank: int, fds: Sequence[int]) -> None:
    """Run a node in the forked process; never return."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the line above took effect
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        from orchestra.worlds.shared_memory.child import node_main

        code = node_main(rank, fds)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Import all that a node needs, then serve."""
    import torch

    import orchestra.worlds.shared_memory.child  # noqa: F401  so that no child has to

    # The first optimizer of a process imports further parts of torch, which takes a second: do it once, here.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    client = os.pidfd_open(os.getppid())
    # The kernel would also kill this process when the client's thread that started it ends. From here on the pidfd
    # shows when the whole client ends.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
    if os.getppid() != int(sys.argv[2]):  # the client died before the pidfd was opened
        os._exit(1)
    serve(socket.socket(fileno=int(sys.argv[1])), client)
