# SPDX-License-Identifier: Apache-2.0
"""A real browser, driven over a pipe by the DevTools protocol: Chromium and the standard library, nothing else."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
_PATIENCE = 30.0  # seconds


class Browser:
    """One Chromium without a window. Its pages complain here."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        (theirs_in, self._out), (self._in, theirs_out) = os.pipe(), os.pipe()
        flags = ["--headless=new", "--no-first-run", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"]
        flags += ["--no-sandbox"] * (os.geteuid() == 0)
        # The protocol speaks on descriptors 3 and 4; a shell puts the pipes there.
        script = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        command = ["/bin/bash", "-c", script, CHROMIUM, *flags, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            command, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer = b""
        self._last = 0
        self.complaints: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(10)
        os.close(self._out)
        os.close(self._in)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Ask for something and wait for the answer."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + _PATIENCE
        while True:
            answer = self._next(until)
            if answer.get("id") == self._last:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            self._buffer += os.read(self._in, 1 << 20)
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._listen(message)
        return message

    def _listen(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                self.complaints.append(str(details.get("exception", {}).get("description", details["text"])))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.complaints.append(" ".join(str(a.get("value", a.get("description"))) for a in parameters["args"]))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.complaints.append(parameters["entry"]["text"])

    def open(self, url: str, width: int = 1280, height: int = 900, *, dark: bool = False) -> Page:
        """A page, once it is ready."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, target)
        for domain in ("Runtime", "Log", "Page"):
            page.call(f"{domain}.enable")
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        page.call("Emulation.setEmulatedMedia", features=scheme)
        page.resize(width, height)
        page.call("Page.navigate", url=url)
        return page


class Page:
    """One page."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self.browser, self._session, self._target = browser, session, target

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask for something of this page."""
        return self.browser.call(method, self._session, **parameters)

    def resize(self, width: int, height: int) -> None:
        """Another window."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )

    def ask(self, expression: str) -> Any:
        """What an expression gives there."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait for something to be true."""
        end = time.monotonic() + _PATIENCE
        while not self.ask(expression):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.05)

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.ask("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def go(self, name: str) -> None:
        """To another page of the report."""
        self.ask(f"location.hash = {json.dumps('#' + name)}")
        self.settle()

    def key(self, key: str) -> None:
        """Press a key."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def picture(self, path: Path) -> None:
        """What it looks like, from top to bottom."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """Leave it."""
        self.browser.call("Target.closeTarget", targetId=self._target)
