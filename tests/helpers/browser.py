"""Headless Chromium, controlled through the DevTools protocol over a pipe."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
# The browser reads commands from fd 3 and writes to fd 4.
_START = (
    "import os,sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
_OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
_OPTIONS += ("--no-first-run", "--disable-extensions", "--disable-background-networking", "--remote-debugging-pipe")
_SECONDS = 60


class Browser:
    """Context manager that runs a browser with one page.

    Attributes:
        complaints: console output of the page, and errors and warnings of the browser.
        requests: requested URLs.
    """

    def __init__(self, profile: Path) -> None:
        commands, self._to = os.pipe()
        self._from, answers = os.pipe()
        starter = [sys.executable, "-c", _START, str(commands), str(answers), PROGRAM]
        self._process = subprocess.Popen(
            [*starter, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._buffer, self._number, self._session = b"", 0, None
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def __enter__(self) -> "Browser":
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(page["targetId"] for page in targets if page["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Log", "Runtime", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._to)  # the browser exits when the pipe is closed
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)

    def call(self, method: str, **params: object) -> dict:
        """Run a command of the DevTools protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def open(self, page: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a page at a given screen size and color scheme, and wait until it is complete."""
        mobile = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=2 if mobile else 1, mobile=mobile,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.requests.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.wait_for("document.readyState === 'complete' && location.protocol === 'file:'")

    def value(self, expression: str) -> object:
        """Evaluate a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until a JavaScript expression is true in the page."""
        end = time.monotonic() + _SECONDS
        while not self.value(condition):
            assert time.monotonic() < end, f"timeout: {condition}"
            time.sleep(0.02)

    def screenshot(self, path: Path) -> None:
        """Write a screenshot of the whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        content = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(content))

    def _read(self) -> dict:
        """Read the next message, which is an answer or an event; record console output, errors and requests."""
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], _SECONDS)
            content = os.read(self._from, 2**20) if ready else b""
            assert content, "no answer from the browser"
            self._buffer += content
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        params = message.get("params", {})
        if message.get("method") == "Log.entryAdded":
            self.complaints.append(f"{params['entry']['level']}: {params['entry']['text']}")
        elif message.get("method") == "Runtime.consoleAPICalled":
            self.complaints.append(f"console: {params['args']}")
        elif message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(f"exception: {params['exceptionDetails']['text']}")
        elif message.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        return message
