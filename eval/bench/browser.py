"""Headless Chromium for tests and screenshots, by the W3C WebDriver protocol over HTTP.

Debian's packages ``chromium`` and ``chromium-driver`` are all that is needed. Chromium's own commands (device sizes,
whole pages, PDF) go through ``goog/cdp/execute``.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import httpx

_INSIDE = ("file:", "data:", "blob:", "about:", "chrome:")  # schemes that leave the machine alone
_STARTED = re.compile(r"successfully on port (\d+)")
_TIMEOUT_S = 120.0


class BrowserError(RuntimeError):
    """Chromium is missing, or did not do what it was asked. The message says what to do."""


class Message(NamedTuple):
    level: str  # SEVERE, WARNING, INFO
    text: str


def installed() -> bool:
    return _chromium() is not None and shutil.which("chromedriver") is not None


def _chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One browser window; a context manager.

    Raises:
        BrowserError: Chromium or its driver is not there, or does not start.
    """

    def __init__(self, width: int = 1280, height: int = 900) -> None:
        binary, driver = _chromium(), shutil.which("chromedriver")
        if binary is None or driver is None:
            raise BrowserError("Chromium and chromedriver are needed: apt-get install chromium chromium-driver")
        self._session = ""
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._driver = subprocess.Popen(
            [driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            self._client = httpx.Client(
                base_url=f"http://127.0.0.1:{self._port()}", timeout=_TIMEOUT_S, trust_env=False
            )
            arguments = [
                "--headless=new",
                "--no-sandbox",  # it shows pages that we wrote, and containers run as root
                "--disable-gpu",
                "--hide-scrollbars",  # a whole page has none
                "--disable-dev-shm-usage",
                f"--user-data-dir={self._profile.name}",
                f"--window-size={width},{height}",
            ]
            wanted = {
                "browserName": "chrome",
                "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
                "goog:chromeOptions": {"binary": binary, "args": arguments},
            }
            made = self._post("/session", {"capabilities": {"alwaysMatch": wanted}})
            self._session = f"/session/{made['sessionId']}"
            self.resize(width, height)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the browser and its driver."""
        if self._session:
            self._client.delete(self._session)
            self._session = ""
        self._driver.terminate()
        self._driver.wait(timeout=30)
        self._profile.cleanup()

    def open(self, url: str | Path) -> None:
        """Load a page, and wait until it is there."""
        address = url.resolve().as_uri() if isinstance(url, Path) else url
        self._post(f"{self._session}/url", {"url": address})

    def resize(self, width: int, height: int) -> None:
        """Make the page see a screen of so many CSS pixels; narrower than a window can be."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", size)

    def run(self, script: str, *arguments: Any) -> Any:
        """What a function body in JavaScript returns."""
        return self._post(f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def messages(self) -> list[Message]:
        """What the console said since the last call."""
        found = self._post(f"{self._session}/se/log", {"type": "browser"})
        return [Message(entry["level"], entry["message"]) for entry in found]

    def outside(self) -> list[str]:
        """Addresses beyond this machine's files that were asked for since the last call."""
        urls = []
        for entry in self._post(f"{self._session}/se/log", {"type": "performance"}):
            event = json.loads(entry["message"])["message"]
            if event["method"] == "Network.requestWillBeSent":
                urls.append(str(event["params"]["request"]["url"]))
        return [url for url in urls if not url.startswith(_INSIDE)]

    def screenshot(self, *, whole: bool = True) -> bytes:
        """A PNG of the window, or of the whole page."""
        taken = self.command("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole} | (
            {"clip": self._whole()} if whole else {}))  # fmt: skip
        return base64.b64decode(taken["data"])

    def pdf(self) -> bytes:
        """The page as it is printed."""
        return base64.b64decode(self.command("Page.printToPDF", {"printBackground": False})["data"])

    def command(self, name: str, parameters: dict[str, Any]) -> Any:
        """A command of the Chrome DevTools protocol."""
        return self._post(f"{self._session}/goog/cdp/execute", {"cmd": name, "params": parameters})

    def _whole(self) -> dict[str, float]:
        size = self.command("Page.getLayoutMetrics", {})["cssContentSize"]
        return {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._client.post(path, json=body)
        value = answer.json()["value"]
        if answer.status_code != 200:
            raise BrowserError(f"{path.rsplit('/', 1)[-1]}: {value.get('message', value)}")
        return value

    def _port(self) -> int:
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if found := _STARTED.search(line):
                return int(found[1])
        raise BrowserError("chromedriver ended before it listened; run chromedriver --version to see why")
