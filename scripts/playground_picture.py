"""Takes the README's picture of the playground: a real server, a real browser, one comparison.

python scripts/playground_picture.py docs/images/playground.png
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.server.browser import IS_THERE, WHY_NOT, Browser
from tests.server.harness import start_server

QUESTION = "Write a Python function that checks if a number is prime, then explain it line by line."
CONTROL_ENTER = "\ue009\ue007"


def main(path: str) -> None:
    if not IS_THERE:
        raise SystemExit(WHY_NOT)
    server, browser = start_server("default"), Browser(1360, 1010)
    try:
        browser.emulate(prefers_color_scheme="light")
        browser.open(server.url)
        browser.set("max-tokens", 160)
        browser.type(QUESTION, CONTROL_ENTER)
        browser.until_answered()
        token = next(each for each in browser.all(".column .token.by-0") if len(each.text.strip()) > 2)
        browser.script("arguments[0].focus()", token)
        browser.driver.save_screenshot(path)
    finally:
        browser.close()
        server.kill()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "docs/images/playground.png")
