"""What the `paceline` script calls. Invariant: Ctrl-C ends with status 130 and no traceback, even while modules are being imported."""

from __future__ import annotations


def main() -> int:
    try:
        from paceline.cli.main import app

        app()
    except KeyboardInterrupt:
        return 130
    return 0
