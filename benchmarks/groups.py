# SPDX-License-Identifier: Apache-2.0
"""Groups of processes that are set up once and then take turns: the peers, and real runs of ours."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from orchestra.lab import Lab


class Peers:
    """A group of `benchmarks.peer` processes: they set up once, then run `count` steps when told to.

    Between their turns they are stopped: an idle RPC agent polls, and would take the cores from the others.
    """

    def __init__(
        self,
        kind: str,
        workload: str,
        processes: int,
        count: int,
        *options: str,
        keep_memory: bool = False,
        module: str = "benchmarks.peer",
        lab: Lab | None = None,  # one process on each of its hosts
    ) -> None:
        self.count = count
        port = str(free_port())
        path = os.pathsep.join(filter(None, sys.path))
        environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": path}
        if keep_memory:  # what our own workers tell the allocator
            environment |= {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
        command = [sys.executable, "-m", module, kind, workload, str(processes), port]

        def on_host(rank: int) -> dict[str, Any]:
            here = [*command, str(rank), *options]
            if lab is None:
                return {"args": here, "env": os.environ | environment}
            return {"args": lab.command(rank + 1, here), "env": lab.environment(rank + 1) | environment}

        self._members = [
            subprocess.Popen(
                **on_host(rank),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if "VERBOSE" in os.environ else subprocess.DEVNULL,
                text=True,
                cwd=ROOT,
            )
            for rank in range(processes)
        ]
        self.call("ready")
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for member in self._members:
            member.send_signal(number)

    def call(self, *words: object) -> list[Any]:
        """Tell everyone the same; give what each answers."""
        for member in self._members:
            assert member.stdin is not None
            member.stdin.write(" ".join(map(str, words)) + "\n")
            member.stdin.flush()
        answers = []
        for member in self._members:
            assert member.stdout is not None
            line = member.stdout.readline()
            if not line:
                raise RuntimeError("a peer died; set VERBOSE=1 to see why")
            answers.append(json.loads(line))
        return answers

    def by_worker(self) -> list[list[float]]:
        """Go on for a turn; seconds of every step, by process."""
        self._signal(signal.SIGCONT)
        seconds = self.call("steps", self.count)
        self._signal(signal.SIGSTOP)
        return seconds

    def steps(self, warmup: int) -> list[float]:
        """Go on for a turn; seconds of every step of every process, the first few dropped."""
        return [t for answer in self.by_worker() for t in answer[warmup:]]

    def close(self) -> None:
        """End them all."""
        self._signal(signal.SIGCONT)
        for member in self._members:
            assert member.stdin is not None
            member.stdin.close()
        for member in self._members:
            try:
                member.wait(timeout=5)
            except subprocess.TimeoutExpired:
                member.kill()
                member.wait()

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def free_port() -> int:
    """A TCP port that is free right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Ours:
    """A real run of `orchestra.train`, in processes of its own, that goes on by `count` steps when told to."""

    def __init__(
        self, workload: str, strategy: str, workers: int, count: int, *options: str,
        path: Sequence[str] = (), root: Path = ROOT,
    ) -> None:  # fmt: skip
        self.workers = workers
        self.folder = Path(tempfile.mkdtemp(prefix="orchestra-benchmark-"))
        own = [] if root == ROOT else [str(root), str(root / "src")]
        source = os.pathsep.join([*path, *own, *filter(None, sys.path)])
        command = [
            sys.executable,
            "-m",
            "benchmarks.ours",
            workload,
            strategy,
            str(workers),
            str(count),
            str(self.folder),
        ]
        self._process = subprocess.Popen(
            [*command, *options],
            stdin=subprocess.DEVNULL,
            stderr=None if "VERBOSE" in os.environ else subprocess.DEVNULL,
            cwd=root,
            env=os.environ | {"PYTHONPATH": source},
        )
        self._turn = 0
        self._await(0)

    def _await(self, turn: int) -> list[list[float]]:
        """What every worker wrote when it came to the gate."""
        done = [self.folder / f"done-{turn}-{worker}" for worker in range(self.workers)]
        while not all(path.exists() for path in done):
            if self._process.poll() is not None:
                raise RuntimeError("our run died; set VERBOSE=1 to see why")
            time.sleep(0.01)
        return [json.loads(path.read_text()) for path in done]

    def by_worker(self) -> list[list[float]]:
        """Go on for a turn; seconds of every step, by worker."""
        (self.folder / f"go-{self._turn}").touch()
        self._turn += 1
        return self._await(self._turn)

    def steps(self, warmup: int) -> list[float]:
        """Go on for a turn; seconds of every step of every worker, the first few dropped."""
        return [t for worker in self.by_worker() for t in worker[warmup:]]

    def close(self) -> None:
        """End the run; its processes end with the one that started them."""
        self._process.kill()
        self._process.wait()
        time.sleep(0.2)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Ours:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
