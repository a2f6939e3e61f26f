# SPDX-License-Identifier: Apache-2.0
"""Which processes may take part in a run on many machines, and what they must have in common."""

from __future__ import annotations

import importlib
import os
import socket
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.processes import Processes, environ_of, free_port, own_address
from tests.zoo import BATCH, make_data, make_large, make_model, train

import orchestra
from orchestra import Attached, ConfigError, Steps
from orchestra.cli import invoke
from orchestra.clusters import attached
from orchestra.clusters.attached import ProcessRank
from orchestra.engine import environment, fingerprint
from orchestra.errors import ClusterError, EnvironmentProblem, Exposed
from orchestra.worlds.sockets import addresses, session

TOKEN = "0123456789abcdef" * 2


def call(out: Path, **given: Any) -> Any:
    asked: dict[str, Any] = {"cluster": Attached(patience=6), "budget": Steps(3)} | given
    return train("allreduce", out, **asked).summary.steps


def scaled(by: int) -> Any:
    return tuple(by * t for t in make_data())


def test_a_token_by_file_or_environment_lets_in(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    more = [{"ORCHESTRA_TOKEN": TOKEN}, {"ORCHESTRA_TOKEN_FILE": str(file)}]
    with Processes([partial(call, tmp_path / "run")] * 2, more) as processes:
        assert [outcome.value for outcome in processes.outcomes()] == [3, 3]


def test_a_process_with_another_token_is_rejected(tmp_path: Path) -> None:
    """And the others keep waiting for the process that they expect."""
    more = [{"ORCHESTRA_TOKEN": TOKEN}, {"ORCHESTRA_TOKEN": TOKEN[::-1]}]
    with Processes([partial(call, tmp_path / "run")] * 2, more) as processes:
        home, stranger = processes.outcomes()
    assert home.code == stranger.code == 4
    assert "node 1 did not connect" in home.error
    assert "Compare the two tokens" in stranger.error


def test_a_token_for_one_machine_is_in_a_private_folder_and_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name, value in environ_of(0, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    cluster = Attached()
    tokens = {attached._own_token(cluster.place, 1.0) for _ in range(2)}  # the first as of a run that was killed
    (folder,) = tmp_path.iterdir()
    assert (folder.stat().st_mode & 0o777, (folder / "token").stat().st_mode & 0o777) == (0o700, 0o600)
    assert (folder / "token").read_text() in tokens
    assert len(tokens) == 2
    cluster.forget_token()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("by", ["folder", "link"])
def test_a_token_folder_of_another_user_is_reported(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "shared"))
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "mine" / "token").write_text("not to be touched")
    place = ProcessRank.of(environ_of(0, 2, free_port()))
    taken = attached._token_path(place).parent
    taken.parent.mkdir()
    if by == "folder":
        taken.mkdir()
        taken.chmod(0o755)
    else:
        taken.symlink_to(tmp_path / "mine")
    with pytest.raises(EnvironmentProblem, match="set TMPDIR"):
        attached._own_token(place, 1.0)
    attached._delete(taken / "token")
    assert taken.exists()
    assert (tmp_path / "mine" / "token").exists()


@pytest.mark.nightly
def test_without_encryption_the_token_still_counts(tmp_path: Path) -> None:
    trusted = partial(call, cluster=Attached(patience=6, trusted=True))
    with Processes([partial(trusted, tmp_path / "run")] * 2, {"ORCHESTRA_TOKEN": TOKEN}) as processes:
        assert [outcome.value for outcome in processes.outcomes()] == [3, 3]
    more = [{"ORCHESTRA_TOKEN": TOKEN}, {"ORCHESTRA_TOKEN": TOKEN[::-1]}]
    with Processes([partial(trusted, tmp_path / "again")] * 2, more) as processes:
        assert [outcome.code for outcome in processes.outcomes()] == [4, 4]


@pytest.mark.parametrize(
    ("different", "told"),
    [
        ({"batch": BATCH + 1}, "batch is"),
        ({"model": make_large}, "parameter 0.weight is"),
        ({"seed": 4}, "seed is"),
        ({"optimizer": partial(torch.optim.SGD, lr=0.5)}, "lr of the optimizer is"),
        ({"data": partial(scaled, 2)}, "sample 0 is"),
        ({"budget": Steps(4)}, "budget is"),
    ],
)
def test_the_first_difference_is_named(different: dict[str, Any], told: str, tmp_path: Path) -> None:
    usual = {"data": partial(scaled, 1)}
    calls = [partial(call, tmp_path / "run", **usual), partial(call, tmp_path / "run", **usual | different)]
    with Processes(calls) as processes:
        for outcome in processes.outcomes():
            assert outcome.code == 4
            assert told in outcome.error
    assert not list((tmp_path / "run").glob(".launch*"))


@pytest.mark.parametrize("whose", ["orchestra", "script"])
def test_other_sources_are_named(whose: str, tmp_path: Path) -> None:
    """Two checkouts of one version, or an edit that did not reach every machine."""
    script = "from tests.zoo import make_data\n\ndef data():\n    return make_data()\n"
    for rank in (0, 1):
        (tmp_path / str(rank) / "strategies").mkdir(parents=True)
        (tmp_path / str(rank) / "strategies" / "slowmo.py").write_text("" if rank and whose == "orchestra" else "x = 1")
        (tmp_path / str(rank) / "its_script.py").write_text(script + ("# edited" if rank and whose == "script" else ""))

    def join() -> Any:
        sys.path.insert(0, str(tmp_path / os.environ["RANK"]))
        fingerprint._PACKAGE = tmp_path / os.environ["RANK"] / "strategies"
        return call(tmp_path / "run", data=importlib.import_module("its_script").data)

    with Processes([join] * 2) as processes:
        outcomes = processes.outcomes()
    told = {"orchestra": "sources of orchestra: slowmo.py is ", "script": "script: its_script is "}[whose]
    for outcome in outcomes:
        assert outcome.code == 4
        assert told in outcome.error


def test_what_is_installed_is_known_by_its_version(tmp_path: Path) -> None:
    assert fingerprint._scripts([torch.nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1), pytest.fail]) == {}
    assert [*fingerprint._scripts([make_large, partial(make_data)])] == ["tests.zoo"]
    assert fingerprint._sources(fingerprint._PACKAGE)["engine/fingerprint.py"]


def test_open_to_the_network_without_a_token_it_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ_of(0, 2, free_port(), host="192.0.2.1").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Exposed, match="no token keeps strangers out") as caught:
        call(tmp_path / "run")
    assert caught.value.exit_code == 8


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({}, "RANK = None"),
        ({"RANK": "2"}, "must be below WORLD_SIZE"),
        ({"WORLD_SIZE": "two"}, "must be a whole number"),
        ({"MASTER_PORT": "70000"}, "must be a port"),
    ],
)
def test_an_environment_that_cannot_be(
    environ: dict[str, str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if environ:
        for name, value in {**environ_of(0, 2, free_port()), **environ}.items():
            monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=told):
        call(tmp_path / "run")


def test_a_name_that_cannot_be_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ_of(0, 2, free_port(), host="no.such.host.invalid").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ClusterError, match=r"'no\.such\.host\.invalid' could not be resolved within 0\.3 s to find"):
        call(tmp_path / "run", cluster=Attached(patience=0.3))


@pytest.mark.parametrize(
    ("host", "environ", "expected"),
    [
        ("127.0.0.1", {}, True),
        ("127.0.0.1", {"LOCAL_WORLD_SIZE": "1"}, False),  # there are others, wherever they are
        ("127.0.0.1", {"LOCAL_WORLD_SIZE": ""}, True),  # not set, but the address means this machine everywhere
        ("::1", {}, True),
        ("[::1]", {"LOCAL_WORLD_SIZE": ""}, True),
        ("debian.test", {}, True),
        ("debian.test", {"LOCAL_WORLD_SIZE": "1"}, False),
        ("debian.test", {"LOCAL_WORLD_SIZE": ""}, False),
        ("both.test", {}, False),
    ],
)
def test_who_can_reach_a_run(
    host: str, environ: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    know(monkeypatch.setattr, {"debian.test": ["127.0.1.1"], "both.test": ["127.0.0.1", "198.51.100.7"]})
    assert ProcessRank.of(environ_of(0, 2, 29500, host=host) | environ).loopback(patience=1) is expected


def know(set_: Any, names: dict[str, list[str]]) -> None:
    """Let this process resolve names, each to its addresses."""
    really = socket.getaddrinfo

    def look_up(host: Any, *args: Any, **given: Any) -> Any:
        return [found for address in names.get(host, [host]) for found in really(address, *args, **given)]

    set_(socket, "getaddrinfo", look_up)


@pytest.mark.parametrize("trusted", [False, True])
def test_a_host_whose_name_is_a_loopback_address(trusted: bool, tmp_path: Path) -> None:
    """Processes 0 and 1 are on such a host, as Debian sets it up; process 2, on another, uses its real address."""
    outside = own_address()

    def join() -> Any:
        know(setattr, {"debian.test": ["127.0.1.1" if os.environ["RANK"] != "2" else outside]})
        result = train("allreduce", tmp_path / "run", budget=Steps(3), cluster=Attached(patience=10, trusted=trusted))
        return result.summary.steps, (tmp_path / "run" / "topology.json").exists()

    environ = [{"LOCAL_WORLD_SIZE": str(size), "ORCHESTRA_TOKEN": TOKEN} for size in (2, 2, 1)]
    with Processes([join] * 3, environ, host="debian.test") as processes:
        outcomes = processes.outcomes()
    assert [(outcome.value, outcome.error) for outcome in outcomes] == [((3, True), "")] * 3  # and all measured


def test_torch_listens_at_an_address_that_others_can_reach() -> None:
    """Not the address of the connection to a process of this machine, even if that was made first."""
    found = {}
    with ExitStack() as open_:
        for node, host in enumerate(("127.0.0.1", own_address()), start=1):
            door = open_.enter_context(socket.create_server((host, 0)))
            found[node] = open_.enter_context(socket.create_connection(door.getsockname()))
        assert session._own_address(found) == own_address()
        assert session._own_address({1: found[1]}) == "127.0.0.1"


def test_a_failure_to_choose_an_order_closes_the_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise ClusterError("no order")

    for name, value in environ_of(0, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    job, here = SimpleNamespace(workers=2, servers=0), socket.create_server(("127.0.0.1", 0))
    with here, socket.create_connection(here.getsockname()) as line:
        monkeypatch.setattr(session, "_connect", lambda *_: {1: line})
        monkeypatch.setattr(session, "_arrange", fail)
        with pytest.raises(ClusterError, match="no order"):
            session.Session(job, torch.zeros(3), Attached(), {})  # type: ignore[arg-type]
        assert line.fileno() == -1


@pytest.mark.parametrize("trusted", [False, True])
def test_ipv6(trusted: bool, tmp_path: Path) -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine does not speak IPv6")
    given = partial(call, tmp_path / "run", cluster=Attached(patience=10, trusted=trusted))
    with Processes([given] * 3, host="[::1]") as processes:
        assert [(outcome.value, outcome.error) for outcome in processes.outcomes()] == [(3, "")] * 3


def test_more_servers_than_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ_of(0, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="all of which would be servers"):
        train("ps(servers=2)", tmp_path / "run", cluster=Attached())
    with pytest.raises(ConfigError, match="share one x in the memory of one machine"):
        train("hogwild", tmp_path / "run", cluster=Attached())


def test_attached_is_the_default_where_a_launcher_started_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not environment.launched()
    for name, value in environ_of(1, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    assert environment.launched()
    assert not Attached().is_coordinator


def test_a_process_that_waits_for_the_token_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(addresses, "_FIRST", 0.05)
    port = free_port()
    for name, value in environ_of(1, 2, port).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ClusterError, match="process 0 wrote no token"):
        Attached(patience=0.5).token()
    assert f"orchestra: process 1 waits for process 0 to listen at 127.0.0.1:{port}\n" in capfd.readouterr().err


def begin_train(out: Path, **given: Any) -> None:
    train("allreduce", out, cluster=Attached(**given) if given or environment.launched() else None)


def begin_prepare(out: Path, **given: Any) -> None:
    model = make_model()
    orchestra.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), cluster=Attached(**given))


def begin_run(out: Path, *, trusted: bool = False, collectives: str = "") -> None:
    words = ["run", "digits", "--out", str(out), "--quiet", *(["--trusted-network"] if trusted else [])]
    if invoke(words) == ClusterError.exit_code:
        raise ClusterError("no process joined")


@pytest.mark.parametrize("begin", [begin_train, begin_prepare, begin_run])
def test_a_notice_says_that_the_network_is_trusted(
    begin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail_to_connect(*_: Any) -> Any:
        raise ClusterError("no process joined")

    def told(rank: int, **given: Any) -> str:
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(ClusterError, match="no process joined"):
            begin(tmp_path / f"run-{rank}-{len(given)}", **given)
        return capsys.readouterr().err

    monkeypatch.setattr(session, "_connect", fail_to_connect)
    for name, value in {**environ_of(0, 2, free_port()), "ORCHESTRA_TOKEN": TOKEN}.items():
        monkeypatch.setenv(name, value)
    said = told(0, trusted=True)
    assert said.count("orchestra: the network is trusted: connections are authenticated, but not encrypted.") == 1
    assert "do not even check the token" in said
    assert "the network is trusted" not in told(0)
    assert "the network is trusted" not in told(1, trusted=True)
    if begin is not begin_run:
        assert "even check" not in told(0, trusted=True, collectives="messages")


LOOP = """
import orchestra, torch
model = torch.nn.Linear(2, 1)
model, optimizer = orchestra.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
print("alone")
"""


def begin_loop(out: Path) -> None:
    out.with_suffix(".py").write_text(LOOP)
    assert invoke(["run", str(out.with_suffix(".py"))]) == 2
    assert invoke(["run", str(out.with_suffix(".py")), "--workers", "2"]) == 2


@pytest.mark.parametrize("begin", [begin_train, begin_prepare, begin_run, begin_loop])
@pytest.mark.parametrize("given", [("RANK",), ("RANK", "WORLD_SIZE", "MASTER_ADDR"), ("WORLD_SIZE", "MASTER_PORT")])
def test_half_an_environment_is_no_reason_to_train_alone(
    begin: Any, given: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name in given:
        monkeypatch.setenv(name, environ_of(0, 2, 29500)[name])
    told = ""
    try:
        begin(tmp_path / "run")
    except ConfigError as error:
        told = str(error)
    said = told + "".join(capsys.readouterr())
    missing = [name for name in environment.NEEDED if name not in given]
    are = "is" if len(missing) == 1 else "are"
    assert f"{', '.join(missing)} = None    {are} not set, but {' and '.join(given)} " in said
    assert "alone" not in said.splitlines()
    assert not (tmp_path / "run").exists()


def test_a_whole_environment_or_none_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.half_set() == []
    monkeypatch.setenv("MASTER_PORT", "29501")  # as some machines set for all users
    assert environment.half_set() == []
    for name, value in environ_of(1, 2, 29500).items():
        monkeypatch.setenv(name, value)
    assert environment.half_set() == []
