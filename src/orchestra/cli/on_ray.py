# SPDX-License-Identifier: Apache-2.0
"""`orchestra run --on` and `resume --on`: a cluster starts the nodes of the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from orchestra.cli.cluster_options import is_solo
from orchestra.cli.in_lab import flags
from orchestra.cli.options import Options
from orchestra.cli.sources import Source
from orchestra.errors import ConfigError, Problem, nearest
from orchestra.runs import files

_CLUSTERS = ("ray",)


def run_on(
    cluster: str, source: Source, chosen: Options, args: Sequence[str], *, as_json: bool, quiet: bool, at: str
) -> int:
    """Run on a cluster, and return the exit code."""
    here = replace(chosen, grace=None)  # it is for the processes on the cluster
    problems = [*_problems_of(cluster), *here.read(of_script=source.path is not None)[1]]
    if chosen.workers is not None and chosen.workers < 1:
        problems.append(Problem("workers", chosen.workers, "must be at least 1"))
    if problems:
        raise ConfigError(problems)
    words = ["run", source.name if source.path is None else str(source.path), *flags(chosen)]
    words += ["--json"] * as_json + ["--quiet"] * quiet + (["--", *args] if args else [])
    return _launch(words, nodes_of(chosen), at, chosen.device)


def resume_on(cluster: str, run: Path, more: Options, *, as_json: bool, quiet: bool, at: str) -> int:
    """Resume a run on a cluster, in as many processes as before, and return the exit code."""
    if problems := [*_problems_of(cluster)]:
        raise ConfigError(problems)
    config = files.read_json(run / "config.json")
    words = ["resume", str(run), *flags(more)] + ["--json"] * as_json + ["--quiet"] * quiet
    return _launch(words, int(config["workers"]) + int(config["servers"]), at, str(config.get("device")))


def _problems_of(cluster: str) -> Iterator[Problem]:
    if cluster not in _CLUSTERS:
        yield Problem("on", cluster, f"is not a cluster; {nearest(cluster, _CLUSTERS)}")


def _launch(words: Sequence[str], nodes: int, at: str, device: str | None) -> int:
    from orchestra.launchers import ray
    from orchestra.worlds.sockets import auth

    return ray.launch(words, nodes, auth.new(), address=at, gpus=int(device == "cuda"))


def nodes_of(chosen: Options) -> int:
    """Return the number of workers and servers. Only the script knows its own strategy's: give --servers."""
    alone = chosen.strategy is not None and is_solo(chosen.strategy)
    workers = chosen.workers or (1 if alone else 2)
    if chosen.strategy is None:
        return workers + (chosen.servers or 0)
    try:
        strategy = chosen.changes()["strategy"](None)
    except ConfigError:
        return workers + (chosen.servers or 0)
    return workers + int(strategy.layout.servers)
