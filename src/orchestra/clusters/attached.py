# SPDX-License-Identifier: Apache-2.0
"""`Attached`: a run in processes that are started elsewhere, of which this process is one.

    RANK, WORLD_SIZE            which process of how many; the last are servers, if the strategy has any
    MASTER_ADDR, MASTER_PORT    where process 0 listens
    LOCAL_RANK, LOCAL_WORLD_SIZE    which process of those on this machine, for GPUs and threads
    ORCHESTRA_TOKEN, ORCHESTRA_TOKEN_FILE    the run's token, or a file with it that no other user can read

torchrun sets all but the token, `orchestra launch` sets all.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from orchestra.engine import compute_times
from orchestra.engine.cluster import Abilities, Cluster, Device, Resources, resolve_device, share_of_cores
from orchestra.engine.compute_times import ComputeTime
from orchestra.engine.environment import NEEDED, is_member, keeps_order
from orchestra.errors import ClusterError, ConfigError, EnvironmentProblem, Exposed, Problem
from orchestra.worlds.sockets import auth
from orchestra.worlds.sockets.addresses import Reminder, bare, is_loopback, print_notice, resolve, show
from orchestra.worlds.sockets.auth import Token

if TYPE_CHECKING:
    from orchestra.core.strategy import Strategy

_AGAIN = 0.05  # seconds between two checks for a file


@dataclass(frozen=True)
class ProcessRank:
    """The place of this process among the others."""

    rank: int
    size: int
    host: str  # of process 0
    port: int
    local_rank: int
    local_size: int
    one_machine: bool  # whether all processes are on this machine, as far as the environment shows

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> ProcessRank:
        """Read the place from the environment. Raises a ConfigError with all that is missing or wrong there."""
        missing = [name for name in NEEDED if not environment.get(name)]
        if missing:
            message = "is not set: start with torchrun or `orchestra launch`, which set it, or use Local(...)"
            raise ConfigError([Problem(name, None, message) for name in missing])
        numbers, problems = {}, []
        for name, default in (("RANK", ""), ("WORLD_SIZE", ""), ("MASTER_PORT", ""), ("LOCAL_RANK", "0"),
                              ("LOCAL_WORLD_SIZE", "1")):  # fmt: skip
            text = environment.get(name) or default
            if text.isdecimal():
                numbers[name] = int(text)
            else:
                problems.append(Problem(name, text, "must be a whole number"))
        if not problems and not numbers["RANK"] < numbers["WORLD_SIZE"]:
            problems.append(Problem("RANK", numbers["RANK"], f"must be below WORLD_SIZE ({numbers['WORLD_SIZE']})"))
        if not problems and not 0 < numbers["MASTER_PORT"] < 65536:
            problems.append(Problem("MASTER_PORT", numbers["MASTER_PORT"], "must be a port, 1 to 65535"))
        if problems:
            raise ConfigError(problems)
        rank, size, port, local_rank, local_size = numbers.values()
        host = bare(environment["MASTER_ADDR"])
        # A machine may resolve its own name to a loopback address, wherever the other processes are.
        known = environment.get("LOCAL_WORLD_SIZE")
        one_machine = size <= local_size if known else host == "localhost" or _is_loopback(host)
        return cls(rank, size, host, port, local_rank, local_size, one_machine)

    def loopback(self, patience: float) -> bool:
        """Whether the run can be reached from this machine only."""
        return self.one_machine and all(map(is_loopback, resolve(self.host, self.port, patience=patience)))


@dataclass(frozen=True, kw_only=True)
class Attached(Cluster):
    """Processes on one machine or many, started by torchrun, Slurm, Kubernetes or `orchestra launch`.

    Every process makes the same call and is one node; the last ones are servers, if the strategy has any. Process 0
    keeps the run folder. Every process gets the result.
    """

    workers: int = 1  # all processes but the servers: known once the strategy is
    device: Device = "cpu"
    token_file: str | Path | None = None  # default: ORCHESTRA_TOKEN_FILE, or ORCHESTRA_TOKEN itself
    trusted: bool = False  # the network is trusted: nothing is encrypted, but processes still need the token
    threads: int | None = None  # of each process; None divides the cores of the machine evenly
    patience: float = 300.0  # seconds for which a node waits for another
    grace: float = 10.0  # seconds to reconnect to a machine that does not answer; 0: a broken connection ends the run
    collectives: str = "auto"  # "messages", "torch" (Gloo, NCCL: on a trusted network), or torch wherever possible
    order: str | tuple[int, ...] = "measured"  # which process is which node: by rates and latencies, "given", or a list
    # least time of a mini-batch: workers sleep for the rest of it; see orchestra.engine.compute_times
    compute_time: ComputeTime | str | None = None

    @property
    def abilities(self) -> Abilities:
        """What runs can do there: the workers share no memory."""
        return Abilities(one_memory=False)

    @property
    def place(self) -> ProcessRank:
        """The place of this process among the others."""
        return ProcessRank.of(os.environ)

    @property
    def is_coordinator(self) -> bool:
        """Whether this is process 0."""
        return not is_member()

    def for_strategy(self, strategy: Strategy[Any]) -> Attached:
        """Return a copy whose workers are the processes that are not servers."""
        with contextlib.suppress(ConfigError):  # `problems` reports it
            return replace(self, workers=max(0, self.place.size - strategy.layout.servers))
        return self

    def problems(self) -> Iterator[Problem]:
        """Yield what is wrong with this description or the environment."""
        try:
            place = self.place
        except ConfigError as error:
            yield from error.problems
            return
        if self.workers < 1:
            message = "processes were started, all of which would be servers of the strategy: start more, for workers"
            yield Problem("WORLD_SIZE", place.size, message)
        yield from super().problems() if self.workers >= 1 else ()
        if self.threads is not None and not (isinstance(self.threads, int) and self.threads >= 1):
            yield Problem("cluster.threads", self.threads, "must be at least 1, or None to divide the cores")
        if self.compute_time is not None:
            yield from compute_times.problems_of(self.compute_time)
        if self.collectives not in ("auto", "messages", "torch"):
            yield Problem("cluster.collectives", self.collectives, 'must be "auto", "messages" or "torch"')
        elif self.collectives == "torch" and not self.trusted:
            message = (
                "Gloo and NCCL check no token and encrypt nothing: set trusted=True if the network is, or messages"
            )
            yield Problem("cluster.collectives", self.collectives, message)
        if self.order not in ("measured", "given") and (
            isinstance(self.order, str) or sorted(self.order) != [*range(place.size)] or self.order[0] != 0
        ):
            message = f'must be "measured", "given" or the processes 0 to {place.size - 1} in some order, 0 first'
            yield Problem("cluster.order", self.order, message)
        elif not isinstance(self.order, str) and self.order != (*range(place.size),) and keeps_order():
            message = "orchestra.rank() was called, which keeps the launcher's ranks: leave one of the two out"
            yield Problem("cluster.order", self.order, message)
        if not isinstance(self.patience, int | float) or not self.patience > 0:
            yield Problem("cluster.patience", self.patience, "must be a number of seconds above zero")
        if not isinstance(self.grace, int | float) or not self.grace >= 0:
            yield Problem("cluster.grace", self.grace, "must be a number of seconds, or 0")

    def about(self) -> dict[str, Any]:
        """Return what a run folder records of the cluster."""
        compute_time = None if self.compute_time is None else str(compute_times.read(self.compute_time))
        order = self.order if isinstance(self.order, str) else list(self.order)
        how = {"encrypted": not self.trusted, "collectives": self.collectives, "order": order}
        return {"kind": "attached", "compute_time": compute_time, **how}

    def resources(self, nodes: int) -> Resources:
        """Return what this process has.

        Threads: as given, or as OMP_NUM_THREADS says, or the cores of this machine divided among its processes.
        torch takes the averages where the network is trusted and GPUs are not shared: NCCL needs one for each process.
        """
        # torchrun sets OMP_NUM_THREADS=1 in every process, however many cores there are.
        said = "" if "TORCHELASTIC_RUN_ID" in os.environ else os.environ.get("OMP_NUM_THREADS", "")
        local = self.place.local_size
        threads = self.threads or (int(said) if said.isdigit() else 0) or share_of_cores(local)
        device = resolve_device(self.device)
        uses_torch_collectives = (
            self.trusted
            and self.collectives != "messages"
            and self.workers >= 2
            and (device == "cpu" or torch.cuda.device_count() >= local)
        )
        return Resources(device, threads, uses_torch_collectives, compute_times.read(self.compute_time))

    def token(self) -> Token:
        """Return the run's token. If none was given, only processes of this machine can take part."""
        file = self.token_file or os.environ.get("ORCHESTRA_TOKEN_FILE")
        if file:
            return Token(auth.read(Path(file)), trusted=self.trusted)
        text = os.environ.get("ORCHESTRA_TOKEN")
        if text:
            return Token(auth.checked(text, "ORCHESTRA_TOKEN"), trusted=self.trusted)
        if not self.place.loopback(self.patience):
            raise Exposed(self.place.host)
        return Token(_own_token(self.place, self.patience), trusted=self.trusted)

    def forget_token(self) -> None:
        """Delete the token that process 0 wrote for the others of this machine: all have read it."""
        if self.is_coordinator:
            _delete(_token_path(self.place))


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):  # a name
        return is_loopback(host)
    return False


def _token_path(place: ProcessRank) -> Path:
    started_by = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0
    return Path(tempfile.gettempdir()) / f"orchestra-{os.getuid()}-{place.port}-{started_by}" / "token"


def _is_private(folder: Path) -> bool:
    """Whether a folder belongs to this user alone: another user could have made one of this name."""
    with contextlib.suppress(OSError):
        found = folder.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return False


def _delete(path: Path) -> None:
    if _is_private(path.parent):
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the folder has other files
            path.parent.rmdir()


def _own_token(place: ProcessRank, patience: float) -> str:
    """Return a token for processes of one user on one machine: process 0 writes it where only they can read it."""
    path = _token_path(place)
    if place.rank == 0:
        return _write(auth.new(), path)
    until, remind = time.monotonic() + patience, Reminder(print_notice)
    while time.monotonic() < until:
        # Process 0 writes the token before it listens: once it answers, the file is of this run, not of an earlier one.
        if _answers(place) and _is_private(path.parent) and path.exists() and path.stat().st_size:
            return auth.read(path)
        remind(lambda: f"process {place.rank} waits for process 0 to listen at {show((place.host, place.port))}")
        time.sleep(_AGAIN)
    raise ClusterError(f"process 0 wrote no token to {path}: was it started, on this machine and by this user?")


def _write(text: str, path: Path) -> str:
    try:
        _delete(path)  # of a run that was killed
        path.parent.mkdir(mode=0o700)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(text)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot write a token to {path.parent} for the other processes here: {error.strerror}. Remove it, "
            "set TMPDIR to a folder of yours for all of them, or make a token and set ORCHESTRA_TOKEN_FILE."
        ) from None
    return text


def _answers(place: ProcessRank) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((place.host, place.port), timeout=1.0):
        return True
    return False
