# SPDX-License-Identifier: Apache-2.0
"""`orchestra launch`: one run on many machines, over ssh or by a template for a job scheduler."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from orchestra.cli import options as o
from orchestra.errors import ConfigError, Problem

templates = o.panel("Templates")

Command = Annotated[
    list[str] | None,
    typer.Argument(metavar="COMMAND", help="After --: run ..., resume ... or python SCRIPT ...", show_default=False),
]
Hosts = Annotated[
    Path | None,
    o.machines(metavar="FILE", help="One host a line, as ssh takes it; after it slots=2, python=..., cwd=..."),
]
PerHost = Annotated[int, o.machines(metavar="N", help="Processes on a host without slots=. Also --nproc-per-node.")]
Master = Annotated[
    str | None,
    o.machines(metavar="ADDRESS", help="Address at which the others find the first host. Default: as in the file."),
]
Port = Annotated[int | None, o.machines(metavar="P", help="On the first host. Default: 29500, or a free one.")]
TokenFile = Annotated[
    Path | None, o.machines(metavar="FILE", help="With the run's token, mode 600. Default: a new token.")
]
Python = Annotated[
    str | None, o.machines(metavar="PATH", help="On the hosts. Default: this command's own, at the same path.")
]
Ssh = Annotated[str, o.machines(metavar="COMMAND", help='E.g. "ssh -p 2222 -i key". Keys only, no passwords.')]
Cwd = Annotated[str | None, o.machines(metavar="DIR", help="On the hosts. Default: this folder, at the same path.")]
Environment = Annotated[
    list[str] | None, o.machines("--env", metavar="NAME[=VALUE]", help="For every process. May be repeated.")
]
DryRun = Annotated[bool, o.output("--dry-run", help="Print what would run where, and start nothing.")]
Print = Annotated[
    str | None,
    templates("--print", metavar="KIND", help="Print a template instead: slurm, kubernetes or docker-compose."),
]
Nodes = Annotated[int, templates("--nodes", metavar="N", help="Machines, for --print.")]
Image = Annotated[str | None, templates(metavar="IMAGE", help="Of containers, for --print. Default: one you build.")]


def launch(
    command: Command = None, hosts: Hosts = None, per_host: PerHost = 1, master: Master = None, port: Port = None,
    token_file: TokenFile = None, python: Python = None, ssh: Ssh = "ssh", cwd: Cwd = None, env: Environment = None,
    print_: Print = None, nodes: Nodes = 2, image: Image = None, dry_run: DryRun = False,
) -> None:  # fmt: skip
    """Run one command on many machines: every process is a node of one run.

    First, every host must answer and have the same versions. Then each runs the same command and finds its rank in the
    environment, as under torchrun; the last ranks are the servers, if the strategy has any. The output of rank 0 is
    that of the run; the output of the others goes to standard error, with the host in front. Ctrl-C lets the run save
    and stop (a loop under orchestra.prepare only stops); a second Ctrl-C kills it. If a process fails, the others are
    stopped, the first cause is printed, and its exit code is that of this command. No process stays on any host, even
    if this command is killed.

    For example:

      orchestra launch --hosts hosts.txt -- run digits --strategy slowmo
      orchestra launch --hosts hosts.txt --per-host 2 --dry-run -- run digits
      orchestra launch --hosts hosts.txt -- python train.py --your arguments
      orchestra launch --print slurm --nodes 4 -- run digits > job.sh
      orchestra launch --print kubernetes --nodes 4 -- run digits > job.yaml

    hosts.txt:

      ada@10.0.0.1  slots=2
      ada@10.0.0.2  python=/opt/venv/bin/python  cwd=/data

    The run's token, which lets a process take part, goes through ssh's encrypted input and not through a command line.
    A launcher that is stopped (Ctrl-Z) for a minute counts as dead.
    """
    from orchestra.launchers.hosts import check_command

    words = check_command(command or [])
    if (print_ is None) == (hosts is None):
        raise ConfigError([Problem("hosts", None if hosts is None else str(hosts), "give either --hosts or --print")])
    if print_ is not None:
        from orchestra.launchers.templates import template

        print(template(print_, words, nodes=nodes, per_host=per_host, image=image), end="", flush=True)
        return
    assert hosts is not None
    from orchestra.launchers.hosts import read_hosts
    from orchestra.launchers.ssh import SshLaunch, describe
    from orchestra.launchers.ssh import launch as start
    from orchestra.worlds.sockets import auth

    places = read_hosts(hosts, per_host=per_host, python=python or sys.executable, cwd=cwd or os.getcwd())
    given = {"hosts": hosts, "per-host": per_host if per_host != 1 else None, "master": master, "port": port,
             "token-file": token_file, "python": python, "ssh": ssh if ssh != "ssh" else None, "cwd": cwd}  # fmt: skip
    again = shlex.join(["orchestra", "launch", *_flags(given, env or []), "--"])
    run = SshLaunch(places, words, _words(ssh), master, port, _environment(env or []), again=again)
    run.check()
    if dry_run:
        print(describe(run))
        return
    raise typer.Exit(start(run, auth.new() if token_file is None else auth.read(token_file)))


def _words(ssh: str) -> list[str]:
    try:
        return shlex.split(ssh)
    except ValueError as error:
        raise ConfigError([Problem("ssh", ssh, f"cannot be read: {str(error).lower()}")]) from None


def _flags(given: Mapping[str, object], env: list[str]) -> list[str]:
    """Return the given options as words to type again, without the values of variables, which may be secret."""
    named = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
    names = [text if "=" not in text else f"{text.partition('=')[0]}=..." for text in env]
    return named + [word for name in names for word in ("--env", name)]


def _environment(given: list[str]) -> dict[str, str]:
    """Return variables with their given values, or with those of this environment."""
    found: dict[str, str] = {}
    problems = []
    for text in given:
        name, equals, value = text.partition("=")
        if not name or (not equals and name not in os.environ):
            problems.append(Problem("env", text, "is not set here: give NAME=VALUE"))
        found[name] = value if equals else os.environ.get(name, "")
    if problems:
        raise ConfigError(problems)
    return found
