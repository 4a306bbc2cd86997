"""A real Chromium without a window, and what tests do on the page. Outside addresses cannot be reached from
it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selenium.webdriver.remote.webelement import WebElement

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
IS_THERE = bool(CHROMIUM and DRIVER and find_spec("selenium"))
WHY_NOT = "needs chromium, chromedriver and selenium (Debian: apt-get install chromium chromium-driver)"
WAIT_S = 240.0
QUIET = ("--headless=new", "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--no-first-run", "--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")  # fmt: skip


class Browser:
    """One tab at the playground of a server."""

    def __init__(self, width: int = 1320, height: int = 900) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        assert CHROMIUM is not None
        options.binary_location = CHROMIUM
        for argument in (
            *QUIET,
            f"--window-size={width},{height}",
            *(("--no-sandbox",) if os.geteuid() == 0 else ()),
        ):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))

    def open(self, url: str, *, until: str = "ready") -> None:
        self.driver.get(url)
        self.until(
            lambda: self.one("#server").get_attribute("data-status") == until, f"the page to say {until}"
        )

    def close(self) -> None:
        self.driver.quit()

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements("css selector", selector)

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        """As it stands in the document; WebDriver's own `text` leaves out spaces."""
        return str(self.script("return arguments[0].textContent", self.one(selector)))

    def script(self, code: str, *arguments: Any) -> Any:
        return self.driver.execute_script(code, *arguments)

    def set(self, name: str, value: object) -> None:
        """A field or slider, with the event that a person's hand would cause."""
        events = "for (const name of ['input', 'change']) e.dispatchEvent(new Event(name, {bubbles: true}))"
        self.script(
            f"const e = document.getElementById(arguments[0]); e.value = arguments[1]; {events}",
            name,
            str(value),
        )

    def emulate(self, **media: str) -> None:
        features = [{"name": name.replace("_", "-"), "value": value} for name, value in media.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": True}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def type(self, text: str, *keys: str) -> None:
        self.one("#prompt").send_keys(text, *keys)

    def until(self, is_true: Callable[[], Any], what: str, seconds: float = WAIT_S) -> None:
        end = time.monotonic() + seconds
        while not is_true():
            assert time.monotonic() < end, f"waited in vain for {what}"
            time.sleep(0.05)

    def until_answered(self, num_turns: int = 1) -> None:
        self.until(lambda: len(self.all(".turn.model")) >= num_turns, "an answer to begin")
        self.until(lambda: self.one("#talk").get_attribute("aria-busy") == "false", "the answer to end")

    def complaints(self) -> list[str]:
        """What the browser logged as wrong since the last call: broken policies, missing files, errors of
        scripts.
        """
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] in ("SEVERE", "WARNING")
        ]
