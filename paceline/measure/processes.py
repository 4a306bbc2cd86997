"""Processes that are measured: a worker with one engine (load, ask, stop), and `paceline serve`. Invariant:
what was started is stopped with all it started, however the measurement ends. A worker that dies, hangs or
fails becomes one error with the end of its log; every request has a time limit.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NamedTuple

from paceline.core.errors import PacelineError
from paceline.cpu.cores import usable_cores
from paceline.measure.endpoint import Endpoint, endpoint_of
from paceline.measure.results import Tell
from paceline.measure.rows import FOLDERS, OURS, Row, peer_python

PROGRAM = Path(__file__).parent / "workers" / "serve.py"
# By engine; of peers in workers/.
MODULES = {OURS: "paceline.measure.engines", **{peer: f"run_{name}" for peer, name in FOLDERS.items()}}
LOAD_S, ANSWER_S, DEATH_S = 900.0, 600.0, 5.0
LOG_LINES, LOG_CHARACTERS = 4, 600
# Errors of ours whose messages say it all.
OURS_TO_MEND = ("ConfigError", "RequestError", "ModelError", "ModelNotFound", "ModelFileError")
CODE = "from paceline.cli.entry import main; raise SystemExit(main())"
START_S, STOP_S = 300.0, 120.0


class WorkerError(PacelineError):
    """A worker that died, hung or failed; the message ends with the end of its log."""


class Worker:
    """One engine in one process. It is busy only while it is asked."""

    def __init__(self, name: str, python: str, module: str, log: Path, threads: int) -> None:
        self.name, self.log, self.note = name, log, None  # note: what it says about itself
        counts = {f"{name}_NUM_THREADS": str(threads) for name in ("OMP", "NUMBA", "OPENBLAS", "MKL")}
        env = {**os.environ, **counts, "TOKENIZERS_PARALLELISM": "false"}
        self._pipe, theirs = Pipe()
        with log.open("wb") as file, theirs:
            command = [python, str(PROGRAM), module]
            given: dict[str, Any] = {"stdin": theirs.fileno(), "stdout": file, "stderr": file, "env": env}
            self._process = subprocess.Popen(command, start_new_session=True, **given)
        self.pid = self._process.pid

    def ask(self, op: str, seconds: float = ANSWER_S, **message: Any) -> dict[str, Any]:
        message = {"op": op, **message}
        try:
            self._pipe.send(message)
            if not self._pipe.poll(seconds):
                raise WorkerError(f"{self.name} has not answered in {seconds:.0f} s; {self._log_end()}")
            answer: dict[str, Any] = self._pipe.recv()
        except (OSError, EOFError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(DEATH_S)
            status = self._process.returncode
            how = "closed its pipe" if status is None else f"died (exit status {status})"
            if status is not None and status < 0:
                killed = ", perhaps out of memory" if status == -signal.SIGKILL else ""
                how = f"died (signal {-status}{killed})"
            raise WorkerError(f"{self.name} {how}; {self._log_end()}") from None
        if "error" not in answer:
            return answer
        if answer["kind"] in OURS_TO_MEND:
            raise WorkerError(f"{self.name}: {answer['error']}")
        raise WorkerError(f"{self.name} failed: {answer['kind']}: {answer['error']:.300}; {self._log_end()}")

    def _log_end(self) -> str:
        lines = self.log.read_bytes()[-8192:].decode("utf-8", "replace").split("\n")
        said = " | ".join([line.strip() for line in lines if line.strip()][-LOG_LINES:])[-LOG_CHARACTERS:]
        return f"its log {self.log} ends: {said or '(it is empty)'}"

    def peak_mb(self) -> float | None:
        """The most memory it has held; None where the system does not say."""
        with contextlib.suppress(OSError):
            if found := re.search(r"^VmHWM:\s*(\d+)", Path(f"/proc/{self.pid}/status").read_text(), re.M):
                return round(int(found[1]) / 1024, 1)
        return None

    def stop(self) -> None:
        """End the worker and all it started; harmless when it is gone."""
        self._pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def peer_worker(row: Row, options: dict[str, Any], tell: Tell) -> Iterator[Worker]:
    """The worker of a row, loaded with these options and later stopped; the log of one that fails stays."""
    tell(f"loading {row}", 0)
    handle, log = tempfile.mkstemp(prefix="paceline-bench-", suffix=".log")
    os.close(handle)
    threads = usable_cores(count_siblings=True)
    shared = {"method": row.method, "threads": threads, "in_flight": 1, "is_raw": row.is_raw}
    worker = Worker(str(row), peer_python(row.peer), MODULES[row.peer], Path(log), threads)
    try:
        worker.note = worker.ask("load", LOAD_S, options={**shared, **options})["note"]
        yield worker
    finally:
        worker.stop()
        if not isinstance(sys.exception(), WorkerError):
            worker.log.unlink(missing_ok=True)


class Server(NamedTuple):
    process: subprocess.Popen[bytes]
    endpoint: Endpoint
    log: Path  # what it says about itself, a JSON object a line

    def stop(self) -> int:
        """Its exit status, after it has ended what was running."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_S)


@contextlib.contextmanager
def our_server(model: str, options: str) -> Iterator[Server]:
    """`options`: further ones of `paceline serve`, as on a command line."""
    with tempfile.NamedTemporaryFile(prefix="paceline-bench-") as log:
        command = [sys.executable, "-c", CODE, "serve", model, "--port", "0", *shlex.split(options)]
        process, end = subprocess.Popen(command, stderr=log, stdout=log), time.monotonic() + START_S
        try:
            while '"event": "engine ready"' not in (text := Path(log.name).read_text()):
                if process.poll() is not None or time.monotonic() > end:
                    raise PacelineError(f"the server did not start; its log ends: {text[-600:]}")
                time.sleep(0.1)
            found = re.search(r'"url": "(http://[^"]*)"', text)
            assert found is not None, "a server that is ready has said where"
            yield Server(process, endpoint_of(found[1], None), Path(log.name))
        finally:
            process.terminate()  # harmless when it is gone
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
