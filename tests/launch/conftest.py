# SPDX-License-Identifier: Apache-2.0
"""Ways to reach hosts: a stand-in for ssh, and a private sshd on a port of this machine where there is one."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.processes import free_port
from tests.waiting import wait_until

SOURCES = str(Path(__file__).parents[2] / "src")

# A clean environment, as of a login; hosts called `down` do not answer, `elsewhere` has no Python of ours.
STAND_IN = f"""\
#!/bin/sh
host=$1; shift
case $host in
  *down*) echo "ssh: connect to host $host port 22: Connection refused" >&2; exit 255;;
  *shut*) echo "$host: Permission denied (publickey)." >&2; exit 255;;
  *elsewhere*) exec env -i PATH=/usr/bin:/bin PYTHONPATH=/nowhere FAR=$host sh -c "$*";;
esac
echo "welcome to $host"
exec env -i PATH=/usr/bin:/bin PYTHONPATH={SOURCES} FAR=$host sh -c "$*"
"""

# What the processes of a run are in these tests; `--` what it does, and for which rank.
NODE = """\
import json, os, signal, subprocess, sys, time
from pathlib import Path
what, here, rank = sys.argv[1], Path(__file__).parent, int(os.environ["RANK"])
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT ORCHESTRA_TOKEN MINE".split()

def saves(number, frame):
    (here / f"saved-{rank}").write_text(signal.Signals(number).name)
    print("saved", flush=True)
    sys.exit(128 + number)

if what == "show":
    print(json.dumps({name: os.environ.get(name) for name in names} | {"cwd": os.getcwd()}))
    sys.exit(0)
def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.01)

if what == "fail" and rank == 1:
    wait_for("pid-0")  # which handles signals by then
    print("the cause", file=sys.stderr)
    sys.exit(9)
if what == "late" and rank == 0:
    wait_for("begun-1")
    print("node 1 is gone", file=sys.stderr)
    sys.exit(6)
if what == "late" and rank == 1:
    (here / "begun-1").touch()
    time.sleep(1)
    print("the cause", file=sys.stderr)
    sys.exit(1)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN if what == "stubborn" else saves)
if what == "family":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", str(here)], start_new_session=True)
print("playing", flush=True)
print("grumbling", file=sys.stderr, flush=True)
(here / f"pid-{rank}").write_text(str(os.getpid()))
time.sleep(600)
"""


def command_lines() -> dict[int, str]:
    """Of all processes."""
    found = {}
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdecimal():
                found[int(name)] = (
                    Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
    return found


@dataclass
class Ground:
    """A folder with a node's script, and a way to start launchers in it."""

    folder: Path
    ssh: str
    hosts: Sequence[str]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *options: str, what: str, per_host: int = 1) -> subprocess.Popen[str]:
        (self.folder / "node.py").write_text(NODE)
        (self.folder / "hosts.txt").write_text("".join(f"{host} slots={per_host}\n" for host in self.hosts))
        words = ["--hosts", "hosts.txt", "--ssh", self.ssh, "--master", "127.0.0.1", *options, "--"]
        self.started.append(
            subprocess.Popen(
                [sys.executable, "-m", "orchestra", "launch", *words, "python", str(self.folder / "node.py"), what],
                cwd=self.folder,
                env=os.environ | {"PYTHONPATH": SOURCES},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        return self.started[-1]

    def left(self) -> list[str]:
        """Command lines of processes that belong to this folder, but for launchers."""
        own = {process.pid for process in self.started}
        return [line for pid, line in command_lines().items() if str(self.folder) in line and pid not in own]

    def far_ends(self) -> list[int]:
        """Processes between a connection and a node."""
        nodes = [int(path.read_text()) for path in self.folder.glob("pid-*")]
        return [parent_of(pid) for pid in nodes]

    def await_players(self, count: int) -> None:
        wait_until(lambda: len([p for p in self.folder.glob("pid-*") if p.read_text()]) == count)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _stand_in(folder: Path) -> str:
    path = folder / "fakessh"
    path.write_text(STAND_IN)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def near(tmp_path: Path) -> Iterator[Ground]:
    """Two hosts behind a stand-in for ssh."""
    yield from _ground(Ground(tmp_path, _stand_in(tmp_path), ("ada@one", "two")))


@pytest.fixture
def far(tmp_path: Path, sshd: str) -> Iterator[Ground]:
    """Two addresses of this machine behind a real sshd."""
    yield from _ground(Ground(tmp_path, sshd, ("127.0.0.1", f"{getpass.getuser()}@127.0.0.2")))


def _ground(ground: Ground) -> Iterator[Ground]:
    try:
        yield ground
    finally:
        for process in ground.started:
            process.kill()
            process.communicate()
        for pid, line in command_lines().items():
            if str(ground.folder) in line and "pytest" not in line:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture(params=["near", pytest.param("far", marks=pytest.mark.nightly)])
def ground(request: pytest.FixtureRequest) -> Ground:
    """Either."""
    found: Ground = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A command that reaches a private sshd on the loopback interface, with keys of its own."""
    program = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None or shutil.which("ssh") is None or shutil.which("ssh-keygen") is None:
        pytest.skip("there is no sshd here: apt-get install openssh-server")
    folder = tmp_path_factory.mktemp("sshd")
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    (folder / "authorized").write_text((folder / "user.pub").read_text())
    port = free_port()
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nListenAddress 127.0.0.2\nHostKey {folder / 'host'}\n"
        f"AuthorizedKeysFile {folder / 'authorized'}\nPidFile none\nStrictModes no\nUsePAM no\n"
        f"PasswordAuthentication no\nPermitRootLogin yes\nMaxStartups 100\nSetEnv PYTHONPATH={SOURCES}\n"
    )
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where it separates its privileges
    server = subprocess.Popen([program, "-D", "-e", "-f", str(folder / "config")], stderr=subprocess.DEVNULL)
    known = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR -F none"
    try:
        command = f"ssh -p {port} -i {folder / 'user'} -o IdentitiesOnly=yes {known}"
        for _ in range(100):
            if (
                subprocess.run([*command.split(), "127.0.0.1", "true"], capture_output=True, check=False).returncode
                == 0
            ):
                break
            if server.poll() is not None:
                pytest.skip("sshd does not start here")
            time.sleep(0.05)
        else:
            pytest.skip("sshd accepts no login here")
        yield command
    finally:
        server.kill()
        server.wait()
