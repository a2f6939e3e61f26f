# SPDX-License-Identifier: Apache-2.0
"""What the command line says of labs, and the Compose file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cli.conftest import Orchestra
from tests.cli.conftest import orchestra as orchestra
from tests.lab.conftest import left_of

from orchestra.errors import ConfigError
from orchestra.lab.compose import compose, shaping
from orchestra.lab.plan import Machine, host_of, make_plan, owner_of, rate_words, subnet_of, switch_of, time_words
from orchestra.worlds.simulated.networks import parse, read_rate, read_time


@pytest.mark.parametrize("verb", ["up", "run", "down", "show", "list", "compose"])
def test_help_of_a_verb_shows_examples(verb: str, orchestra: Orchestra) -> None:
    said = orchestra("lab", verb, "--help")
    assert said.code == 0
    assert said.out.count(f"orchestra lab {verb}") >= 2


def test_a_lab_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from orchestra.cli import invoke; import orchestra.lab\n"
        "codes = [invoke(['lab', '--help']), invoke(['lab', 'compose', '--hosts', '2'])]\n"
        "sys.exit(0 if codes == [0, 0] and 'torch' not in sys.modules else 1)"
    )
    env = dict(os.environ) | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("--hosts", "0"), "whole number from 1 to 250"),
        (("--hosts", "2", "--rate", "10"), "'10' is not a rate such as 100mbit"),
        (("--hosts", "2", "--rate", "1kbit"), "from 8kbit"),
        (("--hosts", "2", "--latency", "5"), "'5' is not a time such as 1ms"),
        (("--hosts", "2", "--latency", "11s"), "from 0s to 10s"),
        (("--hosts", "2", "--cpu", "0"), "cpu = 0.0    must be a number of cores from 0.01"),
        (("--hosts", "2", "--cpu", "nan"), "number of cores"),
        (("--hosts", "2", "--host", "3:rate=1mbit"), "count from 1 to 2"),
        (("--hosts", "2", "--host", "2:rat=1mbit"), "host 2: rat = '1mbit'    is not known; did you mean 'rate'?"),
        (("--hosts", "2", "--host", "2:cpu=half"), "must be a number of cores"),
        (("--hosts", "2", "--host", "2"), "write it like 3:rate=10mbit"),
        (("--hosts", "2", "--name", "A b"), "small letters"),
        (("--hosts", "2", "--straggler", "5"), "such as 1x5"),
        (("--hosts", "2", "--straggler", "3x5"), "there are 2 hosts"),
    ],
)
@pytest.mark.parametrize("verb", ["up", "compose"])
def test_bad_values_are_refused_before_anything_is_built(
    verb: str, arguments: tuple[str, ...], hint: str, orchestra: Orchestra
) -> None:
    said = orchestra("lab", verb, *arguments)
    assert said.code == 2
    assert hint in said.err
    assert "Traceback" not in said.err


def test_all_problems_at_once() -> None:
    with pytest.raises(ConfigError, match="4 problems"):
        make_plan(name="", hosts=0, rate="x", exceptions={1: {"cpu": "x"}})


def test_up_show_list_run_and_down(name: str, orchestra: Orchestra) -> None:
    asked = ("--hosts", "2", "--rate", "100mbit", "--latency", "1ms", "--host", "2:up=10mbit,cpu=0.5", "--name", name)
    said = orchestra("lab", "up", *asked)
    assert said.code == 0, said.err
    first = said.out.splitlines()[1].split()
    assert [first[0], *first[2:]] == ["host-1", "100mbit", "1ms", "any"]
    assert "10mbit up, 100mbit down" in said.out
    assert f"next: orchestra lab run --name {name}" in said.err
    found = orchestra("lab", "show", "--name", name, "--json").json
    assert found["whole"]
    hosts = [(host["up"], host["latency"], host["cpu"]) for host in found["hosts"]]
    assert hosts == [(1e8, 1e-3, None), (1e7, 1e-3, 0.5)]
    assert name in [lab["name"] for lab in orchestra("lab", "list", "--json").json]
    said = orchestra("lab", "run", "--name", name, "--", "sh", "-c", "echo $RANK; test $RANK = 0 || exit 9")
    assert said.code == 9
    assert "host-1 | 0\n" in said.out
    assert orchestra("lab", "run", "--name", name, "--host", "2", "sh", "-c", "echo $RANK").out == "1\n"
    assert f"{name}: taken down" in orchestra("lab", "down", "--name", name).err
    assert not left_of(name)
    said = orchestra("lab", "down", "--name", name)
    assert (said.code, said.err) == (0, f"{name}: was not up\n")
    said = orchestra("lab", "run", "--name", name, "--", "true")
    assert said.code == 2
    assert "no such lab is up" in said.err


def test_a_lab_that_is_up_is_not_replaced(name: str, orchestra: Orchestra) -> None:
    """Something may run in it."""
    from orchestra.lab import build, ip_commands
    from orchestra.lab.inspection import look

    build.up(make_plan(name=name, hosts=1))
    home = ip_commands.identity(ip_commands.NAMESPACES / host_of(name, 1))
    said = orchestra("lab", "up", "--hosts", "2", "--name", name)
    assert said.code == 2
    assert f"take it down first (orchestra lab down --name {name}), or give another --name" in said.err
    assert ip_commands.identity(ip_commands.NAMESPACES / host_of(name, 1)) == home
    assert look(name).size == 1


def test_without_root_the_exit_code_says_environment(orchestra: Orchestra, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    said = orchestra("lab", "up", "--hosts", "2")
    assert said.code == 3
    assert "needs root" in said.err


# Names and numbers.


@pytest.mark.parametrize("lab", ["orchestra", "a", "a-host-1", "host-1", "switch", "orchestra-a"])
def test_what_belongs_to_a_lab_is_known_by_its_name(lab: str) -> None:
    assert owner_of(switch_of(lab)) == owner_of(host_of(lab, 12)) == lab


@pytest.mark.parametrize("name", ["orchestra", "router-host-1", "orchestra-host-x", "myorchestra-host-1", "host-1"])
def test_a_foreign_name_belongs_to_no_lab(name: str) -> None:
    assert owner_of(name) is None


def test_labs_have_networks_of_their_own() -> None:
    taken: set[str] = set()
    for lab in ("a", "b", "c", "a", "a"):
        taken.add(subnet_of(lab, taken))
    assert len(taken) == 5


@pytest.mark.parametrize("rate", [8e3, 1e6, 2.5e9, 1e12])
@pytest.mark.parametrize("seconds", [5e-5, 1e-3, 0.25, 2.0])
def test_words_are_read_as_they_are_written(rate: float, seconds: float) -> None:
    assert read_rate(rate_words(rate)) == rate
    assert read_time(time_words(seconds)) == pytest.approx(seconds, rel=1e-12)


def test_a_lab_has_the_links_of_the_simulated_network() -> None:
    machine = make_plan(hosts=1, rate="100mbit", latency="1ms").machines[0]
    host = parse("100mbit,1ms").host(0)
    assert (machine.up, machine.down, machine.latency / 2) == (host.up, host.down, host.latency)


# Compose.


def services(text: str) -> dict[str, Any]:
    read = yaml.safe_load(text)
    assert set(read) == {"name", "services", "networks", "secrets"}
    assert read["secrets"] == {"token": {"file": f"./{read['name']}.token"}}
    assert f"(umask 077 && openssl rand -hex 32 > {read['name']}.token)" in text  # who makes it
    assert read["networks"] == {"lab": {"driver": "bridge"}}
    found: dict[str, Any] = read["services"]
    return found


def test_a_compose_file_has_a_service_for_each_host() -> None:
    plan = make_plan(hosts=3, rate="100mbit", latency="1ms", cpu=0.5, exceptions={3: {"rate": "10mbit", "cpu": "0.25"}})
    found = services(compose(plan))
    assert list(found) == ["host-1", "host-2", "host-3"]
    for k, service in enumerate(found.values(), start=1):
        assert service["cap_add"] == ["NET_ADMIN"]
        assert service["networks"] == ["lab"]
        assert service["cpus"] == (0.25 if k == 3 else 0.5)
        assert service["environment"]["ORCHESTRA_LAB_RANK"] == str(k - 1)
        assert service["environment"]["MASTER_ADDR"] == "host-1"
        assert service["environment"]["ORCHESTRA_TOKEN_FILE"] == "/run/secrets/token"
        assert service["secrets"] == ["token"]
        assert all(isinstance(value, str) for value in service["environment"].values())
        shell, flag, script, nothing = service["entrypoint"]
        assert (shell, flag, nothing) == ("sh", "-c", "sh")
        assert script.endswith('exec "$$@"')
        assert "$" not in script.replace("$$", "")  # a single one would be Compose's
        assert f"tbf rate {'10000000' if k == 3 else '100000000'}bit burst 4096" in script
        assert "netem delay 1000us" in script
        assert "iproute2" in service["build"]["dockerfile_inline"]
        assert service["command"]
    assert "*" not in compose(plan).split("services:")[1].replace("lists/*", "")


def test_a_compose_file_of_an_image_builds_none_and_asks_only_for_what_was_asked() -> None:
    (service,) = services(compose(make_plan(hosts=1), image="mine:1")).values()
    assert service["image"] == "mine:1"
    assert not {"build", "cpus"} & set(service)
    assert "tc" not in service["entrypoint"][2].split()


def test_the_script_of_a_container_shapes_a_link(name: str) -> None:
    # Without a latency, as not every kernel has netem; in a host of a lab instead of a container.
    from orchestra.lab import Lab

    with Lab(hosts=1, name=name) as lab:
        script = "\n".join(["set -e", *shaping(Machine(up=1e7, down=2e7)), "tc qdisc show"])
        out = subprocess.run(lab.command(1, ["sh", "-c", script]), capture_output=True, text=True, check=True).stdout
    assert "tbf 1: dev eth0 root" in out
    assert "rate 10Mbit" in out
    if "ifb0" in out:
        assert "rate 20Mbit" in out


def test_a_straggler_is_a_host_with_less_of_the_processor(orchestra: Orchestra) -> None:
    def shares(*words: str) -> list[float]:
        services = yaml.safe_load(orchestra("lab", "compose", "--hosts", "3", *words).out)["services"]
        return [service.get("cpus") for service in services.values()]

    assert shares("--cpu", "0.5", "--straggler", "2x5") == [0.1, 0.1, 0.5]
    assert shares("--straggler", "1x5") == [pytest.approx((os.cpu_count() or 1) / 15, rel=1e-2), None, None]
    assert shares("--cpu", "0.5", "--straggler", "1x5", "--host", "1:cpu=0.2") == [0.2, 0.5, 0.5]
