# SPDX-License-Identifier: Apache-2.0
"""The same lab as a Docker Compose file, for users who have Docker but not root.

A container shapes its own eth0: a token bucket with netem inside for what it sends, and, where the kernel has ifb
devices, a second bucket for what it receives. Round trips take as long as in the lab. The sender adds the whole
latency, so that between two hosts of different latency the two directions do not take equally long.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from orchestra.lab.build import bucket
from orchestra.lab.plan import LabPlan, Machine, host_environment

_IMAGE = """\
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends iproute2 && rm -rf /var/lib/apt/lists/*
COPY . /orchestra
RUN pip install --no-cache-dir -c /orchestra/constraints.txt /orchestra
"""

_ABOUT = """\
# {name}: {count} hosts. Written by `orchestra lab compose`.
#
#   (umask 077 && openssl rand -hex 32 > {name}.token)
#   docker compose -f FILE up -d --build                 {build}
#   docker compose -f FILE exec host-1 COMMAND           on one host; its name and rank are in ORCHESTRA_LAB_*
#   docker compose -f FILE down && rm {name}.token
#
# The token lets a process of orchestra take part in a run. It is in the file that the first command makes, which only
# you can read; every host finds it by ORCHESTRA_TOKEN_FILE.
# Latencies need the host's sch_netem, the shaping of what is received needs its ifb (modprobe sch_netem ifb).
"""


def compose(plan: LabPlan, image: str | None = None) -> str:
    """Return the file's text. Without an image, one is built from a checkout of this project in the current folder."""
    import yaml

    made: dict[str, Any] = {"image": image or f"{plan.name}-lab"}
    if image is None:
        made["build"] = {"context": ".", "dockerfile_inline": _IMAGE}
    services = {f"host-{k}": made | _service(plan, k) for k in range(1, len(plan.machines) + 1)}
    file = {
        "name": plan.name,
        "services": services,
        "networks": {"lab": {"driver": "bridge"}},
        "secrets": {"token": {"file": f"./{plan.name}.token"}},
    }
    about = _ABOUT.format(
        name=plan.name,
        count=len(plan.machines),
        build="builds the image from the checkout in this folder" if image is None else f"needs ip and tc in {image}",
    )

    class Plain(yaml.SafeDumper):  # type: ignore[misc]  # it has no types
        """Writes every service in full instead of a reference to the first, and scripts as blocks."""

        def ignore_aliases(self, data: object) -> bool:
            """Write everything in full."""
            return True

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Plain.add_representer(str, text)
    return about + str(yaml.dump(file, Dumper=Plain, sort_keys=False, width=1000))


def _service(plan: LabPlan, k: int) -> dict[str, Any]:
    machine = plan.machines[k - 1]
    script = "\n".join(["set -e", *shaping(machine), 'exec "$@"'])
    names = [f"host-{i}" for i in range(1, len(plan.machines) + 1)]
    service: dict[str, Any] = {
        "hostname": names[k - 1],
        "init": True,
        "cap_add": ["NET_ADMIN"],
        "networks": ["lab"],
        "secrets": ["token"],
        "environment": {"ORCHESTRA_TOKEN_FILE": "/run/secrets/token", **host_environment(plan.name, k - 1, names)},
        "entrypoint": ["sh", "-c", script.replace("$", "$$"), "sh"],  # Compose has its own use for a single $
        "command": ["sleep", "infinity"],
    }
    return service if machine.cpu is None else service | {"cpus": machine.cpu}


def shaping(machine: Machine) -> Iterator[str]:
    """Lines of shell that make a container's eth0 the link of a host."""
    netem = f"handle 10: netem delay {machine.latency * 1e6:.0f}us limit 100000"
    if machine.up:
        yield f"tc {bucket('eth0', machine.up, machine)}".replace("root tbf", "root handle 1: tbf")
        if machine.latency:
            yield f"tc qdisc add dev eth0 parent 1:1 {netem}"
    elif machine.latency:
        yield f"tc qdisc add dev eth0 root {netem}"
    if machine.down:
        yield "if ip link add ifb0 type ifb 2>/dev/null; then"
        yield "  ip link set ifb0 up"
        yield "  tc qdisc add dev eth0 handle ffff: ingress"
        yield (
            "  tc filter add dev eth0 parent ffff: protocol all u32 match u32 0 0 "
            "action mirred egress redirect dev ifb0"
        )
        yield f"  tc {bucket('ifb0', machine.down, machine)}"
        yield "else"
        yield '  echo "this kernel has no ifb: what this host receives is not shaped" >&2'
        yield "fi"
