"""Processes that are measured: a worker with one engine (start, ask, stop), and `paceline serve`.

Invariant: each worker leads a process group of its own, and the group is gone when `stop` returns; a server
that was started is stopped, however the measurement ends. A worker that dies, hangs or fails becomes one
error with the end of its log; a request has a time limit, so nothing waits for ever.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from paceline.core.errors import PacelineError
from paceline.measure.endpoint import Endpoint, endpoint_of
from paceline.measure.results import Tell, num_threads
from paceline.measure.rows import OURS, Row, peer_python

PROGRAM = Path(__file__).parent / "workers" / "serve.py"
MODULES = {  # in workers/, by engine
    OURS: "run_paceline",
    "llama.cpp": "run_llamacpp",
    "transformers": "run_transformers",
    "vllm": "run_vllm",
}
LOAD_SECONDS, ANSWER_SECONDS, STOP_SECONDS = 900.0, 600.0, 5.0
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
        self.name, self.log, self.note = name, log, None
        counts = {f"{name}_NUM_THREADS": str(threads) for name in ("OMP", "NUMBA", "OPENBLAS", "MKL")}
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [python, str(PROGRAM), module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env={**os.environ, **counts, "TOKENIZERS_PARALLELISM": "false"},
                start_new_session=True,
                bufsize=0,
            )
        self._unread = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def load(self, options: Mapping[str, Any]) -> None:
        self.note = self._exchange(options, LOAD_SECONDS)["note"]  # what it says about itself

    def ask(self, op: str, seconds: float = ANSWER_SECONDS, **message: Any) -> dict[str, Any]:
        return self._exchange({"op": op, **message}, seconds)

    def _exchange(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._write(json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            raise self._death() from None
        answer: dict[str, Any] = json.loads(self._read_line(time.monotonic() + seconds, seconds))
        if "error" in answer:
            if answer["kind"] in OURS_TO_MEND:
                raise WorkerError(f"{self.name}: {answer['error']}")
            why = f"{answer['kind']}: {answer['error']:.300}"
            raise WorkerError(f"{self.name} failed: {why}; {self._log_end()}")
        return answer

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        while line:
            line = line[self._process.stdin.write(line) or 0 :]

    def _read_line(self, deadline: float, seconds: float) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            if not select.select([self._process.stdout], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise WorkerError(f"{self.name} has not answered in {seconds:.0f} s; {self._log_end()}")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise self._death()
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _death(self) -> WorkerError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        status = self._process.returncode
        how = "closed its pipe" if status is None else f"died ({_cause(status)})"
        return WorkerError(f"{self.name} {how}; {self._log_end()}")

    def _log_end(self) -> str:
        lines = self.log.read_bytes()[-8192:].decode("utf-8", "replace").split("\n")
        said = " | ".join([line.strip() for line in lines if line.strip()][-LOG_LINES:])[-LOG_CHARACTERS:]
        return f"its log {self.log} ends: {said or '(it is empty)'}"

    def peak_mb(self) -> float | None:
        """The most memory it has held, its children's included; None where the system does not say."""
        sizes = [_peak_kb(pid) for pid in _family(self.pid)]
        return round(sum(sizes) / 1024, 1) if any(sizes) else None

    def stop(self) -> None:
        """End the worker and all it started; harmless when it is gone."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def peer_worker(row: Row, options: dict[str, Any], tell: Tell) -> Iterator[Worker]:
    """The worker of a row, loaded and later stopped. `options`: what the engine is loaded with besides the
    method and the threads. The log of one that fails stays, since the error names it."""
    tell(f"loading {row}", 0)
    handle, log = tempfile.mkstemp(prefix="paceline-bench-", suffix=".log")
    os.close(handle)
    shared = {"method": row.method, "threads": num_threads(), "in_flight": 1, "is_raw": row.is_raw}
    worker = Worker(str(row), peer_python(row.peer), MODULES[row.peer], Path(log), num_threads())
    try:
        worker.load({**shared, **options})
        yield worker
    except WorkerError:
        raise
    except BaseException:
        worker.log.unlink(missing_ok=True)
        raise
    else:
        worker.log.unlink(missing_ok=True)
    finally:
        worker.stop()


def _cause(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    return f"signal {-status}, perhaps out of memory" if -status == signal.SIGKILL else f"signal {-status}"


def _family(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for parent in found:  # grows while it is read
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += [int(child) for child in children.read_text().split()]
    return found


def _peak_kb(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    return 0


class Server(NamedTuple):
    process: subprocess.Popen[bytes]
    endpoint: Endpoint

    def stop(self) -> int:
        """Its exit status, after it has ended what was running."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_S)


@contextlib.contextmanager
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
