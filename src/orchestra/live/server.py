# SPDX-License-Identifier: Apache-2.0
"""The server of a live page for one browser: loopback only, and only with the address that was printed.

    GET /?token=T       the page, once: then T is invalid, and the browser has a cookie instead
    GET /               the page, with the cookie
    GET /since          the state of the runs, and the version of their report
    GET /report         the report, compressed

Any other request is refused, and so is any other Host: a foreign name that resolves to 127.0.0.1 (DNS rebinding) gets
no data. No path is ever looked up in a file system.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from orchestra.live.page_feed import PageFeed

_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_REFUSED = (
    "Access refused. The address that `orchestra watch` printed opens the page once, in one browser: "
    "start it again for another.\n"
)


MOST = 200  # connections at once, each with a thread of its own
_SPARE = 16  # more connections, which are only told that the server is full
_FULL = f"{MOST} connections are open, and all are being answered. Try again in a second.\n"


class Server(ThreadingHTTPServer):
    """Listens on 127.0.0.1. Port 0: any free port.

    Holds `MOST` connections. A further one replaces the oldest that has not sent a request yet; if all have, it gets
    the answer 503.
    """

    daemon_threads = True
    request_queue_size = MOST  # connections that the kernel holds until they are accepted

    def __init__(self, feed: PageFeed, port: int = 0) -> None:
        self._held: dict[Any, str] = {}  # connections in the order of their arrival: idle, asked or refused
        self._holding = threading.Lock()
        super().__init__(("127.0.0.1", port), _Handler)
        self.feed = feed
        self.token: str | None = secrets.token_urlsafe(32)
        self.session = secrets.token_urlsafe(32)
        self._spending = threading.Lock()

    @property
    def hosts(self) -> tuple[str, ...]:
        """The values of Host that are accepted."""
        return f"127.0.0.1:{self.server_port}", f"localhost:{self.server_port}"

    @property
    def url(self) -> str:
        """The address of the page, which works once."""
        return f"http://{self.hosts[0]}/?token={self.token}"

    def spend(self, token: str) -> bool:
        """Return whether this is the token and it is unused; use it up."""
        with self._spending:
            if self.token is None or not hmac.compare_digest(self.token.encode(), token.encode()):
                return False
            self.token = None
            return True

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection in a thread of its own, if there is room."""
        with self._holding:
            if self._count("idle", "asked") >= MOST and self._count("idle"):
                self._drop(next(held for held, state in self._held.items() if state == "idle"))
            if self._count("idle", "asked") < MOST:
                self._held[request] = "idle"
            elif self._count("refused") < _SPARE:
                self._held[request] = "refused"
            room = request in self._held
        if room:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def _count(self, *states: str) -> int:
        return sum(state in states for state in self._held.values())

    def _drop(self, request: Any) -> None:
        """End a connection: its thread wakes up and closes it."""
        del self._held[request]
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def begin(self, request: Any) -> bool:
        """Return whether to answer a request on this connection; if so, the connection keeps its place until then."""
        with self._holding:
            if self._held.get(request) == "idle":
                self._held[request] = "asked"
            return self._held.get(request) == "asked"

    def close_request(self, request: Any) -> None:
        """Forget a connection and close it."""
        with self._holding:
            self._held.pop(request, None)
        super().close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors: the browser closed the connection."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "orchestra", ""
    timeout = 10  # seconds that a connection may take to send its request

    def do_GET(self) -> None:
        """Answer a request; all other methods are refused."""
        if not self.server.begin(self.connection):
            return self._give(_FULL.encode(), {"Content-Type": "text/plain; charset=utf-8", "Retry-After": "1"}, 503)
        asked = urlsplit(self.path)
        if self.headers.get_all("Host", []) not in [[host] for host in self.server.hosts] or self._foreign():
            return self._refuse()
        if asked.path == "/":
            return self._page(parse_qs(asked.query).get("token", [""])[0])
        if not self._known():
            return self._refuse()
        now, report, version = self.server.feed.since()
        if asked.path == "/since":
            return self._give(now, {"Content-Type": "application/json"})
        if asked.path == "/report":
            about = {"Content-Type": "application/json", "Content-Encoding": "gzip", "X-Version": str(version)}
            return self._give(report, about)
        return self._refuse()

    def _page(self, token: str) -> None:
        about = {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": "frame-ancestors 'none'"}
        if not self._known():
            if not self.server.spend(token):
                return self._refuse()
            about["Set-Cookie"] = f"{self._cookie}={self.server.session}; HttpOnly; SameSite=Strict; Path=/"
        self._give(self.server.feed.page().encode(), about)

    @property
    def _cookie(self) -> str:
        return f"orchestra-{self.server.server_port}"  # browsers do not tell ports apart

    def _known(self) -> bool:
        """Whether one of the cookies is ours: other servers on this host may have set more, in any form."""
        ours = f"{self._cookie}={self.server.session}".encode()
        sent = self.headers.get("Cookie", "").split(";")
        return any(hmac.compare_digest(cookie.strip().encode(), ours) for cookie in sent)

    def _foreign(self) -> bool:
        """Whether the browser says that a page of another site sent the request, other than by a link."""
        site, mode = self.headers.get("Sec-Fetch-Site", "none"), self.headers.get("Sec-Fetch-Mode", "navigate")
        return site not in ("none", "same-origin") and mode != "navigate"

    def _give(self, body: bytes, about: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, **about, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self) -> None:
        self._give(_REFUSED.encode(), {"Content-Type": "text/plain; charset=utf-8"}, 403)

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse malformed requests like any other."""
        self._refuse()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing on the terminal."""
