# SPDX-License-Identifier: Apache-2.0
"""Control messages and files that a process with the token may send, and what happens to others."""

from __future__ import annotations

import errno
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.processes import together
from tests.transports.recorder import Recorder
from tests.zoo import train

from orchestra import Attached, Steps
from orchestra.core.ops import Traffic
from orchestra.engine.supervisor import RunSupervisor
from orchestra.runs.status import NodeStatus
from orchestra.worlds.sockets import control_messages, file_transfer, wire
from orchestra.worlds.sockets.file_transfer import FileReceiver, files_of, part_of
from orchestra.worlds.sockets.messenger import Messenger
from orchestra.worlds.sockets.wire import BadFrame

ASSIGNMENT = {"kind": "assignment", "run": "/a/run", "launch": "0a1b", "resume": "step-00000012", "resumed_from": 12}
# Messages as processes send them.
SAID: list[tuple[int, dict[str, Any]]] = [
    (1, {"kind": "ready", "node": 1}),
    (1, {"kind": "report", "status": NodeStatus(1, 2, float("nan"), 0, 0, 0, 8, 8, 0.1, float("inf"))._asdict()}),
    (2, {"kind": "control", "field": "begun", "of": 2, "value": 2**32 - 1}),
    (2, {"kind": "file", "path": "events-2.jsonl", "bytes": 0}),
    (2, {"kind": "refused", "node": 2, "error": "Diverged", "message": "..."}),
    (2, {"kind": "signal", "name": "SIGTERM"}),
    (0, ASSIGNMENT),
    (0, {"kind": "go", "at": 0.0}),
    (0, {"kind": "outcome", "run": "/a/run", "metrics": {"loss": 0.1}, "summary": {}, "bytes": 100}),
    (1, {"kind": "finished", "steps": 7, "how": "finish", "left": None}),
    (0, {"kind": "folder", "path": "/a/run", "mark": ".mark"}),
    (1, {"kind": "settings", "name": "lr", "first_group": 0, "by_group": [0.1, 1e-3]}),
    (1, {"kind": "score", "number": 0, "t": 1.5, "step": 3, "samples": 96, "figures": {"accuracy": 0.5}}),
    (1, {"kind": "settings", "name": "betas", "first_group": 1024, "by_group": [[0.9, 0.95]]}),
    (1, {"kind": "settings", "name": "nesterov", "first_group": 0, "by_group": [True]}),
]


@pytest.mark.parametrize(("source", "said"), SAID, ids=lambda x: x["kind"] if isinstance(x, dict) else None)
def test_valid_messages_pass_and_similar_ones_do_not(source: int, said: dict[str, Any]) -> None:
    control_messages.check(source, said)
    for name in said.keys() - {"kind", "node"}:
        without = {key: value for key, value in said.items() if key != name}
        for wrong in (without, {**said, name: ["x"] * 5000}, {**said, "more": 1}, {**said, "node": 3}):
            with pytest.raises(BadFrame, match=f"node {source} s"):
                control_messages.check(source, wrong)


@pytest.mark.parametrize(
    ("source", "said", "told"),
    [
        (1, {"kind": "go", "at": 0.0}, "of unknown kind 'go'"),  # only process 0 lets the nodes begin
        (0, {"kind": "ready"}, "of unknown kind 'ready'"),
        (1, {"kind": "ready", "node": 2}, "in the name of node 2"),
        (1, {"kind": "control", "field": "saved", "of": True, "value": 1}, "of = True"),
        (1, {"kind": "control", "field": "go", "of": 0, "value": 1}, "field = 'go'"),
        (0, ASSIGNMENT | {"resume": "../step-00000001"}, "resume = "),
        (0, ASSIGNMENT | {"launch": "../a"}, "launch = "),
        (1, {"kind": "failed", "traceback": "x" * 10**6}, "traceback = 'xxx"),
        (1, {"kind": "settings", "name": "lr", "first_group": 0, "by_group": [float("nan")]}, "by_group = "),
        (1, {"kind": "score", "number": 0, "t": 1.5, "step": 3, "samples": 9, "figures": {"x": "1"}}, "figures = "),
        (1, {"kind": "score", "number": 0, "t": 1.5, "step": 3, "samples": 9, "figures": {}}, "figures = "),
        (1, {"kind": "settings", "name": "betas", "first_group": 0, "by_group": [[0.9, float("inf")]]}, "by_group = "),
        (1, {}, "of unknown kind None"),
    ],
)
def test_invalid_messages_are_refused(source: int, said: dict[str, Any], told: str) -> None:
    with pytest.raises(BadFrame, match=told) as caught:
        control_messages.check(source, said)
    assert len(str(caught.value)) < 300


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
kinds = st.sampled_from([said["kind"] for _, said in SAID]) | values
anything = st.dictionaries(
    st.sampled_from(
        ["kind", "node", "field", "of", "value", "path", "bytes", "status", "at", "steps", "step", "message", "code"]
    ),
    values,
)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 3), kinds, anything)
def test_any_message_is_accepted_or_refused(source: int, kind: Any, said: dict[str, Any]) -> None:
    try:
        control_messages.check(source, {**said, "kind": kind})
    except BadFrame:
        return
    assert isinstance(kind, str)


# Files.


def receiver_for(folder: Path, failures: list[Any] | None = None) -> FileReceiver:
    def note_failure(source: int, path: Path, error: OSError) -> None:
        assert failures is not None
        failures.append((source, path.name, error.errno))

    return FileReceiver(folder, files_of, 1000, note_failure)


GOOD = ("events-2.jsonl", "final/node-2.safetensors", "snapshots/00001/node-2.safetensors",
        "checkpoints/step-00000012.tmp/node-2.safetensors")  # fmt: skip


def test_a_nodes_own_files_are_taken_and_no_others(tmp_path: Path) -> None:
    files = receiver_for(tmp_path)
    for name in GOOD:
        files.expect(2, {"path": name, "bytes": 6})
        files.take_in(2, b"abc")
        assert not (tmp_path / name).exists()
        files.take_in(2, b"def")
        assert (tmp_path / name).read_bytes() == b"abcdef"
    bad = ("events-1.jsonl", "events-2.jsonl/", "../events-2.jsonl", "/etc/passwd", "config.json", "a/events-2.jsonl",
           "checkpoints/step-00000012/node-2.safetensors", "checkpoints/../node-2.safetensors", "events-2.jsonl\n",
           "snapshots/0000\u0661/node-2.safetensors", "")  # fmt: skip
    for name in bad:
        with pytest.raises(BadFrame, match="not one of its own"):
            files.expect(2, {"path": name, "bytes": 6})
    assert part_of(1).fullmatch("step-00000012/node-1.safetensors")
    assert not part_of(1).fullmatch("step-00000012/node-2.safetensors")


def test_files_of_other_lengths_than_announced(tmp_path: Path) -> None:
    files = receiver_for(tmp_path)
    with pytest.raises(BadFrame, match="1,001 bytes; none is longer than 1,000"):
        files.expect(2, {"path": GOOD[0], "bytes": 1001})
    with pytest.raises(BadFrame, match="had not announced"):
        files.take_in(2, b"x")
    files.expect(2, {"path": GOOD[0], "bytes": 3})
    with pytest.raises(BadFrame, match="before it had sent the last one"):
        files.expect(2, {"path": GOOD[1], "bytes": 3})
    with pytest.raises(BadFrame, match=r"more of events-2\.jsonl than the 3 bytes"):
        files.take_in(2, b"more")
    assert not any(tmp_path.iterdir())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from(GOOD) | st.text(max_size=30), st.integers(0, 8))))
@example([(2, "../x", 1), (1, "events-1.jsonl", 0)])
def test_nothing_appears_but_what_is_expected(tmp_path_factory: pytest.TempPathFactory, sent: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("fuzz") / "run"
    files = receiver_for(folder)
    for source, name, length in sent:
        try:
            files.expect(source, {"path": name, "bytes": length})
            files.take_in(source, b"x" * length)
        except BadFrame:
            continue
    for path in folder.parent.rglob("*"):
        name = path.relative_to(folder).as_posix() if path.is_file() else None
        assert name is None or any(files_of(node).fullmatch(name) for node in (1, 2, 3))


def test_a_full_disk_is_reported_and_leaves_no_partial_file(tmp_path: Path, full_disk: Path) -> None:
    failures: list[Any] = []
    files = receiver_for(tmp_path, failures)
    (tmp_path / "events-2.jsonl").symlink_to(full_disk)
    files.expect(2, {"path": "events-2.jsonl", "bytes": 3})
    files.take_in(2, b"abc")
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "node-2.safetensors.tmp").symlink_to(full_disk)
    files.expect(2, {"path": "final/node-2.safetensors", "bytes": 3})
    files.take_in(2, b"abc")
    assert failures == [(2, "events-2.jsonl", errno.ENOSPC), (2, "node-2.safetensors", errno.ENOSPC)]
    assert not any((tmp_path / "final").iterdir())


def test_a_long_log_is_sent_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_transfer, "_PIECE", 10)
    sent: list[Any] = []

    class Notes:
        def send_control(self, to: int, said: dict[str, Any]) -> None:
            sent.append(said["bytes"])

        def send_file(self, to: int, data: bytes) -> None:
            sent.append(data)

    log = tmp_path / "events-1.jsonl"
    log.write_text("0123456789abc\n")
    bringing = file_transfer.FileSender(Notes(), tmp_path, 0)  # type: ignore[arg-type]
    bringing.send_new()
    bringing.send_new()
    with log.open("a") as file:
        file.write("more\n")
    bringing.send_new()
    assert sent == [10, b"0123456789", 4, b"abc\n", 5, b"more\n"]


class ListeningSupervisor(RunSupervisor):
    """A supervisor that only receives messages."""

    def begin(self) -> None: ...

    def ask_to_stop(self, code: int) -> None: ...

    def seconds(self) -> float:
        return 0.0

    def rows(self) -> tuple[Any, ...]:
        return ()


@pytest.mark.parametrize("late", [0, 1])
def test_a_part_that_is_written_after_another_failed_is_discarded(late: int, tmp_path: Path) -> None:
    spec = SimpleNamespace(run=tmp_path, workers=2, servers=0)
    supervisor = ListeningSupervisor(SimpleNamespace(spec=spec, resumed_from=0, about={}))  # type: ignore[arg-type]
    supervisor.name = lambda node: f"worker {node}"  # type: ignore[method-assign]
    said: list[dict[str, Any]] = [
        {"kind": "saved", "node": 0, "step": 4},
        {"kind": "save-failed", "node": 1, "step": 4, "error": "no room"},
    ]
    for words in said[:: 1 if late else -1]:
        if words["kind"] == "saved":
            (tmp_path / "checkpoints" / "step-00000004.tmp").mkdir(parents=True)
        supervisor.handle_message(words)
    assert not any((tmp_path / "checkpoints").iterdir())


# In a run.


def test_a_full_disk_of_process_0_does_not_end_the_run(tmp_path: Path) -> None:
    """And no checkpoint is completed of which a part is missing."""

    def call() -> Any:
        from orchestra.worlds.sockets import participant

        def full(path: Path, data: bytearray) -> None:
            if "checkpoints" in path.parts or path.suffix == ".jsonl":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            put(path, data)

        put = file_transfer._put
        file_transfer._put = file_transfer._append = full
        if os.environ["RANK"] != "0":
            participant._reads = lambda path: None
        cluster = Attached(patience=20)
        return train("localsgd(tau=2)", tmp_path / "run", cluster=cluster, budget=Steps(9), checkpoint_every=Steps(2))

    first, other = together(2, lambda: call().summary.steps)
    assert (first.value, first.error, other.value) == (9, "", 9)
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))
    ending = (tmp_path / "run" / "ending.json").read_text()
    assert ending.count("events-1.jsonl of worker 1 could not be written here") == 1
    assert "worker 1 could not save at step 2: [Errno 28]" in ending


def test_a_faulty_process_is_named_and_process_0_ends_cleanly(tmp_path: Path) -> None:
    def call() -> Any:
        from orchestra.worlds.sockets.session import Session

        def live(self: Any, spec: Any, **given: Any) -> bool:
            if os.environ["RANK"] == "1":
                self.messenger.send_control(0, {"kind": "file", "path": "../../evil", "bytes": 3})
                self.messenger.send_file(0, b"abc")
            return lived(self, spec, **given)

        lived = Session.run_node
        Session.run_node = live  # type: ignore[method-assign]
        return train("allreduce", tmp_path / "run", cluster=Attached(patience=20))

    first, _, _ = together(3, call)
    assert (first.kind, first.code) == ("WorkerLost", 6)
    assert "worker 1 died: its connection to worker 0 broke: node 1 sent a file '../../evil', which is" in first.error
    assert not list(tmp_path.rglob("evil"))


@pytest.mark.timed
def test_closing_has_one_deadline_for_all_connections() -> None:
    """However many peers do not read; and no file is accepted once it has begun."""
    ours, theirs = zip(*[_tcp() for _ in range(4)], strict=True)
    messenger = Messenger(
        0, 5, 1, dict(enumerate(ours, start=1)), largest=1 << 20, patience=5, traffic=Traffic(), summed=False
    )
    listener = Recorder()
    messenger.listen(listener)
    for node in range(1, 5):
        for _ in range(200):
            messenger.send_control(node, {"kind": "x" * 100_000})  # more than the kernel takes
    began = time.monotonic()
    messenger.close(within=0.5)
    assert time.monotonic() - began < 1.9  # with a deadline for each it would take 2.0
    piece = torch.zeros(4, dtype=torch.uint8)
    messenger._accept(messenger._peers[1], wire.Frame(wire.Kind.FILE, 1, 0, numel=4), piece)
    assert not listener.pieces
    for sock in theirs:
        sock.close()


def _tcp() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        far = socket.create_connection(listening.getsockname())
        return listening.accept()[0], far
