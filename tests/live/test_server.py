# SPDX-License-Identifier: Apache-2.0
"""The live page's server: who has no token sees nothing, and nothing but the page is there."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.live.made import ENVIRON, whole
from tests.waiting import wait_until

from orchestra.cli import invoke
from orchestra.live.page_feed import PageFeed, PageWriter
from orchestra.live.server import Server
from orchestra.runs.budget import Target

HOSTILE = "<script>alert(1)</script>../../etc"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    whole(tmp_path / "run", strategy=HOSTILE)
    feed = PageFeed(PageWriter([tmp_path / "run"]))
    with Server(feed) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.02,))
        thread.start()
        yield listening
        listening.shutdown()
        thread.join()
    feed.close()


class Answer:
    def __init__(self, server: Server, path: str, *, method: str = "GET", **headers: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        self.status, self.headers, self.body = answer.status, answer.headers, answer.read()
        connection.close()


def enter(server: Server) -> str:
    """Spend the token for a cookie."""
    address = urlsplit(server.url)
    answer = Answer(server, f"/?{address.query}")
    assert answer.status == 200
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    return cookie.partition(";")[0]


def test_the_token_opens_once(server: Server) -> None:
    query = urlsplit(server.url).query
    assert len(query) >= len("token=") + 43  # 32 bytes
    cookie = enter(server)
    assert Answer(server, f"/?{query}").status == 403
    assert Answer(server, "/", Cookie=cookie).status == 200
    assert Answer(server, f"/?{query}", Cookie=cookie).status == 200


def test_two_who_come_at_once_do_not_both_get_in(server: Server) -> None:
    assert server.token is not None
    token, got = server.token, []
    threads = [threading.Thread(target=lambda: got.append(server.spend(token))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(got) == 1


@pytest.mark.parametrize(
    "path", ["/", "/since", "/report", "/?token=", "/?token=wrong", "/?token=%ff%00", "/favicon.ico"]
)
def test_without_it_there_is_nothing(path: str, server: Server) -> None:
    answer = Answer(server, path)
    assert answer.status == 403
    assert b"run" not in answer.body.lower().replace(b"orchestra", b"")
    assert "Set-Cookie" not in answer.headers
    assert Answer(server, path.partition("?")[0], Cookie=f'orchestra-{server.server_port}=wrong; a="b').status == 403


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "evil.example:{port}", ""])
def test_another_name_does_not_lead_here(host: str, server: Server) -> None:
    """DNS rebinding: a page of evil.example whose name now leads to 127.0.0.1."""
    cookie = enter(server)
    assert Answer(server, "/report", Cookie=cookie, Host=host.format(port=server.server_port)).status == 403
    assert Answer(server, "/report", Cookie=cookie, Host=f"localhost:{server.server_port}").status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT", "HACK"])
def test_methods_other_than_get_are_refused(method: str, server: Server) -> None:
    assert Answer(server, "/since", method=method, Cookie=enter(server)).status == 403


PATHS = [
    "/etc/passwd",
    "/../config.json",
    "/config.json",
    "//etc/passwd",
    "/%2e%2e/config.json",
    "/report/..",
    "/report/",
]


@pytest.mark.parametrize("path", PATHS)
def test_no_path_is_a_file(path: str, server: Server) -> None:
    answer = Answer(server, path, Cookie=enter(server))
    assert answer.status == 403
    assert b"Access refused" in answer.body


@pytest.mark.parametrize("others", ["a b=1", "a,b=[1]", 'theme={"dark":true}', "=", "a=b=c", "name", "é=ü"])
def test_foreign_cookies_do_not_block_access(others: str, server: Server) -> None:
    """Other servers on this machine share the cookies: browsers do not tell ports apart."""
    cookie = enter(server)
    for all_of_them in (f"{others}; {cookie}", f"{cookie}; {others}", f"{others};{cookie};{others}"):
        assert Answer(server, "/since", Cookie=all_of_them).status == 200
    assert Answer(server, "/since", Cookie=f"{others}; x{cookie}; {cookie}x").status == 403


BROWSER = """
import json, os, sys, time
from pathlib import Path
from urllib.parse import urlsplit
file = Path(urlsplit(sys.argv[1]).path)
seen = {"pid": os.getpid(), "words": sys.argv, "text": file.read_text(), "mode": file.stat().st_mode & 0o777}
Path("draft").write_text(json.dumps(seen | {"file": str(file)}))
Path("draft").rename("seen")
time.sleep(60)
"""


def test_a_browser_that_stays_open_does_not_block_watch_and_gets_no_token_as_an_argument(tmp_path: Path) -> None:
    """One of the terminal's ends when it is closed; and what a process was told to do, all users of a machine see."""
    whole(tmp_path / "run")
    (tmp_path / "browser.py").write_text(BROWSER)
    environ = {**ENVIRON, "HOME": str(tmp_path), "BROWSER": f"{sys.executable} {tmp_path}/browser.py %s"}
    command = [sys.executable, "-m", "orchestra", "watch", "run"]
    with subprocess.Popen(command, cwd=tmp_path, env=environ, text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        seen: dict[str, Any] = {}
        try:
            wait_until((tmp_path / "seen").exists)
            seen |= json.loads((tmp_path / "seen").read_text())
            assert url.partition("token=")[2] not in " ".join(seen["words"])
            assert url in seen["text"]
            assert seen["mode"] == 0o600
            with urllib.request.urlopen(url, timeout=20) as answer:
                assert answer.status == 200
            wait_until(lambda: not Path(seen["file"]).exists())
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
        finally:
            process.kill()
            if seen:
                os.kill(seen["pid"], signal.SIGKILL)


def test_pages_of_others_get_nothing(server: Server) -> None:
    cookie = enter(server)
    asked = {"Cookie": cookie, "Sec_Fetch_Mode": "cors"}
    assert Answer(server, "/report", Sec_Fetch_Site="cross-site", **asked).status == 403
    assert Answer(server, "/report", Sec_Fetch_Site="same-site", **asked).status == 403  # another port
    assert Answer(server, "/report", Sec_Fetch_Site="same-origin", **asked).status == 200


def test_answers_say_how_to_take_them(server: Server) -> None:
    cookie = enter(server)
    for path in ("/", "/since", "/report", "/nothing"):
        headers = Answer(server, path, Cookie=cookie).headers
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store"
        assert headers["X-Frame-Options"] == "DENY"
        assert "Access-Control-Allow-Origin" not in headers
    page = Answer(server, "/", Cookie=cookie)
    assert page.headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert b"default-src 'none'" in page.body
    assert b"connect-src 'self'" in page.body


def test_what_it_tells_is_the_story_and_where_runs_are(server: Server, tmp_path: Path) -> None:
    cookie = enter(server)
    now = json.loads(Answer(server, "/since", Cookie=cookie).body)
    assert [(run["state"], run["step"], run["strategy"]) for run in now["runs"]] == [("done", 40, HOSTILE)]
    story = Answer(server, "/report", Cookie=cookie)
    told = json.loads(gzip.decompress(story.body))
    assert told["runs"][0]["strategy"] == HOSTILE
    assert now["version"] >= 1


def test_hostile_names_are_text_on_the_page(server: Server) -> None:
    page = Answer(server, "/", Cookie=enter(server)).body.decode()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page


def test_the_server_listens_on_loopback_alone(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"


def test_malformed_requests_do_not_stop_the_server(server: Server) -> None:
    for nonsense in (
        b"\x16\x03\x01\x02\x00",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b"\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=5) as line:
            line.sendall(nonsense)
    assert Answer(server, "/", Cookie=enter(server)).status == 200


def test_a_target_may_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = whole(tmp_path / "run")
    assert PageWriter([run], Target("accuracy", 0.3)).report["target"]["value"] == 0.3
    assert invoke(["watch", str(run), "--target", "much"]) == 2
    assert "must be a score and a number" in capsys.readouterr().err


def test_a_folder_that_is_gone_takes_nothing_with_it(tmp_path: Path) -> None:
    run = whole(tmp_path / "run")
    feed = PageFeed(PageWriter([run]))
    try:
        (run / "config.json").unlink()
        (run / "ending.json").unlink()
        feed._writer._searched = 0.0
        feed._changed = True
        for _ in range(100):
            if "ConfigError" in json.loads(feed.since()[0])["trouble"] or feed._stopped.wait(0.1):
                break
        answer = json.loads(feed.since()[0])
        assert "ConfigError" in answer["trouble"]
        assert json.loads(gzip.decompress(feed.since()[1]))["runs"][0]["steps"] == 40
    finally:
        feed.close()


# Many at once.


def idle(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=20)


def held(server: Server) -> int:
    return len(server._held)


def ends(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_200_connections_are_held_and_one_more_is_answered(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that ask for nothing give way to those that do, the oldest first; no more than 200 threads are there."""
    monkeypatch.setattr("orchestra.live.server._Handler.timeout", 60)
    cookie, before = enter(server), {*threading.enumerate()}

    def answering() -> int:
        return sum(thread not in before for thread in threading.enumerate())

    wait_until(lambda: not answering())
    waiting = [idle(server) for _ in range(200)]
    try:
        wait_until(lambda: answering() == 200)
        for _ in range(3):
            assert Answer(server, "/since", Cookie=cookie).status == 200
        assert all(map(ends, waiting[:1]))
        assert not select.select(waiting[3:], [], [], 0)[0]  # the others are still there
        waiting += [idle(server) for _ in range(100)]
        wait_until(lambda: answering() == 200)
        assert all(map(ends, waiting[:100]))
        assert Answer(server, "/since", Cookie=cookie).status == 200
    finally:
        for connection in waiting:
            connection.close()
    wait_until(lambda: not answering())


def test_when_all_are_being_answered_one_more_is_told_so(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that it should come again; and then it is answered."""
    cookie, go_on, really = enter(server), threading.Event(), server.feed.since
    wait_until(lambda: held(server) == 0)
    monkeypatch.setattr("orchestra.live.server.MOST", 3)
    monkeypatch.setattr(server.feed, "since", lambda: go_on.wait(60) and really())
    found: list[int] = []
    busy = [
        threading.Thread(target=lambda: found.append(Answer(server, "/since", Cookie=cookie).status)) for _ in "abc"
    ]
    for thread in busy:
        thread.start()
    wait_until(lambda: list(server._held.values()) == ["asked"] * 3)
    answer = Answer(server, "/since", Cookie=cookie)
    assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
    assert b"Try again" in answer.body
    go_on.set()
    for thread in busy:
        thread.join()
    assert found == [200] * 3
    assert Answer(server, "/since", Cookie=cookie).status == 200
