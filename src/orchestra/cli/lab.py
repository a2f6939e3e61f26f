# SPDX-License-Identifier: Apache-2.0
"""`orchestra lab`: build a network of hosts on one machine, run commands in it, take it down."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from orchestra.cli import in_lab, summary
from orchestra.cli import options as o
from orchestra.cli.cluster_options import read_straggler
from orchestra.cli.help_text import flowing
from orchestra.cli.verb import Verb
from orchestra.errors import ConfigError, Interrupted, Problem
from orchestra.formatting import plural

if TYPE_CHECKING:
    from orchestra.lab.inspection import LabState
    from orchestra.lab.plan import LabPlan, Machine

_NAME = "orchestra"  # of a lab that is given none, as in `orchestra.lab.plan`

Hosts = Annotated[int, o.cluster("--hosts", "-n", metavar="N", help="How many hosts.", show_default=False)]
Rate = Annotated[
    str | None,
    o.cluster(metavar="RATE", help="Rate of each host's link, up and down: 100mbit. Default: unlimited."),
]
Latency = Annotated[str, o.cluster(metavar="TIME", help="Latency from host to host, one way, e.g. 1ms.")]
Cpu = Annotated[float | None, o.cluster(metavar="CORES", help="Cores of each host, e.g. 0.5. Default: unlimited.")]
Straggler = Annotated[
    str | None,
    o.cluster(metavar="NxF", help="The first N hosts are F times slower: 1/F of the cores of each of the others. 1x5."),
]
Exceptions = Annotated[
    list[str] | None,
    o.cluster(
        "--host",
        metavar="K:KEY=VALUE,...",
        help="A host that differs, e.g. 3:rate=10mbit,latency=5ms,cpu=0.25; also up= and down=. May be repeated.",
    ),
]
Name = Annotated[str, o.cluster(metavar="NAME", help="Labs with different names are separate.")]


def lab(context: typer.Context) -> None:
    """Build a network of hosts on this machine: namespaces whose rate, latency and processor you choose.

    To any program that uses sockets it looks like a network of machines. It needs Linux and root. Nothing of it is
    visible from outside, and lab down leaves nothing behind. Without root: lab compose, for Docker.

    For example:

      orchestra lab up --hosts 4 --rate 100mbit --latency 1ms
      orchestra lab up --hosts 4 --rate 1gbit --straggler 1x5
      orchestra lab up --hosts 4 --rate 1gbit --host 4:rate=10mbit,cpu=0.1
      orchestra lab run -- ip -br address        on all at once
      orchestra lab run --host 1 -- bash         a shell on the first
      orchestra lab run -- python train.py       torch finds RANK, MASTER_ADDR
      orchestra lab show                         what is up
      orchestra lab down                         and all that runs in it

    A rate counts headers: programs see 4 to 7 % less. With a latency, every frame passes through one Python program. It
    keeps up with 200mbit, and with 1gbit, where 64 kB go in one piece; in between, at 500mbit, it loses a quarter.
    Hosts share the machine's processors, memory and files, and are found by name: host-1, host-2, ...
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app = typer.Typer(name="lab", help=flowing(lab.__doc__ or ""), rich_markup_mode="rich")
app.callback(help=flowing(lab.__doc__ or ""), invoke_without_command=True)(lab)


def up(
    hosts: Hosts, rate: Rate = None, latency: Latency = "0s", cpu: Cpu = None, straggler: Straggler = None,
    host: Exceptions = None, name: Name = _NAME, json_: o.Json = False, quiet: o.Quiet = False,
) -> None:  # fmt: skip
    """Build a lab. If one of the same name is up, take it down first.

    For example:

      orchestra lab up --hosts 4 --rate 100mbit --latency 1ms
      orchestra lab up --hosts 3 --host 3:up=20mbit,latency=5ms --name far
    """
    from orchestra.lab import build
    from orchestra.lab.inspection import look

    plan = _plan(name, hosts, rate, latency, cpu, straggler, host)
    build.up(plan, instead=False)
    _show(look(name), json_=json_)
    if json_ or quiet:
        return
    cores, asked = os.cpu_count() or 1, sum(machine.cpu or 0.0 for machine in plan.machines)
    if asked > cores:
        summary.say(f"warning: the hosts have {asked:g} cores together, and this machine has {cores}")
    of = "" if name == _NAME else f"--name {name} "
    summary.say(f"next: orchestra lab run {of}-- ip -br address\nlast: orchestra lab down {of}".rstrip())


def run(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="After --.", show_default=False)],
    host: Annotated[int | None, o.cluster(metavar="K", help="Only on the K-th host, from 1. Default: all.")] = None,
    name: Name = _NAME,
) -> NoReturn:
    """Run a command on all hosts at once, each line prefixed by its host, or on one host as in its terminal.

    The exit code is that of the first host that failed. A failure ends the others, as Ctrl-C does, and no process
    stays. Each host has in its environment ORCHESTRA_LAB_RANK (from 0), _SIZE, _ADDRESS (its own), _FIRST (the first
    host's) and _ADDRESSES; for torch RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME; unless you set
    them, OMP_NUM_THREADS (its share of the cores) and a token for this one run.

    For example:

      orchestra lab run -- python train.py
      orchestra lab run --host 1 -- bash
      orchestra lab run -- sh -c 'torchrun --nnodes $WORLD_SIZE
         --node-rank $RANK --master-addr $MASTER_ADDR train.py'
    """
    from orchestra.lab import running
    from orchestra.lab.inspection import look

    found = look(name)
    ended_by: list[int] = []

    def end(number: int, _: object) -> None:
        """Ask the processes to end, as by Ctrl-C: they may save first."""
        ended_by.append(number)
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    try:
        with in_lab.with_token():
            raise typer.Exit(running.run(found, command, host=host))
    except Interrupted as error:
        if ended_by:
            error.exit_code = 128 + ended_by[0]  # type: ignore[misc]
        raise


def down(
    name: Name = _NAME,
    all_: Annotated[bool, o.cluster("--all", help="All labs of this machine.")] = False,
    quiet: o.Quiet = False,
) -> None:
    """Take a lab down and end every process in it. It is no error if there is none.

    It removes what exists, and so also a lab that was interrupted while it was built.

    For example:

      orchestra lab down
      orchestra lab down --all
    """
    from orchestra.lab import build

    for each in build.names() if all_ else [name]:
        was = build.down(each)
        if not quiet:
            summary.say(f"{each}: {'taken down' if was else 'was not up'}")


def show(name: Name = _NAME, json_: o.Json = False) -> None:
    """Show a lab's hosts: address, rate, latency and share of the processor, as the kernel has them.

    For example:

      orchestra lab show
      orchestra lab show --name far --json
    """
    from orchestra.lab.inspection import look

    found = look(name)
    _show(found, json_=json_)
    if found.broken:
        summary.say(f"broken: half built, or its delay line died. Next: orchestra lab down --name {name}")


def list_(json_: o.Json = False) -> None:
    """List the labs that are up.

    For example:

      orchestra lab list
      orchestra lab list --json
    """
    from orchestra.lab import build
    from orchestra.lab.inspection import look

    found = [look(name) for name in build.names()]
    if json_:
        summary.print_json([_record(lab) for lab in found])
        return
    rows = []
    for lab in found:
        first = lab.addresses[0] if lab.addresses else None
        rows.append((lab.name, str(lab.size), first or "none", str(lab.processes), "broken" if lab.broken else "up"))
    _table(("lab", "hosts", "first address", "processes", "state"), rows)
    if not found:
        summary.say("none is up. Next: orchestra lab up --hosts 4 --rate 100mbit --latency 1ms")


def compose(
    hosts: Hosts, rate: Rate = None, latency: Latency = "0s", cpu: Cpu = None, straggler: Straggler = None,
    host: Exceptions = None, name: Name = _NAME,
    image: Annotated[
        str | None,
        o.cluster(metavar="IMAGE", help="With ip and tc in it. Default: built from a checkout in this folder."),
    ] = None,
) -> None:  # fmt: skip
    """Print the same lab as a Docker Compose file: a service for each host, which shapes its own link.

    Runs in it need a token, a secret in a file beside it that you make; the first lines of the Compose file say how.

    For example:

      orchestra lab compose --hosts 4 --rate 100mbit --latency 1ms > lab.yaml
      orchestra lab compose --hosts 2 --cpu 0.5 --image mine:latest > lab.yaml
    """
    from orchestra.lab.compose import compose as written

    print(written(_plan(name, hosts, rate, latency, cpu, straggler, host), image), end="", flush=True)
    made = f"(umask 077 && openssl rand -hex 32 > {name}.token)"
    summary.say(f"next: {made} && docker compose -f FILE up -d --build")


for _verb in (up, show, down, compose):
    app.command(cls=Verb, help=flowing(_verb.__doc__ or ""))(_verb)
# What follows the first word of a command is the command's: `lab run ip -br address`.
app.command(cls=Verb, help=flowing(run.__doc__ or ""), context_settings={"allow_interspersed_args": False})(run)
app.command("list", cls=Verb, help=flowing(list_.__doc__ or ""))(list_)


def _plan(
    name: str,
    hosts: int,
    rate: str | None,
    latency: str,
    cpu: float | None,
    straggler: str | None,
    exceptions: list[str] | None,
) -> LabPlan:
    from orchestra.lab.plan import make_plan, read_exception

    problems: list[Problem] = []
    differing: dict[int, dict[str, str | float]] = {}
    if straggler is not None:
        count, factor = read_straggler(straggler)
        if count > hosts:
            problems.append(Problem("straggler", straggler, f"there are {plural(hosts, 'host')}: at most so many"))
        share = (os.cpu_count() or 1) / max(1, hosts) if cpu is None else cpu
        differing = {k: {"cpu": share / factor} for k in range(1, min(count, hosts) + 1)}
    for text in exceptions or []:
        try:
            k, changes = read_exception(text)
            differing[k] = {**differing.get(k, {}), **changes}
        except ConfigError as error:
            problems += error.problems
    try:
        plan = make_plan(name=name, hosts=hosts, rate=rate, latency=latency, cpu=cpu, exceptions=differing)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return plan


def _record(lab: LabState) -> dict[str, Any]:
    hosts = [
        {"host": f"host-{k}", "address": address, **vars(machine)}
        for k, (address, machine) in enumerate(zip(lab.addresses, lab.machines, strict=True), start=1)
    ]
    return {"name": lab.name, "whole": not lab.broken, "processes": lab.processes, "hosts": hosts}


def _show(lab: LabState, *, json_: bool) -> None:
    if json_:
        summary.print_json(_record(lab))
        return
    rows = [
        (f"host-{k}", address or "none", *_words(machine))
        for k, (address, machine) in enumerate(zip(lab.addresses, lab.machines, strict=True), start=1)
    ]
    _table((f"{lab.name}: {plural(lab.size, 'host')}", "address", "rate", "latency", "cpu"), rows)


def _words(machine: Machine) -> tuple[str, str, str]:
    from orchestra.lab.plan import rate_words, time_words

    up, down = ("any" if rate is None else rate_words(rate) for rate in (machine.up, machine.down))
    cpu = "any" if machine.cpu is None else f"{machine.cpu:g}"
    return up if up == down else f"{up} up, {down} down", time_words(machine.latency) if machine.latency else "0", cpu


def _table(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    summary.console_for(80).print(table)
