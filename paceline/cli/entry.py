"""What the `paceline` script calls. Invariant: Ctrl-C ends with status 130 and no traceback, even while
modules are being imported.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130
SHOW_CURSOR = "\x1b[?25h"


def main() -> int:
    try:
        signal.signal(signal.SIGINT, _interrupt)
        from paceline.cli.main import app

        app()
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Leaves at once from within an import: libraries swallow the exception and go on half imported."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            if sys.stderr.isatty():
                sys.stderr.write(SHOW_CURSOR)  # a progress line may have hidden it
                sys.stderr.flush()
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt
