# SPDX-License-Identifier: Apache-2.0
"""Files for Slurm, Kubernetes and Compose: that they can be read, and that each process would find its place."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cli.conftest import Orchestra, Said
from tests.cli.conftest import orchestra as orchestra  # the fixture

from orchestra.launchers.templates import KINDS, template

COMMAND = ("run", "digits", "--strategy", "ps(consistency=asp())", "--out", "$(a) it's $b")


def printed(orchestra: Orchestra, kind: str, *options: str) -> str:
    said: Said = orchestra("launch", "--print", kind, "--nodes", "2", "--per-host", "3", *options, "--", *COMMAND)
    assert said.code == 0
    assert said.err == ""
    return said.out


@pytest.mark.parametrize("kind", KINDS)
def test_there_is_nothing_to_fill_in_and_nothing_secret(kind: str) -> None:
    text = template(kind, COMMAND)
    assert text == template(kind, COMMAND)  # so there is no token in it
    assert not re.search(r"<[A-Za-z_ -]+>|\{\w*\}|TODO|FIXME|\b[0-9a-f]{32,}\b", text)
    assert "# Change: " in text
    assert text.endswith("\n")


# Slurm: with its commands played by others.

SRUN = """\
#!/bin/sh
test "$1" = --kill-on-bad-exit=1 && test "$SRUN_CPUS_PER_TASK" = 4 && shift || exit 9
for task in 0 1 2 3 4 5; do
  SLURM_PROCID=$task SLURM_LOCALID=$((task % 3)) SLURM_NTASKS=6 SLURM_NTASKS_PER_NODE=3 "$@" || exit 1
done
"""
PYTHON = """\
#!/bin/sh
test "$1" = -c && exec {python} "$@"
exec {python} -c 'import json, os, stat, sys
path = os.environ["ORCHESTRA_TOKEN_FILE"]
modes = [stat.S_IMODE(os.stat(each).st_mode) for each in (os.path.dirname(path), path)]
found = dict(os.environ) | {{"argv": sys.argv[1:], "token": open(path).read().strip(), "modes": modes}}
print(json.dumps(found))' "$@"
"""


def test_slurm(orchestra: Orchestra, tmp_path: Path) -> None:
    text = printed(orchestra, "slurm")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=3"} <= set(text.splitlines())
    assert all("# " not in line for line in text.splitlines() if line.startswith("#SBATCH"))
    tools = tmp_path / "tools"
    tools.mkdir()
    scontrol = '#!/bin/sh\ntest "$*" = "show hostnames n[7-8]" && printf "n7\\nn8\\n"\n'
    for name, script in (("srun", SRUN), ("scontrol", scontrol), ("python", PYTHON.format(python=sys.executable))):
        (tools / name).write_text(script)
        (tools / name).chmod(0o755)
    said = subprocess.run(
        ["bash"],
        input=text,
        cwd=tmp_path,
        env={
            "PATH": f"{tools}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "123456",
            "SLURM_JOB_NODELIST": "n[7-8]",
            "SLURM_CPUS_PER_TASK": "4",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    tasks = [json.loads(line) for line in said.stdout.splitlines()]
    assert [task["RANK"] for task in tasks] == list("012345")
    assert [task["LOCAL_RANK"] for task in tasks] == list("012012")
    for task in tasks:
        assert (task["WORLD_SIZE"], task["LOCAL_WORLD_SIZE"]) == ("6", "3")
        assert (task["MASTER_ADDR"], task["MASTER_PORT"]) == ("n7", "23456")
        assert task["argv"] == ["-m", "orchestra", *COMMAND]
        assert re.fullmatch("[0-9a-f]{64}", task["token"])
        assert task["modes"] == [0o700, 0o600]
    assert not list(tmp_path.glob(".*"))  # they are gone with the job


# Kubernetes.


def test_kubernetes(orchestra: Orchestra) -> None:
    service, claim, job = yaml.safe_load_all(printed(orchestra, "kubernetes", "--image", "mine:1"))
    assert [(d["apiVersion"], d["kind"]) for d in (service, claim, job)] == [
        ("v1", "Service"),
        ("v1", "PersistentVolumeClaim"),
        ("batch/v1", "Job"),
    ]
    name = job["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"job-name": name}
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 6, 6)
    assert spec["backoffLimit"] == 0
    assert pod["restartPolicy"] == "Never"
    assert pod["shareProcessNamespace"] is True  # else SIGTERM is not heard by who has no handler for it
    assert pod["subdomain"] == service["metadata"]["name"]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    (container,) = pod["containers"]
    assert container["image"] == "mine:1"
    env = {entry["name"]: entry for entry in container["env"]}
    assert env["ORCHESTRA_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": f"{name}-token", "key": "token"}
    values = {key: entry.get("value") for key, entry in env.items()}
    assert (values["WORLD_SIZE"], values["MASTER_ADDR"]) == ("6", f"{name}-0.{name}")
    assert (values["LOCAL_RANK"], values["LOCAL_WORLD_SIZE"]) == ("0", "1")
    assert not [word for word in container["args"] if re.search(r"(?<!\$)\$\(", word)]  # it would be replaced
    words = container["command"] + [word.replace("$$(", "$(") for word in container["args"]]
    assert words[-len(COMMAND) :] == list(COMMAND)
    # As Kubernetes would start it, with an echo for Python.
    words[words.index("python")] = "/bin/echo"
    shell = subprocess.run(
        [*words[:2], words[2].replace("exec", 'echo "rank $RANK"; exec'), *words[3:]],
        env={"JOB_COMPLETION_INDEX": "4"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shell.stdout.splitlines() == ["rank 4", " ".join(["-m", "orchestra", *COMMAND])]


# Compose.


def test_compose(orchestra: Orchestra) -> None:
    file: dict[str, Any] = yaml.safe_load(printed(orchestra, "docker-compose"))
    assert sorted(file["services"]) == [f"rank-{k}" for k in range(6)]
    assert file["secrets"] == {"token": {"file": "./orchestra.token"}}
    for rank in range(6):
        service = file["services"][f"rank-{rank}"]
        told = service["environment"]
        assert (told["RANK"], told["WORLD_SIZE"], told["MASTER_ADDR"]) == (str(rank), "6", "rank-0")
        assert told["ORCHESTRA_TOKEN_FILE"] == "/run/secrets/token"
        assert service["secrets"] == ["token"]
        assert all(isinstance(value, str) for value in told.values())
        assert [word.replace("$$", "$") for word in service["command"]] == ["python", "-m", "orchestra", *COMMAND]
        assert "$(a)" not in json.dumps(service["command"]).replace("$$", "")


def test_a_token_beside_a_checkout_gets_into_no_image_and_no_commit() -> None:
    """The files say to make one there, and to build an image of that folder."""
    for name in (".dockerignore", ".gitignore"):
        assert "*.token" in (Path(__file__).parents[2] / name).read_text().splitlines()


def test_what_cannot_be_printed(orchestra: Orchestra) -> None:
    said = orchestra("launch", "--print", "slrm", "--nodes", "0", "--", "run", "digits")
    assert said.code == 2
    assert "did you mean 'slurm'?" in said.err
    assert "must be at least 1" in said.err
    assert "is for containers" in orchestra("launch", "--print", "slurm", "--image", "x", "--", "run", "digits").err
