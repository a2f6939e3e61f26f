# SPDX-License-Identifier: Apache-2.0
"""`orchestra top`: as text, and as a screen with keys."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.live.made import append, began, make, stale, steps, whole

from orchestra.cli import invoke
from orchestra.live import text as words
from orchestra.live.follower import Follower
from orchestra.live.moment import RunNow, moment
from orchestra.runs import run_lock

needs_textual = pytest.mark.skipif(
    importlib.util.find_spec("textual") is None, reason="Textual is not installed: pip install 'neural-orchestra[top]'"
)


def under_way(run: Path, **changes: Any) -> Path:
    make(run, **changes)
    append(run, 0, [began(0), *steps(0, 1, 13)])
    append(run, 1, [began(1), *steps(1, 1, 11)])
    append(run, 2, [began(2), *stale(1, 22)])
    return run


# As text.


def test_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = under_way(tmp_path / "run")
    assert invoke(["top", str(run), "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "ps(consistency=asp) · 2 workers + 1 server" in lines
    assert any(line.startswith("running · step 10 of 40 · 1.2 s · loss 0.1833 in the last step") for line in lines)
    (row,) = [line.split() for line in lines if line.startswith("worker 0")]
    assert row[:9] == ["worker", "0", "12", "0.1667", "–", "60%", "10%", "30%", "80"]  # noqa: RUF001


def test_one_object_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["top", str(under_way(tmp_path / "run")), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["step"], [node["step"] for node in found["nodes"]]) == ("running", 10, [12, 10, 21])


def test_the_newest_run_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert invoke(["top", "--once"]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    whole(tmp_path / "runs" / "only")
    assert invoke(["top", "--plain"]) == 0
    assert "runs/only" in capsys.readouterr().out


def test_plain_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    run = under_way(tmp_path / "run")

    def sleep(seconds: float) -> None:
        whole(run)

    monkeypatch.setattr(time, "sleep", sleep)
    with run_lock.holding(run):
        assert invoke(["top", str(run), "--plain"]) == 0
    out = capsys.readouterr().out
    assert out.index("running ·") < out.index("done ·")


def test_without_textual_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    run = under_way(tmp_path / "run")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert invoke(["top", str(run)]) == 3
    assert "pip install 'neural-orchestra[top]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("strategy", "workers", "servers", "drawn"),
    [
        ("allreduce", 3, 0, ["", "╭─ 0 ─ 1 ─ 2 ─╮", "╰─────────────╯"]),
        ("localsgd(tau=8)", 3, 0, ["", " ╭───┬───╮", " 0   1   2"]),
        ("ps", 3, 2, ["  s0    s1", " ╭┴──┬──┴╮", " 0   1   2"]),
        ("solo", 1, 0, ["", " 0", ""]),
    ],
)
def test_the_drawing_shows_which_nodes_are_connected(
    strategy: str, workers: int, servers: int, drawn: list[str], tmp_path: Path
) -> None:
    run = Follower(make(tmp_path, strategy=strategy, workers=workers, servers=servers))
    run.look()
    now = moment(run, 0.0)
    assert now is not None
    assert words.topology(now, 70) == drawn
    many = Follower(make(tmp_path, workers=5000, servers=300))
    many.look()
    crowd = moment(many, 0.0)
    assert crowd is not None
    assert max(map(len, words.topology(crowd, 70))) <= 70


# As a screen.


def screen(run: Path, size: tuple[int, int], use: Callable[[Any, Any], Coroutine[Any, Any, None]]) -> None:
    """Open it and use it."""
    from orchestra.live.screen import Top

    follower = Follower(run)

    def look() -> RunNow | None:
        follower.look()
        return moment(follower, max(path.stat().st_mtime for path in run.glob("events-*.jsonl")))

    async def session() -> None:
        app = Top(look)
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await use(app, pilot)

    asyncio.run(session())


def text(app: Any, name: str) -> str:
    return str(app.screen_stack[0].query_one(name).render())


def column(app: Any, name: str) -> list[str]:
    table = app.screen_stack[0].query_one("#nodes")
    return [str(cell) for cell in table.get_column(name)]


@needs_textual
@pytest.mark.parametrize("size", [(80, 24), (130, 40), (60, 12)])
def test_the_screen_shows_the_run_and_follows_it(size: tuple[int, int], tmp_path: Path) -> None:
    run = under_way(tmp_path / "run")

    async def use(app: Any, pilot: Any) -> None:
        assert "2 workers + 1 server" in text(app, "#head")
        assert "step 10 of 40" in text(app, "#head")
        assert column(app, "step") == ["12", "10", "21"]
        assert column(app, "state") == ["running", "running", "serving"]
        append(run, 1, steps(1, 11, 31))
        app.step()
        await pilot.pause()
        assert column(app, "step") == ["12", "30", "21"]
        (run / "running").write_text("")
        app.step()
        await pilot.pause()
        assert "recorded no error" in text(app, "#head")
        assert column(app, "state") == ["died"] * 3
        wide = [str(c.value) for c in app.query_one("#nodes").columns]
        assert ("samples/s" in wide) == (size[0] > 100)

    screen(run, size, use)


@needs_textual
def test_keys_of_the_top_screen(tmp_path: Path) -> None:
    run = under_way(tmp_path / "run")

    async def use(app: Any, pilot: Any) -> None:
        assert app.chosen.name == "worker 0"
        await pilot.press("s")  # by step, the last first; who was chosen stays so
        assert column(app, "node") == ["worker 1", "worker 0", "server 0"]
        assert app.chosen.name == "worker 0"
        await pilot.press("l")
        assert len(column(app, "losses")) == 3
        await pilot.press("p")
        append(run, 1, steps(1, 11, 31))
        app.step()
        assert "10" in column(app, "step")
        assert "paused" in text(app, "#head")
        await pilot.press("p")
        app.step()
        assert "30" in column(app, "step")
        await pilot.press("enter")
        await pilot.pause()
        assert "worker" in str(app.screen.query_one("#pane").render())
        await pilot.press("escape")
        await pilot.press("question_mark")
        await pilot.pause()
        assert "sort by" in str(app.screen.query_one("#pane").render())
        await pilot.press("escape")
        await pilot.press("q")
        await pilot.pause()
        assert not app.is_running

    screen(run, (100, 30), use)


@needs_textual
def test_hostile_names_are_text_on_the_screen(tmp_path: Path) -> None:
    run = under_way(tmp_path / "run", strategy="[red]x[/red] [@click=app.bell]y[/]\x1b[2J")

    async def use(app: Any, pilot: Any) -> None:
        assert "[red]x[/red] [@click=app.bell]y[/]\\u001b[2J" in text(app, "#head")

    screen(run, (120, 30), use)
