# SPDX-License-Identifier: Apache-2.0
"""The live page in a real browser: it follows the run, keeps what the reader chose, and says what became of the run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.browser.devtools import CHROMIUM, Browser, Page
from tests.live.made import ENVIRON, append, began, make, scored, stale, steps, whole

from orchestra.live.page_feed import PageFeed, PageWriter
from orchestra.live.server import Server
from orchestra.runs import run_lock

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
    pytest.mark.timeout(120),
]

HOSTILE = "<img src=x onerror='window.hacked=1'>"
REFUSED = "Failed to load resource: net::ERR_CONNECTION_REFUSED"  # what a browser says when the server is gone


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """One for all, each of whose pages complains to its own test."""
    chromium.complaints.clear()
    yield chromium
    for target in chromium.call("Target.getTargets")["targetInfos"]:
        if target["type"] == "page" and target["url"] != "about:blank":
            chromium.call("Target.closeTarget", targetId=target["targetId"])


@contextmanager
def serving(run: Path) -> Iterator[str]:
    feed = PageFeed(PageWriter([run]))
    with Server(feed) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()
    feed.close()


def grow(run: Path, start: int, stop: int) -> None:
    for node in (0, 1):
        append(run, node, steps(node, start, stop))
    append(run, 2, stale(2 * start, 2 * stop))
    scored(run, stop, 0.5 + stop / 1000)


def begun(run: Path, **changes: object) -> Path:
    make(run, **changes)
    for node in (0, 1, 2):
        append(run, node, [began(node)])
    grow(run, 1, 11)
    return run


def ready(page: Page) -> None:
    page.until("document.getElementById('live')?.dataset.step !== undefined")
    page.ask("window.stayed = true")  # a page that is loaded again forgets it


def told(page: Page) -> str:
    return str(page.ask("document.getElementById('live').textContent"))


def test_the_page_follows_the_run_and_keeps_what_was_chosen(browser: Browser, tmp_path: Path) -> None:
    run = begun(tmp_path / HOSTILE.replace("/", "."), strategy=HOSTILE)
    with run_lock.holding(run), serving(run) as url:
        page = browser.open(url)
        ready(page)
        assert "token" not in page.ask("location.href")
        assert told(page).startswith("runningstep 10 of 40")
        page.ask("document.querySelector('input[name=axis-overview][value=samples]').click()")
        page.ask("document.getElementById('theme').click()")
        theme = page.ask("document.documentElement.dataset.theme")
        page.go("timeline")
        for _ in range(3):
            page.ask("[...document.querySelectorAll('#timeline button')].find((b) => b.textContent === '+').click()")
        window = page.ask("document.querySelector('#timeline figure.card').view.window")
        assert 0 < window[0] < window[1] < 1
        grow(run, 11, 31)
        page.until("document.getElementById('live').dataset.step === '30'")
        page.until("document.querySelector('.sub').textContent.startsWith('3 s')")
        assert page.ask("document.querySelector('#timeline figure.card').view.window") == window
        assert page.ask("location.hash") == "#timeline"
        assert page.ask("document.querySelector('input[name=axis-overview][value=samples]').checked")
        assert page.ask("document.documentElement.dataset.theme") == theme
        page.go("workers")
        page.until("document.querySelectorAll('#now tbody tr').length === 3")
        assert page.ask("document.querySelector('#now tbody tr').textContent").startswith("worker 030")
        page.go("overview")
        assert "So far" in page.ask("document.getElementById('verdict').textContent")
        assert page.ask("document.querySelectorAll('#overview figure.card svg').length") >= 1
        drawn = page.ask("document.querySelector('#overview figure.card svg').innerHTML")
        grow(run, 31, 36)
        page.until("document.getElementById('live').dataset.step === '35'")
        page.until(f"document.querySelector('#overview figure.card svg').innerHTML !== {json.dumps(drawn)}")
        whole(run, strategy=HOSTILE)
        page.until("document.getElementById('live').textContent.includes('The run has ended')")
        page.until("!document.getElementById('verdict').textContent.includes('So far')")
        assert page.ask("window.stayed")
        assert page.ask("window.hacked === undefined && document.querySelectorAll('main img').length === 0")
        page.close()
    assert browser.complaints == []


def test_a_strategy_that_comes_later_has_its_marks(browser: Browser, tmp_path: Path) -> None:
    whole(tmp_path / "runs" / "a")
    marks = (
        "[...document.querySelectorAll('#workers figure')].find((f) => f.textContent.startsWith('How long steps'))"
        ".querySelectorAll('g[aria-label=dot] path').length"
    )
    with serving(tmp_path / "runs") as url:
        page = browser.open(url)
        ready(page)
        page.go("workers")
        page.until(f"{marks} === 3")
        whole(tmp_path / "runs" / "b", strategy="allreduce", servers=0)
        page.until("document.querySelectorAll('.chips input').length === 2")
        page.until(f"{marks} === 6")
        page.close()
    assert browser.complaints == []


def test_a_page_without_its_server_says_so_and_keeps_its_content(browser: Browser, tmp_path: Path) -> None:
    with serving(begun(tmp_path / "run")) as url:
        page = browser.open(url)
        ready(page)
    page.until("document.getElementById('live').textContent.includes('No longer connected')")
    assert page.ask("document.querySelectorAll('#overview figure.card svg').length") >= 1
    assert page.ask("window.stayed")
    assert {*browser.complaints} == {REFUSED}


def test_a_reader_without_the_token_sees_nothing(browser: Browser, tmp_path: Path) -> None:
    with serving(begun(tmp_path / "run")) as url:
        ready(browser.open(url))
        stranger = browser.call("Target.createBrowserContext")["browserContextId"]
        target = browser.call("Target.createTarget", url="about:blank", browserContextId=stranger)["targetId"]
        session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(browser, session, target)
        page.call("Page.navigate", url=url)
        page.until("document.body?.textContent.includes('Access refused')")


def test_the_page_may_be_opened_from_a_file_and_loaded_again(browser: Browser, tmp_path: Path) -> None:
    door = tmp_path / "door.html"
    with serving(begun(tmp_path / "run")) as url:
        door.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={url}">')
        page = browser.open(door.as_uri())
        ready(page)
        page.call("Page.reload")
        page.until("document.readyState === 'complete' && window.stayed === undefined")
        ready(page)
        page.close()
    assert browser.complaints == []


def start(*arguments: str, cwd: Path, out: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "orchestra", *arguments]
    return subprocess.Popen(command, cwd=cwd, text=True, env=ENVIRON, stdout=out, stderr=out)


@pytest.mark.nightly
def test_a_real_run_seen_from_the_command_line_until_it_is_killed(browser: Browser, tmp_path: Path) -> None:
    slow = ("-s", "localsgd(tau=2)", "-n", "2", "--compute-time", "constant:0.1", "--steps", "5000")
    run = start("run", "digits", *slow, "--quiet", "--out", "run", cwd=tmp_path, out=subprocess.DEVNULL)
    watch = None
    try:
        while not (tmp_path / "run" / "config.json").exists():
            assert run.poll() is None
            time.sleep(0.1)
        watch = start("watch", "run", "--no-browser", cwd=tmp_path, out=subprocess.PIPE)
        assert watch.stdout is not None
        page = browser.open(watch.stdout.readline().strip())
        ready(page)
        for _ in range(2):
            step = int(page.ask("document.getElementById('live').dataset.step"))
            page.until(f"+document.getElementById('live').dataset.step > {step + 2}")
        page.until("parseFloat(document.querySelector('.sub').textContent) > 0.2")
        run.send_signal(signal.SIGKILL)
        page.until("document.getElementById('live').textContent.includes('The run died')")
        assert page.ask("window.stayed")
        assert browser.complaints == []
        page.close()
        watch.send_signal(signal.SIGINT)
        assert watch.wait(10) == 0
        assert watch.stderr is not None
        assert "Traceback" not in watch.stderr.read()
    finally:
        for process in (run, watch):
            if process is not None:
                process.kill()
                process.communicate()
