"""Takes the pictures of the playground in docs/images, from a real server and a real browser:

    python -m tests.server.take_pictures [FOLDER]

The figures in them are measured while they are taken, so the machine should have nothing else to do.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from paceline.cli.demo import LETTER
from paceline.loaders import hub
from tests.server.browser import Browser
from tests.server.harness import start_server

QUESTION = " ".join(LETTER.split())  # a line, since Enter sends
TIPS = "Give three tips for a cyclist who rides in a group, and say why each one matters."
SKY = "Explain in simple words why the sky is blue, and then sum it up in one sentence."
ENTER, CONTROL = "\ue007", "\ue009"
MOST_BYTES = 200_000
SETTLES_S = 0.3  # what fades or scrolls


def save(browser: Browser, path: Path) -> None:
    time.sleep(SETTLES_S)
    browser.script("document.activeElement.blur()")
    browser.driver.save_screenshot(str(path))
    size = path.stat().st_size
    assert size < MOST_BYTES, f"{path} has {size:,} bytes; make the page smaller"
    print(f"{path}: {size:,} bytes")


def start_over(browser: Browser) -> None:
    browser.script("document.getElementById('new-chat').click()")  # leaves the pointer where it is


def open_page(browser: Browser, url: str) -> None:
    browser.emulate(prefers_color_scheme="light")
    browser.open(url)
    browser.set("max-tokens", 160)
    browser.type("Hello!", ENTER)  # the first answer after a start is slower
    browser.until_answered()
    start_over(browser)


def take_races(browser: Browser, url: str, folder: Path) -> None:
    open_page(browser, url)
    browser.type(QUESTION, CONTROL, ENTER)
    browser.until_answered()
    save(browser, folder / "playground.png")
    browser.resize(360, 780, scale=2)
    browser.emulate(prefers_color_scheme="dark")
    start_over(browser)
    browser.type(SKY)
    browser.one("#race").click()
    browser.until_answered()
    save(browser, folder / "playground_phone.png")
    browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def take_tree(browser: Browser, url: str, folder: Path) -> None:
    open_page(browser, url)
    browser.one("#watch").click()
    browser.type(TIPS, ENTER)
    browser.until_answered()
    save(browser, folder / "playground_tree.png")


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")
    hub.resolve("default", progress=False)
    browser = Browser(1360, 1060)
    always = '{"method": ["suffix", "eagle"], "num_speculative_tokens": 7}'  # a tree in every pass
    try:
        for take, flags in ((take_races, ()), (take_tree, ("--speculative-config", always))):
            server = start_server("default", *flags)
            try:
                take(browser, server.url, folder)
            finally:
                server.kill()
    finally:
        browser.close()


if __name__ == "__main__":
    main()
