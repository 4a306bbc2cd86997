"""Takes the README's picture of the playground: a real server, a real browser, one comparison.

python scripts/playground_picture.py docs/images/playground.png
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.server.browser import IS_THERE, WHY_NOT, Browser
from tests.server.harness import start_server

QUESTION = """Add a docstring to this function and write it again:

def is_prime(n):
    if n < 2:
        return False
    for i in range(2, int(n ** 0.5) + 1):
        if n % i == 0:
            return False
    return True"""
SHOWN = 37  # of the drafted tokens, the one whose card is open
CONTROL_ENTER = "\ue009\ue007"


def main(path: str) -> None:
    if not IS_THERE:
        raise SystemExit(WHY_NOT)
    server, browser = start_server("default"), Browser(1360, 1080)
    try:
        browser.emulate(prefers_color_scheme="light")
        browser.open(server.url)
        browser.set("max-tokens", 160)
        browser.set("prompt", QUESTION)
        browser.type(CONTROL_ENTER)
        browser.until_answered()
        browser.script("document.querySelectorAll('.column .token.by-0')[arguments[0]].focus()", SHOWN)
        browser.driver.save_screenshot(path)
    finally:
        browser.close()
        server.kill()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "docs/images/playground.png")
