# SPDX-License-Identifier: Apache-2.0
"""The doctor finds what is broken, because it was broken; and neither hangs, crashes nor leaves anything behind."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Orchestra
from tests.processes import is_running
from tests.waiting import wait_until

from orchestra import doctor
from orchestra.cli.doctor import verdict
from orchestra.doctor import CHECKS, Check, Finding, State, examine, find, network, packages, processes
from orchestra.doctor.limits import Groups

ROOT = Path(__file__).resolve().parents[2]
QUICK = [check.name for check in CHECKS if not check.slow]
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="mounts something, in a namespace of its own")
Poison = Callable[[str, str], Path]


@pytest.fixture
def poison(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Poison:
    """Put a package of this name and text before the real one, for the processes of checks; gives its folder."""

    def put(name: str, text: str) -> Path:
        folder = tmp_path_factory.mktemp("poison")
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(text, encoding="utf-8")
        monkeypatch.setenv("PYTHONPATH", str(folder))
        return folder

    return put


def patient(*names: str) -> list[Check]:
    """Checks with all the time in the world: the machine of a test may be busy."""
    return [replace(check, seconds=45) for check in find(names)]


def shell(command: str, folder: Path) -> dict[str, Any]:
    """What the doctor says of checks, and its exit code, in a shell that breaks something before."""
    environment = dict(os.environ) | {
        "PYTHONPATH": str(ROOT / "src"),
        "DOCTOR": f"{sys.executable} -m orchestra doctor",
    }
    done = subprocess.run(
        ["sh", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return {check["name"]: check for check in found["checks"]} | {"code": done.returncode}


# What works.


def test_every_quick_check_answers_and_nothing_stays(orchestra: Orchestra, tmp_path: Path) -> None:
    said = orchestra("doctor", *QUICK, "--json")
    assert said.code == 0, said.out
    assert [check["name"] for check in said.json["checks"]] == QUICK
    for check in said.json["checks"]:
        assert check["found"]
        assert "Error" not in check["found"]
        assert (check["state"] == "fine") == (check["remedy"] == "")
        assert not check["needed"] or check["state"] != "broken"
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_torch_trains_and_takes_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestra.doctor.trial._ALTOGETHER", 50.0)
    found = {check.name: finding for check, finding in examine(patient("torch", "local", "gloo"))}
    assert {finding.state for finding in found.values()} == {State.FINE}, found
    assert "2 processes, 20 steps" in found["local"].found


def test_what_is_needed_is_what_the_package_says() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {name: least for name, _, least in (text.partition(">=") for text in project["dependencies"])}
    assert project["requires-python"] == f">={packages.PYTHON}"
    assert needed.pop("greenlet") == ""  # the simulator does without
    assert needed.pop("cryptography") == ""  # one machine does without
    assert needed == packages.NEEDED


# What is broken.


def test_a_torch_that_hangs_is_ended_with_all_it_started(
    poison: Poison, orchestra: Orchestra, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import subprocess, time, pathlib\n"
    text += "child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
    text += "pathlib.Path(__file__).with_name('pid').write_text(str(child.pid))\ntime.sleep(60)"
    folder = poison("torch", text)
    pid, patience, communicate = folder / "torch" / "pid", 1.4, subprocess.Popen.communicate

    def when_it_hangs(child: subprocess.Popen[Any], said: Any = None, timeout: float | None = None) -> tuple[Any, Any]:
        if timeout == patience:
            wait_until(pid.exists)
        return communicate(child, said, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", when_it_hangs)
    impatient = tuple(replace(check, seconds=patience) if check.name == "torch" else check for check in CHECKS)
    monkeypatch.setattr(doctor, "CHECKS", impatient)
    said = orchestra("doctor", "python", "torch", "local", "--json")
    assert said.code == 3
    python, torch, local = said.json["checks"]
    assert python["state"] == "fine"
    assert torch["state"] == "broken"
    assert torch["found"].startswith("no answer within 1 s")
    assert "pip install" in torch["remedy"]
    assert (local["state"], local["found"], local["remedy"]) == ("untried", "needs torch", "Fix torch first.")
    assert not is_running(int(pid.read_text()))


def test_a_disk_that_hangs_keeps_no_files(
    poison: Poison, orchestra: Orchestra, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    poison("sitecustomize", "import os, time\nos.fsync = lambda fd: time.sleep(60)")
    monkeypatch.setattr(doctor, "CHECKS", [replace(check, seconds=2) for check in CHECKS])
    said = orchestra("doctor", "disk")
    assert said.code == 3
    assert "broken  disk        no answer within 2 s" in said.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("seconds", "found"), [(0.0, "the other checks took too long"), (1.0, "no answer within 1 s, load")]
)
def test_checks_that_there_is_no_time_for(
    seconds: float, found: str, poison: Poison, monkeypatch: pytest.MonkeyPatch, orchestra: Orchestra
) -> None:
    monkeypatch.setattr("orchestra.doctor.trial._ALTOGETHER", seconds)
    poison("sitecustomize", "import os, time\nos.fsync = lambda fd: time.sleep(60)")
    said = orchestra("doctor", "disk")
    assert said.code == 3
    assert f"untried disk        {found}" in said.out
    assert "  disk: Run it alone: orchestra doctor disk." in said.out.splitlines()
    assert "Whether training works on this machine is not known yet: disk took too long." in said.out


def test_a_torch_that_crashes(poison: Poison, orchestra: Orchestra) -> None:
    poison("torch", "import os, sys\nsys.stderr.write('no such instruction\\n')\nsys.stderr.flush()\nos.abort()")
    said = orchestra("doctor", "torch")
    assert said.code == 3
    assert "broken  torch       died of SIGABRT without an answer: no such instruction" in said.out
    assert said.out.splitlines()[-1] == "Training on this machine will fail until this is fixed: torch."


def test_a_torch_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(packages.NEEDED, "torch", "99.1")
    finding = processes.torch_itself()
    assert finding.state is State.BROKEN
    assert finding.remedy == "pip install 'torch>=99.1'"


def test_packages_that_are_missing(
    poison: Poison, orchestra: Orchestra, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(
        "greenlet",
        "print('looking for myself', flush=True)\nraise ModuleNotFoundError('not here', name='greenlet')",
    )
    said = orchestra("doctor", "extras", "packages", "--json")
    needed, extras = said.json["checks"]
    assert (said.code, needed["state"], extras["state"]) == (0, "fine", "limited")
    assert "greenlet missing (without it the simulator uses slower threads)" in extras["found"]
    assert "greenlet" in extras["remedy"]
    assert "psutil" in extras["found"]
    monkeypatch.setattr("orchestra.__file__", str(tmp_path / "lib" / "orchestra" / "__init__.py"))
    assert "psutil" not in packages.extras().found
    poison("cloudpickle", "import nothing_of_the_kind")
    said = orchestra("doctor", "packages", "--json")
    assert said.code == 3
    assert said.json["checks"][0]["found"] == "cloudpickle missing, because nothing_of_the_kind is"


def test_folders_that_cannot_be_written(orchestra: Orchestra, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ORCHESTRA_DATA", "/proc/nowhere")
    said = orchestra("doctor", "cache", "--json")
    assert said.code == 0  # only for some uses
    assert said.json["checks"][0]["state"] == "broken"
    assert "ORCHESTRA_DATA" in said.json["checks"][0]["remedy"]
    monkeypatch.chdir("/proc")
    assert orchestra("doctor", "disk").code == 3


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    found = shell("mkdir gone; cd gone; rmdir ../gone; $DOCTOR disk python --json", tmp_path)
    assert (found["code"], found["disk"]["state"], found["python"]["state"]) == (3, "broken", "fine")
    assert found["disk"]["found"].startswith("FileNotFoundError")
    assert "--out" in found["disk"]["remedy"]


@AS_ROOT
def test_a_full_disk(tmp_path: Path) -> None:
    mount = "mkdir small; mount -t tmpfs -o size=1m none small; cd small"
    found = shell(f"unshare -m sh -c '{mount}; $DOCTOR disk --json'", tmp_path)
    assert found["code"] == 3
    assert "No space left" in found["disk"]["found"]
    assert not list((tmp_path / "small").iterdir())


@AS_ROOT
def test_dev_shm_that_is_read_only(tmp_path: Path) -> None:
    found = shell("unshare -m sh -c 'mount -t tmpfs -o ro none /dev/shm; $DOCTOR shm --json'", tmp_path)
    assert (found["code"], found["shm"]["state"]) == (0, "limited")
    assert "memfd: 1.1 TB mapped" in found["shm"]["found"]
    assert "/dev/shm cannot be written: Read-only file system" in found["shm"]["found"]
    assert "--shm-size" in found["shm"]["remedy"]


def test_few_descriptors_and_little_address_space(tmp_path: Path) -> None:
    found = shell("ulimit -n 32; $DOCTOR limits shm --json", tmp_path)
    assert (found["limits"]["state"], found["shm"]["state"]) == ("limited", "fine")
    assert "ulimit -n" in found["limits"]["remedy"]
    found = shell("ulimit -v 2000000; $DOCTOR limits shm --json", tmp_path)
    assert "ulimit -v" in found["limits"]["remedy"]
    assert "memfd: 1.1 GB mapped" in found["shm"]["found"]


def test_nothing_in_the_environment(tmp_path: Path) -> None:
    command = f"env -i PYTHONPATH={ROOT / 'src'} $DOCTOR packages namespaces terminal --json"
    found = shell(command, tmp_path)
    assert found["code"] == 0
    assert found["packages"]["state"] == "fine"


def test_a_terminal_without_greek(tmp_path: Path) -> None:
    found = shell("mkdir ü; cd ü; PYTHONIOENCODING=ascii $DOCTOR terminal disk --json", tmp_path)
    assert found["terminal"]["state"] == "limited"
    assert "unset PYTHONIOENCODING" in found["terminal"]["remedy"]
    assert "ü" in found["disk"]["found"]


@AS_ROOT
def test_without_rights_there_is_no_laboratory() -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setuid(65534)
        os.write(write, network.namespaces().found.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 1000) == b"needs root, only for the laboratory"
    os.close(read)
    os.close(write)


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("0::/a/b", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000", "a/memory.max": "2000"}),
        (
            "3:cpu,cpuacct:/a\n4:memory:/a",
            {
                "cpu,cpuacct/a/cpu.cfs_quota_us": "150000",
                "cpu,cpuacct/a/cpu.cfs_period_us": "100000",
                "cpu,cpuacct/cpu.cfs_quota_us": "-1",
                "memory/a/memory.limit_in_bytes": "2000",
                "memory/memory.limit_in_bytes": str(2**63 - 4096),
            },
        ),
        ("3:cpu:/elsewhere\n0::/", {"cpu/cpu.cfs_quota_us": "150000", "unified/memory.max": "2000"}),
    ],
    ids=["version 2", "version 1", "both, of a container"],
)
def test_limits_of_control_groups(own: str, files: dict[str, str], tmp_path: Path) -> None:
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n", encoding="utf-8")
        used = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}.get(path.name)
        if used:
            path.with_name(used).write_text("1500\n", encoding="utf-8")
    if "cpu/cpu.cfs_quota_us" in files:
        (tmp_path / "groups/cpu/cpu.cfs_period_us").write_text("100000", encoding="utf-8")
    (tmp_path / "own").write_text(own, encoding="utf-8")
    groups = Groups(root=tmp_path / "groups", own=tmp_path / "own")
    assert groups.quota() == 1.5
    assert groups.memory() == (2000, 500)
    assert groups.processes() is None


def test_a_control_group_without_limits(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(str(2**63 - 4096), encoding="utf-8")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("1500", encoding="utf-8")
    (tmp_path / "own").write_text("4:memory:/\n", encoding="utf-8")
    groups = Groups(root=tmp_path, own=tmp_path / "own")
    assert (groups.quota(), groups.memory()) == (None, None)


# What is said.


def test_the_list_and_names_that_are_not_in_it(orchestra: Orchestra) -> None:
    said = orchestra("doctor", "--list")
    assert [line.split()[0] for line in said.out.splitlines()] == [check.name for check in CHECKS]
    assert "train with two processes (needed, takes seconds)" in said.out
    assert [check["name"] for check in orchestra("doctor", "--list", "disk", "--json").json] == ["disk"]
    said = orchestra("doctor", "disk", "troch")
    assert said.code == 2
    assert "did you mean 'torch'?" in said.err


def test_a_pipe_gets_a_line_for_each_check_without_colour(orchestra: Orchestra, tmp_path: Path) -> None:
    said = orchestra("doctor", "python", "disk")
    lines = said.out.splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["fine", "python"], ["fine", "disk"]]
    assert lines[2:] == ["", "What was tried works."]
    assert "\x1b" not in said.out


@pytest.mark.parametrize("columns", [80, 40])
def test_a_terminal_is_filled_and_not_more(columns: int, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {"PYTHONPATH": str(ROOT / "src"), "TERM": "xterm", "PATH": os.environ["PATH"]}
    command = [sys.executable, "-m", "orchestra", "doctor", "clock", "memory"]
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, env=environment, cwd=tmp_path, check=False)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == 0
    assert "\x1b[32mfine\x1b[0m    memory" in shown
    lines = re.sub(r"\x1b\[\d+m", "", shown).split("\r\n")
    assert columns - 20 < max(map(len, lines)) <= columns


def test_ctrl_c_leaves_nothing_behind(poison: Poison, tmp_path: Path) -> None:
    text = "import os, time, pathlib\npathlib.Path(__file__).with_name('pid').write_text(str(os.getpid()))\n"
    folder = poison("torch", text + "time.sleep(60)")
    path = os.pathsep.join([str(ROOT / "src"), str(folder)])
    with subprocess.Popen(
        [sys.executable, "-m", "orchestra", "doctor", "torch"],
        env=dict(os.environ) | {"PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        note = folder / "torch" / "pid"
        wait_until(lambda: note.exists() and note.read_text())
        command.send_signal(signal.SIGINT)
        _, err = command.communicate(timeout=9)  # sooner than the check would end by itself
    assert command.returncode == 130
    assert "Traceback" not in err
    assert not is_running(int(note.read_text()))


@pytest.mark.parametrize(
    ("states", "sentence"),
    [
        ({}, "Everything works."),
        (
            {"cuda": "broken", "shm": "limited"},
            "Training on this machine works. Not fine, for some uses only: shm, cuda.",
        ),
        (
            {"cuda": "broken", "shm": "broken"},
            "Training on this machine will fail until this is fixed: shm.",
        ),
    ],
)
def test_the_verdict(states: dict[str, str], sentence: str) -> None:
    assert verdict([(check, Finding(State(states.get(check.name, "fine")), "")) for check in CHECKS]) == sentence


def test_the_same_remedy_is_told_once(poison: Poison, orchestra: Orchestra) -> None:
    poison("torch", "raise ImportError('broken on purpose')")
    said = orchestra("doctor", "torch", "local", "gloo")
    assert "broken  torch       ImportError: broken on purpose" in said.out
    assert "  local, gloo: Fix torch first." in said.out.splitlines()
