"""A real Chromium or Chrome, without a window, that notes every request and every message on its console."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import NoSuchDriverException
from selenium.webdriver.chrome.service import Service

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_MAC = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)
MISSING = (
    "the report is tested in a real browser; neither Chromium nor Chrome was found, and none could be fetched: on "
    "Debian or Ubuntu `apt install chromium chromium-driver`, on macOS install Google Chrome; elsewhere set "
    "REMAT_TEST_BROWSER to its path"
)


def browser_path() -> str | None:
    """Where the browser is: what REMAT_TEST_BROWSER names, else on the path, else where macOS keeps it."""
    named = os.environ.get("REMAT_TEST_BROWSER")
    if named:
        return named if Path(named).exists() else None
    on_path = (shutil.which(name) for name in _NAMES)
    return next((path for path in (*on_path, *_MAC) if path and Path(path).exists()), None)


class Browser:
    """A page opened from disk.

    Attributes:
        driver: Selenium's, for everything else.
    """

    def __init__(self) -> None:
        path = browser_path()
        options = webdriver.ChromeOptions()
        if path is None:
            options.browser_version = "stable"  # Selenium fetches one into the user's cache.
        else:
            options.binary_location = path
        # A container has no user namespaces for the sandbox, no GPU and little shared memory.
        for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1200,900"):
            options.add_argument(f"--{flag}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        # Where there is no chromedriver on the path, Selenium fetches the one for this browser.
        driver = shutil.which("chromedriver") if path else None
        try:
            self.driver = webdriver.Chrome(options=options, service=Service(driver) if driver else Service())
        except NoSuchDriverException:
            pytest.fail(MISSING, pytrace=False)

    def open(self, page: Path, *, width: int = 1200, dark: bool = False) -> None:
        """Open a file at a width in CSS pixels, under a light or a dark system."""
        phone = width < 600
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=850,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        self.command("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = "dark" if dark else "light"
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.driver.get(page.as_uri())
        self.settle()

    def command(self, name: str, **parameters: Any) -> Any:
        """A command of the browser's own protocol."""
        return self.driver.execute_cdp_cmd(name, parameters)

    def run(self, script: str, *args: Any) -> Any:
        """The value of a script."""
        return self.driver.execute_script(script, *args)

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 0)))"
        )

    def console(self) -> list[str]:
        """What the page wrote to the console, or what failed in it, since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses of all that was asked for since the last call."""
        messages = (json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance"))
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]

    def quit(self) -> None:
        """End the browser."""
        self.driver.quit()
