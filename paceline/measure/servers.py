"""`paceline serve` in a process of its own, for the verbs that start a server to measure it.

Invariant: a server that was started is stopped, however the measurement ends.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from paceline.core.errors import PacelineError
from paceline.measure.endpoint import Endpoint, endpoint_of

CODE = "from paceline.cli.entry import main; raise SystemExit(main())"
START_S, STOP_S = 300.0, 120.0


class Server(NamedTuple):
    process: subprocess.Popen[bytes]
    endpoint: Endpoint

    def stop(self) -> int:
        """Its exit status, after it has ended what was running."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_S)


@contextmanager
def our_server(model: str, options: str) -> Iterator[Server]:
    """`options`: further ones of `paceline serve`, as on a command line."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        log = Path(folder) / "server.log"
        command = [sys.executable, "-c", CODE, "serve", model, "--port", "0", *shlex.split(options)]
        with log.open("wb") as stderr:
            process = subprocess.Popen(command, stderr=stderr, stdout=subprocess.DEVNULL)
        try:
            yield Server(process, endpoint_of(_address(process, log), None))
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Once its engine is ready."""
    end = time.monotonic() + START_S
    while '"event": "engine ready"' not in (text := log.read_text()):
        if process.poll() is not None or time.monotonic() > end:
            raise PacelineError(f"the server did not start; its log ends: {text[-600:]}")
        time.sleep(0.1)
    found = re.search(r'"url": "(http://[^"]*)"', text)
    assert found is not None, "a server that is ready has said where"
    return found[1]
