# SPDX-License-Identifier: Apache-2.0
"""Labs come and go: built twice, taken down twice, killed half way, used by commands that fail or are interrupted."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.lab.conftest import left_of, soon

from orchestra.errors import ConfigError, EnvironmentProblem
from orchestra.lab import Lab, build, ip_commands, running
from orchestra.lab.cpu_shares import Cgroups, find_cgroups
from orchestra.lab.inspection import look
from orchestra.lab.plan import host_of, make_plan, switch_of

ROOT = Path(__file__).parents[2]

# Builds a lab, and is killed right after its n-th command has begun.
KILLED = """
import os, signal, subprocess, sys
from orchestra.lab import Lab
name, last = sys.argv[1], int(sys.argv[2])
class Popen(subprocess.Popen):
    begun = 0
    def __init__(self, *words, **more):
        super().__init__(*words, **more)
        Popen.begun += 1
        if Popen.begun == last:
            os.kill(os.getpid(), signal.SIGKILL)
subprocess.Popen = Popen
with Lab(hosts=2, rate="10mbit", latency="1ms", cpu=0.5, name=name):
    print("built")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def orchestra(*words: str) -> subprocess.Popen[str]:
    """The command line in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "orchestra", *words],
        env=dict(os.environ) | {"PYTHONPATH": str(ROOT / "src")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_down_may_be_said_twice_and_up_too(name: str) -> None:
    assert not build.down(name)
    build.up(make_plan(name=name, hosts=3, rate="10mbit", latency="1ms", cpu=0.5))
    build.up(make_plan(name=name, hosts=2, rate="20mbit"))
    found = look(name)
    assert (found.size, found.machines[0].up, found.machines[0].latency, found.machines[0].cpu) == (2, 20e6, 0, None)
    assert not found.broken
    assert build.down(name)
    assert not left_of(name)
    assert not build.down(name)


def kill_after(last: int, name: str) -> bool:
    """Begin to build and be killed; whether it came to its end before."""
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, name, str(last)],
        env=dict(os.environ) | {"PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    return ended.stdout == "built\n"


@pytest.mark.nightly
def test_whenever_its_builder_is_killed_a_lab_can_be_taken_down(name: str) -> None:
    for last in range(1, 100):
        built = kill_after(last, name)
        assert build.down(name)
        assert not left_of(name), f"after command {last}"
        if built:
            assert last > 8
            return


def fake(tool: str, words: str, instead: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something else first where a tool is called with such words."""
    real = shutil.which(tool)
    (folder / tool).write_text(f'#!/bin/sh\ncase "$*" in {words}) {instead};; esac\nexec {real} "$@"\n')
    (folder / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_taking_down_waits_for_what_a_killed_builder_had_begun(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake("ip", "*netns?add*", "sleep 0.5", tmp_path, monkeypatch)
    kill_after(1, name)
    assert build.down(name)
    time.sleep(0.6)
    assert not left_of(name)


def test_what_runs_inside_is_ended_with_it(name: str) -> None:
    build.up(make_plan(name=name, hosts=1, cpu=0.5))
    # It has left the session, and its environment, and closed its files.
    lab = Lab(hosts=1, name=name)
    hidden = subprocess.run(
        lab.command(1, ["setsid", "--fork", "env", "-i", "sleep", "1000"]), env=lab.environment(1), check=True
    )
    assert hidden.returncode == 0
    assert soon(lambda: len(ip_commands.processes_in([host_of(name, 1)])) == 1)
    (pid,) = ip_commands.processes_in([host_of(name, 1)])
    build.down(name)
    assert not os.path.exists(f"/proc/{pid}") or soon(lambda: not os.path.exists(f"/proc/{pid}"))


def test_a_delay_line_ends_when_its_namespace_loses_its_name(name: str) -> None:
    build.up(make_plan(name=name, hosts=2, latency="1ms"))
    (line,) = ip_commands.processes_in([switch_of(name)])
    subprocess.run(["ip", "netns", "delete", switch_of(name)], check=True)
    assert soon(lambda: not os.path.exists(f"/proc/{line}"))


def test_a_lab_without_its_delay_line_is_not_used(name: str) -> None:
    with Lab(hosts=2, latency="1ms", name=name) as lab:
        (line,) = ip_commands.processes_in([switch_of(name)])
        os.kill(line, signal.SIGKILL)
        assert soon(lambda: not os.path.exists(f"/proc/{line}"))
        assert lab.look().broken
        with pytest.raises(EnvironmentProblem, match="delay line died"):
            lab.run(["true"])


# Commands.


def test_a_command_runs_on_all_hosts_with_its_lines_told_apart(name: str) -> None:
    out, err = io.BytesIO(), io.BytesIO()
    tell = "echo $ORCHESTRA_LAB_RANK of $ORCHESTRA_LAB_SIZE; echo $ORCHESTRA_LAB_ADDRESS >&2; printf $MASTER_ADDR"
    with Lab(hosts=3, name=name) as lab:
        first, *_ = addresses = lab.look().addresses
        assert lab.run(["sh", "-c", tell], out=out, err=err) == 0
    for k in (1, 2, 3):
        mine = [line for line in out.getvalue().decode().splitlines() if line.startswith(f"host-{k} | ")]
        assert mine == [f"host-{k} | {k - 1} of 3", f"host-{k} | {first}"]
        assert f"host-{k} | {addresses[k - 1]}\n" in err.getvalue().decode()


@pytest.mark.parametrize("goes_on", ["sleep 1000", "while :; do echo going on; sleep 0.01; done"])
def test_the_first_that_fails_ends_the_others(goes_on: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_GRACE", 0.5)
    # Each leaves a program behind that is in no group or session of its own any more.
    stubborn = f"setsid sleep 1000 & test $RANK != 1 || {{ sleep 0.2; exit 7; }}; trap '' TERM; {goes_on}"
    with Lab(hosts=3, name=name) as lab:
        begun = time.monotonic()
        assert lab.run(["sh", "-c", stubborn], out=io.BytesIO(), err=io.BytesIO()) == 7
        assert time.monotonic() - begun < 15
        assert lab.look().processes == 0


def test_a_failing_command_on_one_host_says_its_status(name: str) -> None:
    with Lab(hosts=2, name=name) as lab:
        assert lab.run(["sh", "-c", "exit 3"], host=2) == 3
        assert lab.run(["sh", "-c", "kill -TERM $$"], host=1) == 128 + signal.SIGTERM
        for host in (0, 3):
            with pytest.raises(ConfigError, match="count from 1 to 2"):
                lab.run(["true"], host=host)


@pytest.mark.parametrize(
    ("hosts", "number", "code"),
    [
        ((), signal.SIGINT, 130),
        ((), signal.SIGTERM, 143),
        ((), signal.SIGKILL, -signal.SIGKILL),
        (("--host", "1"), signal.SIGINT, 130),
    ],
)
def test_a_run_that_is_stopped_leaves_nothing(hosts: tuple[str, ...], number: int, code: int, name: str) -> None:
    with Lab(hosts=2, name=name) as lab:
        # Who kills us outright leaves it to the kernel to end what we started, and that reaches no further.
        hidden = "" if number == signal.SIGKILL else "setsid sleep 1000 & "
        run = orchestra("lab", "run", "--name", name, *hosts, "--", "sh", "-c", f"{hidden}echo begun; exec sleep 1000")
        assert run.stdout is not None
        for _ in range(1 if hosts else 2):
            assert run.stdout.readline().endswith("begun\n")
        run.send_signal(number)
        _, err = run.communicate(timeout=40)
        assert run.returncode == code, err
        assert "Traceback" not in err
        assert soon(lambda: lab.look().processes == 0)


def test_what_is_stopped_may_save_first(name: str) -> None:
    with Lab(hosts=2, name=name):
        saving = "trap 'echo saved; exit 0' INT; echo begun; while :; do sleep 0.05; done"
        run = orchestra("lab", "run", "--name", name, "--", "sh", "-c", saving)
        assert run.stdout is not None
        for _ in range(2):
            assert run.stdout.readline().endswith("begun\n")
        run.send_signal(signal.SIGTERM)
        out, _ = run.communicate(timeout=40)
        assert run.returncode == 143
        assert out.count("saved") == 2


def test_hosts_share_the_cores_and_have_a_token(name: str) -> None:
    with Lab(hosts=2, name=name):
        tell = 'echo "$OMP_NUM_THREADS ${ORCHESTRA_TOKEN_FILE-none} ${#ORCHESTRA_TOKEN}"'  # in no file
        out, _ = orchestra("lab", "run", "--name", name, "--", "sh", "-c", tell).communicate(timeout=40)
        threads = max(1, len(os.sched_getaffinity(0)) // 2)
        assert re.fullmatch(rf"(host-\d \| {threads} none 64\n){{2}}", out), out


# Where there can be none.


def test_a_lab_without_root_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for refused in (lambda: build.up(make_plan(hosts=2)), lambda: build.down("orchestra"), lambda: look("orchestra")):
        with pytest.raises(EnvironmentProblem, match=r"needs root.*sudo.*lab compose"):
            refused()


def test_without_the_tools_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EnvironmentProblem, match=r"ip and tc not found.*Install iproute2"):
        build.up(make_plan(hosts=2))


@pytest.mark.parametrize(
    ("tool", "words", "complaint", "remedy"),
    [
        ("tc", "*batch*", "Error: Specified qdisc kind is unknown.", "qdisc add dev eth0 root tbf.*CONFIG_NET_SCH_TBF"),
        ("ip", "*batch*", "Error: Unknown device type.", "CONFIG_VETH"),
        ("ip", "*netns?add*", "mount --make-shared /run/netns failed: Operation not permitted", "--privileged"),
        ("ip", "*netns?exec*", "No such device", "CONFIG_TUN"),
    ],
)
def test_a_kernel_that_lacks_something_is_named(
    tool: str, words: str, complaint: str, remedy: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = "\nCommand failed -:1" if "batch" in words else ""
    fake(tool, words, f'echo "{complaint}{batch}" >&2; exit 2', tmp_path, monkeypatch)
    with pytest.raises(EnvironmentProblem, match=remedy):
        build.up(make_plan(name=name, hosts=2, rate="10mbit", latency="1ms"))
    assert not left_of(name)


def test_without_cgroups_no_share_is_promised(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(name=name, hosts=1, cpu=0.5)
    monkeypatch.setattr(build, "find_cgroups", lambda: None)
    with pytest.raises(EnvironmentProblem, match="Leave --cpu out"):
        build.up(plan)
    unwritable = Path("/proc/fs")
    monkeypatch.setattr(build, "find_cgroups", lambda: Cgroups(unwritable, unified=False))
    with pytest.raises(EnvironmentProblem, match=r"cannot be limited.*Leave --cpu out"):
        build.up(plan)
    assert not left_of(name)


def test_both_versions_of_cgroups_are_found_and_written(tmp_path: Path) -> None:
    one, two, mounts = tmp_path / "one", tmp_path / "two", tmp_path / "mounts"
    for folder in (one, two):
        (folder / "orchestra-host-1").mkdir(parents=True)
    (two / "cgroup.controllers").write_text("cpuset cpu io\n")
    (two / "cgroup.subtree_control").write_text("memory\n")
    mounts.write_text(f"cgroup2 {two} cgroup2 rw 0 0\n")
    newer = find_cgroups(mounts)
    assert newer == Cgroups(two, unified=True)
    newer.limit("orchestra-host-1", 0.25)
    assert (two / "cgroup.subtree_control").read_text() == "+cpu"
    assert (two / "orchestra-host-1" / "cpu.max").read_text() == "2500 10000"
    assert newer.share("orchestra-host-1") == 0.25
    mounts.write_text(f"cgroup2 {tmp_path} cgroup2 rw 0 0\ncgroup {one} cgroup rw,cpu,cpuacct 0 0\n")
    older = find_cgroups(mounts)
    assert older == Cgroups(one, unified=False)
    older.limit("orchestra-host-1", 0.05)  # the kernel takes no quota below a millisecond
    assert (one / "orchestra-host-1" / "cpu.cfs_quota_us").read_text() == "1000"
    assert older.share("orchestra-host-1") == 0.05
    assert older.labs() == {"orchestra"}
    mounts.write_text("cgroup /nowhere cgroup rw,memory 0 0\n")
    assert find_cgroups(mounts) is None
