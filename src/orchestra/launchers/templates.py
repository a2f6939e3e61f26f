# SPDX-License-Identifier: Apache-2.0
"""Files that start a run: for Slurm, Kubernetes and Docker Compose.

Each file starts the same command many times and gives every process its rank, the address of the first, and the token.
The token is made together with the job, and kept where only the job can read it: a file of mode 600, or a secret. Lines
that most users change have a comment that begins with `Change:`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence

from orchestra.errors import ConfigError, Problem, nearest
from orchestra.launchers.hosts import PORT, argv, place

NAME = "orchestra"
_IMAGE = "neural-orchestra:latest"


def template(kind: str, command: Sequence[str], *, nodes: int = 2, per_host: int = 1, image: str | None = None) -> str:
    """Return the text of a file. Containers count as machines: each has one process."""
    problems = []
    if kind not in KINDS:
        problems.append(Problem("print", kind, f"is not a kind of template; {nearest(kind, KINDS)}"))
    for name, count in (("nodes", nodes), ("per-host", per_host)):
        if count < 1:
            problems.append(Problem(name, count, "must be at least 1"))
    if image is not None and kind == "slurm":
        problems.append(Problem("image", image, "is for containers, and Slurm starts none: leave it out"))
    if problems:
        raise ConfigError(problems)
    return KINDS[kind](argv(command, "python"), nodes, per_host, image or _IMAGE)


_SLURM = """\
#!/bin/bash
# {count} processes of one run: {shown}
# Start it with sbatch FILE. scancel, and the end of the time, let the run save and stop (a script, if it does).

#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={per_host}
# Change: cores of each process, and how long it may take; two minutes before, all are asked to stop.
#SBATCH --cpus-per-task=4
#SBATCH --time=01:00:00
#SBATCH --signal=TERM@120
# Change: a GPU for each process, and where it runs (take one # away).
##SBATCH --gpus-per-task=1
##SBATCH --partition=gpu

set -euo pipefail
# Change: make `python` the one that has orchestra, the same on every node
# source "$HOME/venv/bin/activate"

# The token lets a process take part. It is in a folder that only you can enter, inside that of the job, which all nodes
# must see; both are gone with the job.
private=$(mktemp -d "$PWD/.{name}-$SLURM_JOB_ID-XXXXXX")
trap 'rm -rf "$private"' EXIT
export ORCHESTRA_TOKEN_FILE="$private/token"
(umask 077 && python -c 'import secrets; print(secrets.token_hex(32))' > "$ORCHESTRA_TOKEN_FILE")

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))    # jobs that share a node differ

# A process that fails ends the others: they are asked to stop (SIGTERM), and killed half a minute later (KillWait).
export SRUN_CPUS_PER_TASK=${{SLURM_CPUS_PER_TASK:-1}}    # srun does not take it over by itself
srun --kill-on-bad-exit=1 bash -c '
  export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS
  export LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE
  exec "$@"' {name} \\
  {command}
"""


def _slurm(command: Sequence[str], nodes: int, per_host: int, image: str) -> str:
    return _SLURM.format(
        name=NAME,
        nodes=nodes,
        per_host=per_host,
        count=nodes * per_host,
        command=shlex.join(command),
        shown=_shown(command),
    )


_KUBERNETES = """\
# {count} processes of one run, a pod each: {shown}
#
#   openssl rand -hex 32 | tr -d '\\n' | kubectl create secret generic {name}-token --from-file=token=/dev/stdin
#   kubectl apply -f FILE
#   kubectl logs -f -l job-name={name},batch.kubernetes.io/job-completion-index=0      output of rank 0
#   kubectl delete -f FILE && kubectl delete secret {name}-token
# The last line deletes {name}-runs as well: copy the model out of it before.
#
# The token lets a process take part: it is made once, by the first command, and is in no file.
apiVersion: v1
kind: Service               # gives the pods names: {name}-0.{name} is rank 0
metadata:
  name: {name}
spec:
  clusterIP: None
  publishNotReadyAddresses: true    # pods connect to each other while they start
  selector:
    job-name: {name}
---
apiVersion: v1
kind: PersistentVolumeClaim # what the run leaves: model, checkpoints, figures
metadata:
  name: {name}-runs
spec:
  accessModes: [ReadWriteMany]   # Change: ReadWriteOnce will do if all pods are on one machine
  resources:
    requests:
      storage: 10Gi              # Change: room for checkpoints
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  completionMode: Indexed
  completions: {count}
  parallelism: {count}
  backoffLimit: 0           # one process that fails ends the run; orchestra resume goes on
  template:
    spec:
      subdomain: {name}
      restartPolicy: Never
      terminationGracePeriodSeconds: 120   # to save when the job is deleted, or another pod has failed
      shareProcessNamespace: true          # otherwise the container's first process would not receive SIGTERM
      containers:
        - name: node
          image: {image}   # Change: one that the cluster can pull, with orchestra and your script in it
          workingDir: /app
          command: ["sh", "-c", 'export RANK=$JOB_COMPLETION_INDEX; exec "$@"', "sh"]
          args: {args}
          env:
            # RANK comes from JOB_COMPLETION_INDEX, which Kubernetes sets.
{env}
            - name: ORCHESTRA_TOKEN
              valueFrom:
                secretKeyRef:
                  name: {name}-token
                  key: token
          resources:
            requests:
              cpu: "2"         # Change: of each process
              memory: 4Gi
            # Change: a GPU for each process (take the # away)
            # limits:
            #   nvidia.com/gpu: 1
          volumeMounts:
            - name: runs
              mountPath: /app/runs    # what is written to runs/, beside your script in /app
      volumes:
        - name: runs
          persistentVolumeClaim:
            claimName: {name}-runs
"""


def _kubernetes(command: Sequence[str], nodes: int, per_host: int, image: str) -> str:
    count = nodes * per_host
    found = place(0, count, 0, 1, f"{NAME}-0.{NAME}", PORT)
    del found["RANK"]
    return _KUBERNETES.format(
        name=NAME,
        count=count,
        image=json.dumps(image),
        # Kubernetes has its own use for $(...).
        args=json.dumps([word.replace("$(", "$$(") for word in command], ensure_ascii=False),
        env="\n".join(f"            - {{name: {name}, value: {json.dumps(value)}}}" for name, value in found.items()),
        shown=_shown(command),
    )


_COMPOSE = """\
# {count} processes of one run, a container each: {shown}
#
#   (umask 077 && openssl rand -hex 32 > {name}.token)
#   docker compose -f FILE up --abort-on-container-failure
#   docker compose -f FILE down && rm {name}.token
#
# The token lets a process take part. It is in the file that the first command makes, which only you can read.
# Ctrl-C lets the run save and stop (a script, if it does). For several machines: orchestra launch --hosts.{build}
name: {name}

x-node: &node
  image: {image}   # Change: one with orchestra in it
  working_dir: /app
  init: true
  stop_grace_period: 2m     # to save
  command: {args}
  secrets: [token]
  volumes:
    - .:/app               # your scripts, and what the run leaves in runs/
  # Change: cores and memory of each process (take the # away)
  # cpus: 2
  # mem_limit: 4g

services:
{services}

secrets:
  token:
    file: ./{name}.token
"""

_SERVICE = """\
  rank-{rank}:
    <<: *node
    environment:
      ORCHESTRA_TOKEN_FILE: /run/secrets/token
{env}"""


def _compose(command: Sequence[str], nodes: int, per_host: int, image: str) -> str:
    count = nodes * per_host
    services = []
    for rank in range(count):
        found = place(rank, count, 0, 1, "rank-0", PORT)
        lines = (f"      {name}: {json.dumps(value)}" for name, value in found.items())
        services.append(_SERVICE.format(rank=rank, env="\n".join(lines)))
    own = image == _IMAGE
    return _COMPOSE.format(
        name=NAME,
        count=count,
        image=json.dumps(image),
        # Compose has its own use for a single $.
        args=json.dumps([word.replace("$", "$$") for word in command], ensure_ascii=False),
        services="\n".join(services),
        build=f"\n#\n# The image is yours to build, e.g. in a checkout of orchestra:\n#   {_BUILD}" if own else "",
        shown=_shown(command),
    )


_BUILD = (
    "printf 'FROM python:3.11-slim\\nCOPY . /o\\nRUN pip install -c /o/constraints.txt /o\\n' | "
    f"docker build -t {_IMAGE} -f - ."
)


def _shown(command: Sequence[str]) -> str:
    """Format a command for a comment: on one line."""
    return " ".join(shlex.join(command).split())


KINDS: dict[str, Callable[[Sequence[str], int, int, str], str]] = {
    "docker-compose": _compose,
    "kubernetes": _kubernetes,
    "slurm": _slurm,
}
