# SPDX-License-Identifier: Apache-2.0
"""Real runs on hosts behind ssh: what each process is told and prints, and that none of them outlives the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.launch.conftest import Ground, command_lines
from tests.processes import free_port
from tests.waiting import wait_until

TOKEN = "0123456789abcdef" * 4


def said(process: subprocess.Popen[str], seconds: float = 40.0) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def with_token(folder: Path) -> tuple[str, str]:
    path = folder / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return "--token-file", str(path)


# What the processes are told.


def test_every_process_finds_its_place(ground: Ground) -> None:
    port = str(free_port())
    code, out, err = said(ground.start(*with_token(ground.folder), "--port", port, what="show", per_host=2))
    assert code == 0, err
    mine = json.loads(out.splitlines()[-1])
    lines = [line.partition(" | ") for line in err.splitlines() if "RANK" in line]
    others = {name: json.loads(text) for name, _, text in lines}
    first, second = ground.hosts
    assert sorted(others) == sorted([f"{first}[1]", f"{second}[2]", f"{second}[3]"])
    places = [mine, others[f"{first}[1]"], others[f"{second}[2]"], others[f"{second}[3]"]]
    assert [(p["RANK"], p["LOCAL_RANK"]) for p in places] == [("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")]
    for place in places:
        assert (place["WORLD_SIZE"], place["LOCAL_WORLD_SIZE"]) == ("4", "2")
        assert (place["MASTER_ADDR"], place["MASTER_PORT"]) == ("127.0.0.1", port)
        assert place["ORCHESTRA_TOKEN"] == TOKEN
        assert place["cwd"] == str(ground.folder)


def test_a_fresh_token_and_a_free_port(near: Ground) -> None:
    tokens, ports = set(), set()
    for _ in range(2):
        code, out, _ = said(near.start("--env", "MINE=a b", what="show"))
        place = json.loads(out.splitlines()[-1])
        assert code == 0
        assert place["MINE"] == "a b"
        tokens.add(place["ORCHESTRA_TOKEN"])
        ports.add(place["MASTER_PORT"])
    assert len(tokens) == 2
    assert all(len(token) == 64 for token in tokens)
    assert all(0 < int(port) < 65536 for port in ports)


def test_the_token_is_in_no_command_line(ground: Ground) -> None:
    launcher = ground.start(*with_token(ground.folder), what="play")
    ground.await_players(2)
    lines = command_lines()
    assert len([line for line in lines.values() if "orchestra.launchers.agent" in line]) >= 2
    assert not [line for line in lines.values() if TOKEN in line]
    launcher.send_signal(signal.SIGINT)
    assert said(launcher)[0] == 130


# Ending.


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_processes_save_when_the_launcher_gets_a_signal(ground: Ground, number: signal.Signals, code: int) -> None:
    launcher = ground.start(what="play")
    ground.await_players(2)
    os.killpg(launcher.pid, number)  # as a terminal does: ssh, if it were in the same group, would die of it
    found, out, err = said(launcher)
    assert found == code
    assert [(ground.folder / f"saved-{rank}").read_text() for rank in (0, 1)] == [number.name] * 2
    assert out.splitlines()[-2:] == ["playing", "saved"]
    assert f"{ground.hosts[1]} | playing\n" in err
    assert f"{ground.hosts[1]} | grumbling\n" in err
    assert "failed" not in err
    assert not ground.left()


def test_a_second_ctrl_c_kills(ground: Ground) -> None:
    launcher = ground.start(what="stubborn")
    ground.await_players(2)
    launcher.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        launcher.wait(1.0)
    launcher.send_signal(signal.SIGINT)
    assert said(launcher, 10.0)[0] == 130
    assert not ground.left()


def test_the_first_cause_is_told(ground: Ground) -> None:
    code, _, err = said(ground.start(what="fail"))
    assert code == 9
    last = err.splitlines()[-3:]
    assert last[0] == f"orchestra: rank 1 on {ground.hosts[1]} failed first: exit status 9"
    assert last[2] == "  the cause"
    assert (ground.folder / "saved-0").read_text() == "SIGTERM"
    assert not ground.left()


def test_who_only_misses_another_is_not_the_cause(near: Ground) -> None:
    code, _, err = said(near.start(what="late"))
    assert code == 1
    assert "rank 1 on two failed first: exit status 1" in err
    assert err.splitlines()[-1] == "  the cause"


@pytest.mark.parametrize("what", ["play", "family"])
def test_no_process_outlives_a_killed_launcher(ground: Ground, what: str) -> None:
    launcher = ground.start(what=what, per_host=2)
    ground.await_players(4)
    launcher.kill()
    wait_until(lambda: not ground.left())
    assert [(ground.folder / f"saved-{rank}").read_text() for rank in range(4)] == ["SIGTERM"] * 4  # and it saves


def test_no_process_outlives_a_killed_agent(ground: Ground) -> None:
    launcher = ground.start(what="family")
    ground.await_players(2)
    os.kill(ground.far_ends()[0], signal.SIGKILL)
    code, _, err = said(launcher)
    assert code in (137, 255)
    assert "failed first: " in err
    assert not ground.left()


def test_a_process_that_is_killed_ends_the_run(ground: Ground) -> None:
    launcher = ground.start(what="family")
    ground.await_players(2)
    os.kill(int((ground.folder / "pid-1").read_text()), signal.SIGKILL)
    code, _, err = said(launcher)
    assert code == 137
    assert f"rank 1 on {ground.hosts[1]} failed first: killed by SIGKILL (exit status 137)" in err
    assert not ground.left()


@pytest.mark.nightly
def test_a_connection_that_breaks_ends_the_run(far: Ground) -> None:
    launcher = far.start(what="play")
    far.await_players(2)
    (connection,) = [
        pid for pid, line in command_lines().items() if line.startswith("ssh ") and f"{far.hosts[1]} exec" in line
    ]
    os.kill(connection, signal.SIGKILL)
    code, _, err = said(launcher)
    assert code == 137
    assert f"rank 1 on {far.hosts[1]} failed first" in err
    assert not far.left()
    assert (far.folder / "saved-1").read_text() == "SIGTERM"  # it could still save


# Before the start.


def test_all_problems_of_all_hosts_before_anything_starts(near: Ground) -> None:
    near.hosts = ("one", "down", "shut", "elsewhere", "two cwd=/nowhere/at/all")
    code, _, err = said(near.start(what="play"))
    assert code == 4
    assert "nothing was started" in err
    for hint in (
        "down: ssh: connect to host down port 22: Connection refused. Next: try by hand",
        "ssh-copy-id shut",
        "two has no folder /nowhere/at/all: make one, or set cwd=",
    ):
        assert hint in err
    assert not list(near.folder.glob("pid-*"))


def test_other_versions_are_refused(near: Ground) -> None:
    other = near.folder / "other"
    package = other / "orchestra"
    (package / "launchers").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "_version.py").write_text('__version__ = "0.0.9"\n')
    (package / "launchers" / "__init__.py").write_text("")
    sources = Path(__file__).parents[2] / "src" / "orchestra" / "launchers"
    for name in ("agent.py", "marked_processes.py"):
        (package / "launchers" / name).write_text((sources / name).read_text())
    stand_in = Path(near.ssh)
    stand_in.write_text(stand_in.read_text().replace("/nowhere", str(other)))
    near.hosts = ("one", "elsewhere")
    code, _, err = said(near.start(what="play"))
    assert code == 4
    assert "elsewhere has orchestra 0.0.9, one has" in err
    (package / "_version.py").write_text('from importlib.metadata import version\n__version__ = "0.1.0"\n')
    assert "elsewhere has other sources of orchestra than one" in said(near.start(what="play"))[2]


def test_a_port_in_use_is_told(near: Ground) -> None:
    import socket

    with socket.create_server(("", 0)) as door:
        port = str(door.getsockname()[1])
        code, _, err = said(near.start("--port", port, what="play"))
    assert code == 4
    assert f"ada@one has another program on port {port}" in err


def test_without_ssh(near: Ground) -> None:
    near.ssh = "no-such-ssh"
    code, _, err = said(near.start(what="play"))
    assert code == 3
    assert "no-such-ssh cannot be run here" in err
    assert "Traceback" not in err
