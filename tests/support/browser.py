"""A headless Chromium, driven by chromedriver over W3C WebDriver: plain HTTP and JSON."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--force-device-scale-factor=1",
)  # fmt: skip
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {"ESCAPE": "\ue00c", "TAB": "\ue004", "ENTER": "\ue007", "F8": "\ue038",
        "SHIFT": "\ue008", "CONTROL": "\ue009", "END": "\ue010", "RIGHT": "\ue014"}  # fmt: skip


class Browser:
    """One page. ``with Browser(folder) as browser``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> Browser:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.driver = subprocess.Popen(
            [DRIVER, f"--port={self.port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            self.session = ""
            self._wait_for_driver()
            options = {
                "binary": CHROMIUM, "args": [*ARGUMENTS, f"--user-data-dir={self.folder}"]
            }  # fmt: skip
            capabilities = {"browserName": "chrome", "goog:chromeOptions": options}
            found = self._call("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
            self.session = f"/session/{found['sessionId']}"
        except BaseException:
            self.driver.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._call("DELETE", self.session)
        finally:
            self.driver.terminate()
            self.driver.wait(10)

    def _wait_for_driver(self) -> None:
        end = time.monotonic() + 60
        while True:
            try:
                self._call("GET", "/status")
                return
            except urllib.error.URLError:
                assert time.monotonic() < end
                time.sleep(0.1)

    def _call(self, method: str, path: str, values: Any = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", method=method,
            data=None if values is None else json.dumps(values).encode(),
            headers={"Content-Type": "application/json"},
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None

    def go(self, address: str) -> None:
        """Load a page."""
        self._call("POST", f"{self.session}/url", {"url": address})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a function body returns in the page; a promise's value where it is one."""
        values = {"script": script, "args": list(arguments)}
        return self._call("POST", f"{self.session}/execute/sync", values)

    def wait(self, script: str, *arguments: Any, seconds: float = 60) -> Any:
        """The first true value of ``script``."""
        end = time.monotonic() + seconds
        while not (found := self.run(script, *arguments)):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.05)
        return found

    def _element(self, selector: str) -> str:
        values = {"using": "css selector", "value": selector}
        found = self._call("POST", f"{self.session}/element", values)
        return f"{self.session}/element/{found[_ELEMENT]}"

    def click(self, selector: str) -> None:
        """Click an element."""
        self._call("POST", f"{self._element(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        """Type into an element, where its caret is."""
        self._call("POST", f"{self._element(selector)}/value", {"text": text})

    def press(self, *keys: str) -> None:
        """Press keys, each by itself, where the focus is; ``CONTROL+ENTER`` together."""
        actions = []
        for key in keys:
            held = [KEYS.get(part, part) for part in key.split("+")]
            actions += [{"type": "keyDown", "value": each} for each in held]
            actions += [{"type": "keyUp", "value": each} for each in reversed(held)]
        source = {"type": "key", "id": "keyboard", "actions": actions}
        self._call("POST", f"{self.session}/actions", {"actions": [source]})

    def devtools(self, command: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol."""
        values = {"cmd": command, "params": parameters}
        return self._call("POST", f"{self.session}/goog/cdp/execute", values)

    def resize(self, width: int, height: int) -> None:
        """The size of the page as if on such a screen."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    def screenshot(self, path: Path, whole: bool = False) -> None:
        """Write what is seen, or the whole page, as a PNG file."""
        found = self.devtools("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))
