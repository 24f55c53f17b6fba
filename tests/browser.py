"""A Chromium for tests, driven over its DevTools protocol."""

import base64
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT_S = 30.0


class Tab:
    """One page. `errors` are uncaught exceptions, what went to console.error, and what its policy refused."""

    def __init__(self, socket: ClientConnection) -> None:
        self.errors: list[str] = []
        self._socket = socket
        self._ids = itertools.count(1)
        for domain in ("Page", "Runtime", "Log"):
            self.do(f"{domain}.enable")

    def do(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        command = next(self._ids)
        self._socket.send(json.dumps({"id": command, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=WAIT_S))
            if message.get("id") == command:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def eval(self, script: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        reply = self.do("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def wait(self, script: str, timeout_s: float = WAIT_S) -> None:
        """Until an expression is true."""
        deadline = time.monotonic() + timeout_s
        while not self.eval(f"Boolean({script})"):
            assert time.monotonic() < deadline, f"{script} did not become true; {self.errors}"
            time.sleep(0.02)

    def open(self, url: str) -> None:
        self.do("Page.navigate", url=url)
        self.wait(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})")

    def type(self, text: str) -> None:
        """Into whatever has the focus."""
        self.do("Input.insertText", text=text)

    def press(self, key: str, code: int, text: str = "") -> None:
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.do("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self.do("Input.dispatchKeyEvent", type="keyUp", **event)

    def look(self, *, width: int, height: int, scheme: str = "light", scale: float = 1) -> None:
        """The size of the window and the colour scheme the user prefers."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.do("Emulation.setDeviceMetricsOverride", **metrics)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.do("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.do("Page.captureScreenshot", format="png")["data"]))

    def _note(self, event: dict[str, Any]) -> None:
        params = event["params"]
        if event["method"] == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif event["method"] == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(str(params["args"]))


@contextmanager
def chromium(profile: Path) -> Iterator[Tab]:
    """A headless browser with an empty profile; skips the test where none is installed."""
    binary = next(filter(None, map(shutil.which, NAMES)), None)
    if binary is None:
        pytest.skip(f"none of {', '.join(NAMES)} is installed")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += ["--hide-scrollbars", "--remote-debugging-port=0", f"--user-data-dir={profile}"]
    log = profile / "log"
    with log.open("wb") as output:
        browser = subprocess.Popen([binary, *options, "about:blank"], stdout=output, stderr=output)
    try:
        port_file = profile / "DevToolsActivePort"
        deadline = time.monotonic() + WAIT_S
        while not (port_file.is_file() and "\n" in port_file.read_text()):
            assert browser.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        port = port_file.read_text().split()[0]
        targets = httpx.get(f"http://127.0.0.1:{port}/json", trust_env=False).json()
        address = next(t["webSocketDebuggerUrl"] for t in targets if t["type"] == "page")
        with connect(address, max_size=64 << 20, proxy=None) as socket:
            yield Tab(socket)
    finally:
        browser.terminate()
        browser.wait(10)
