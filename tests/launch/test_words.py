# SPDX-License-Identifier: Apache-2.0
"""What `orchestra launch` says before it reaches anybody."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Orchestra
from tests.cli.conftest import orchestra as orchestra  # the fixture
from tests.processes import environ_of

from orchestra.clusters.attached import Attached
from orchestra.clusters.local import Local
from orchestra.clusters.runners import runner_of
from orchestra.engine.cluster import Cluster
from orchestra.errors import ClusterError, ConfigError
from orchestra.launchers import agent, ray, ssh
from orchestra.launchers.hosts import LaunchHost, process_slots, read_hosts
from orchestra.launchers.preflight import agree

FILE = """\
# the machines of the second floor
ada@10.0.0.1   slots=2      # with two GPUs

10.0.0.2  python=/opt/py/bin/python cwd="/data/my runs"
fe80::1%eth0
"""


def test_a_file_of_hosts(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(FILE)
    hosts = read_hosts(tmp_path / "hosts", per_host=3, python="python", cwd="/srv/training")
    assert hosts == [
        LaunchHost("ada@10.0.0.1", 2, "python", "/srv/training"),
        LaunchHost("10.0.0.2", 3, "/opt/py/bin/python", "/data/my runs"),
        LaunchHost("fe80::1%eth0", 3, "python", "/srv/training"),
    ]
    assert hosts[0].address == "10.0.0.1"
    assert [(seat.rank, seat.local_rank) for seat in process_slots(hosts)] == list(enumerate([0, 1, 0, 1, 2, 0, 1, 2]))


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("two slots=0", "slots=0 must be a whole number from 1"),
        ("two slots=x", "slots=x must be a whole number"),
        ("two slot=2", "did you mean 'slots'?"),
        ("two 2", "'2' is not an option of a host"),
        ("two slots=1 slots=2", "slots needs one value"),
        ("two cwd=", "cwd needs one value"),
        ("ada@one", "is on line 1 already"),
        ("-oProxyCommand=evil", "is not a host"),
        ("ada@-oProxyCommand=evil", "is not a host"),
        ("two;evil", "is not a host"),
        ("two cwd='x", "cannot be read: no closing quotation"),
    ],
)
def test_a_line_that_cannot_be_understood(line: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(f"one\n\n{line}\n")
    with pytest.raises(ConfigError) as raised:
        read_hosts(tmp_path / "hosts", per_host=1, python="python", cwd="/")
    (problem,) = raised.value.problems
    assert problem.where == f"{tmp_path / 'hosts'}:3"
    assert hint in problem.message


def test_dry_run_shows_what_would_be_run_where(orchestra: Orchestra) -> None:
    Path("hosts").write_text("ada@one slots=2\ntwo python=/opt/python\n")
    said = orchestra(
        "launch", "--hosts", "hosts", "--ssh", "ssh -p 2222", "--dry-run", "--", "orchestra", "run", "digits", "-n", "3"
    )
    assert said.code == 0
    assert said.out.count("ORCHESTRA_TOKEN") == 3
    assert "RANK=2 WORLD_SIZE=3 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=one MASTER_PORT=29500" in said.out
    assert "ssh -p 2222 -T -o BatchMode=yes" in said.out
    assert "two 'exec /opt/python -P -m orchestra.launchers.agent'" in said.out
    assert "which runs: /opt/python -m orchestra run digits -n 3" in said.out


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("--hosts", "hosts"), "give the command to run after --"),
        (("--hosts", "hosts", "--", "rm", "x"), "cannot be run on many machines"),
        (("--hosts", "hosts", "--", "run"), "needs something to run"),
        (("--", "run", "digits"), "either --hosts or --print"),
        (("--hosts", "hosts", "--print", "slurm", "--", "run", "digits"), "either --hosts or --print"),
        (("--hosts", "nowhere", "--", "run", "digits"), "cannot be read"),
        (("--hosts", "empty", "--", "run", "digits"), "names no host"),
        (("--hosts", "hosts", "--per-host", "0", "--", "run", "digits"), "at least 1 process"),
        (("--hosts", "hosts", "--port", "70000", "--", "run", "digits"), "from 1 to 65535"),
        (("--hosts", "hosts", "--ssh", "'ssh", "--", "run", "digits"), "no closing quotation"),
        (("--hosts", "hosts", "--ssh", "", "--", "run", "digits"), "must be a command"),
        (("--hosts", "hosts", "--env", "NOWHERE_SET", "--", "run", "digits"), "is not set here"),
        (("--hosts", "loop", "--", "run", "digits"), "give --master the first host's address"),
        (("--hosts", "hosts", "--token-file", "open", "--", "run", "digits"), "chmod 600"),
    ],
)
def test_bad_input_is_refused_with_a_hint(arguments: tuple[str, ...], hint: str, orchestra: Orchestra) -> None:
    Path("hosts").write_text("one\n")
    Path("empty").write_text("# no host\n")
    Path("loop").write_text("localhost\ntwo\n")
    Path("open").write_text("0" * 64)
    Path("open").chmod(0o644)
    said = orchestra("launch", *arguments)
    assert said.code == 2
    assert hint in said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("cluster", "started", "expected"),
    [
        (Attached(), "orchestra launch --hosts h.txt --", "orchestra launch --hosts h.txt -- resume runs/a"),
        (Attached(trusted=True), "orchestra launch --", "orchestra launch -- resume runs/a --trusted-network"),
        (
            Attached(token_file="t"),
            "",
            "`orchestra resume runs/a --token-file t`, started in 3 processes as this run was",
        ),
        (Local(), "", "orchestra resume runs/a"),
        (Attached(), "torchrun", "torchrun --standalone --nproc-per-node 3 -m orchestra resume runs/a"),
        (
            Attached(token_file="t"),
            "torchrun of many",
            "`torchrun ... -m orchestra resume runs/a --token-file t` on every machine, with the options of torchrun "
            "that this run had",
        ),
        (Attached(trusted=True), "ray", "orchestra resume runs/a --on ray --ray-address h:6379"),
    ],
)
def test_how_to_go_on_is_what_was_typed(
    cluster: Cluster, started: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {
        "torchrun": {"TORCHELASTIC_RUN_ID": "none"},
        "torchrun of many": {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "1"},
        "ray": {"ORCHESTRA_STARTED_ON": "--on ray --ray-address h:6379"},
    }.get(started, {"ORCHESTRA_STARTED_BY": started})
    for name, value in (environ_of(0, 3, 29500) | more).items():
        monkeypatch.setenv(name, value)
    assert runner_of(cluster).how_to_resume(Path("runs/a")) == expected


def test_a_cluster_goes_on_in_as_many_processes(
    orchestra: Orchestra, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = {"recipe": "digits", "options": {}}
    config = {"workers": 2, "servers": 1, "device": "cpu", "note": note}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked: list[Any] = []

    def launch(*given: Any, **more: Any) -> int:
        asked.append((given[:2], more))
        return 0

    monkeypatch.setattr(ray, "launch", launch)
    assert orchestra("resume", str(tmp_path), "--on", "ray", "--steps", "9", "--grace", "3", "-q").code == 0
    words = ["resume", str(tmp_path), "--steps", "9", "--grace", "3.0", "--quiet"]
    assert asked == [((words, 3), {"address": "auto", "gpus": 0})]
    assert "did you mean 'ray'" in orchestra("resume", str(tmp_path), "--on", "rai").err


def test_the_command_to_repeat_holds_no_secrets(
    orchestra: Orchestra, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was given; secrets are not printed."""
    (tmp_path / "my hosts").write_text("one\n")
    found: list[str] = []

    def launch(run: ssh.SshLaunch, token: str) -> int:
        found.append(run.again)
        return 0

    monkeypatch.setattr(ssh, "launch", launch)
    given = ("--hosts", "my hosts", "--per-host", "2", "--env", "KEY=secret", "--port", "4567")
    assert orchestra("launch", *given, "--", "run", "digits").code == 0
    assert found == ["orchestra launch --hosts 'my hosts' --per-host 2 --port 4567 --env KEY=... --"]


@pytest.mark.parametrize(
    ("complaint", "told"),
    [
        (
            "ada@one: Permission denied (publickey).",
            "ada@one: Permission denied (publickey). Next: put your key there with ssh-copy-id one; ",
        ),
        (
            "noise\nbash: line 1: exec: /opt/python: cannot execute: Permission denied\nmore noise",
            "bash: line 1: exec: /opt/python: cannot execute: Permission denied. Next: let this user run it there, ",
        ),
        (
            "Host key verification failed.\r\n",
            "Host key verification failed. Next: connect once by hand, ssh -o 'A={b}' one, and accept its key",
        ),
        (
            "unknown option -P\nusage: python3 [option] ...\nTry `python -h' for more information.",
            "unknown option -P. Next: set python= behind the host, or --python: it must be Python 3.11 or later",
        ),
        ("", "exit status 255. Next: try by hand: ssh -o 'A={b}' one true"),
    ],
)
def test_a_host_that_cannot_take_part(complaint: str, told: str) -> None:
    """What ssh and shells say, with what to do about it."""
    host = LaunchHost("one", 1, "/opt/python", "/")
    run = ssh.SshLaunch([host], ["run", "digits"], ["ssh", "-o", "A={b}"])
    answer = ssh._understand(run, host, 255, "hello\n", complaint)
    assert isinstance(answer, str)
    assert answer.startswith(told)


def test_a_host_without_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"cwd": "/", "master": "127.0.0.1", "port": 1, "any_port": False, "first": False}
    whole = agent.check_machine(asked)
    monkeypatch.setattr(agent, "_version", lambda package: None)
    with pytest.raises(ClusterError) as raised:
        agree([("one", whole), ("two", agent.check_machine(asked))])
    (line,) = str(raised.value).splitlines()[1:]
    assert line.startswith(f"  two has no torch for {sys.executable}: install it, ")
