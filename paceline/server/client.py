"""The engine as the HTTP side sees it: a table of calls, a process that is kept alive, and the queue's bound.
Invariant: every call ends: by its own end, an abort, an error of the engine, or the engine's death. A call
that is left early is aborted, which frees its blocks before the next step. When `run` is left the engine's
process is gone, by itself or killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from paceline.server import processes
from paceline.server.calls import Call
from paceline.server.config import ServerConfig
from paceline.server.metrics import Metrics
from paceline.server.processes import log
from paceline.server.responses import ApiError, from_engine, unavailable

State = Literal["starting", "ok", "restarting", "draining"]
PING_EVERY_S = 1.0
PATIENCE_S = 3.0  # for a process whose socket is closed to end
IMPORTS_S = (
    30.0  # for a new engine to say something at all: Python reads the libraries, and cores may be busy
)
BACKOFF_S, MOST_BACKOFF_S = 0.2, 30.0  # doubled for each engine in a row that could not even start


class EngineClient:
    def __init__(self, config: ServerConfig, metrics: Metrics) -> None:
        self.config, self.metrics = config, metrics
        self.info: dict[str, Any] = {}
        self.num_restarts = 0
        self.is_draining = False
        self.started = asyncio.Event()  # the engine is there, or never will be
        self.fatal: str | None = None  # why the engine could not be started at all
        self._writer: asyncio.StreamWriter | None = None
        self._is_ready = False
        self._calls: dict[str, tuple[Call, int]] = {}  # by the id of a part
        self._answers: dict[str, asyncio.Future[Any]] = {}
        self._heard_at = 0.0

    @property
    def state(self) -> State:
        if self.is_draining:
            return "draining"
        if self._is_ready:
            return "ok"
        return "restarting" if self.num_restarts else "starting"

    @property
    def num_calls(self) -> int:
        return len({call.name for call, _ in self._calls.values()})

    @contextlib.asynccontextmanager
    async def call(self, parts: Sequence[dict[str, Any]], num_choices: int) -> AsyncIterator[Call]:
        """A request to the engine, admitted. When the block is left it is over, or it is aborted."""
        self._check_open()
        num_new, room = len(parts) * num_choices, self.info["max_num_seqs"] + self.config.max_queue
        now = sum(call.num_choices for call, _ in self._calls.values())
        if num_new > room:
            what = f"the request asks for {num_new} answers, and {room} may run or wait; ask for fewer"
            raise ApiError(400, what, "too_many_choices", "n")
        if now + num_new > room:
            what = f"{now} answers are running or waiting, and {room} may; try again later"
            raise ApiError(429, what, "queue_full")
        call = Call(secrets.token_hex(8), len(parts), num_choices)
        names = [f"{call.name}.{index}" for index in range(len(parts))]
        for index, name in enumerate(names):
            self._calls[name] = (call, index)
            self._send({"do": "add", "id": name, **parts[index]})
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self.config.request_timeout, call.fail, self._too_slow())
        try:
            await call.admitted()
            yield call
        finally:
            timer.cancel()
            for name in names:
                del self._calls[name]
                if len(call.ends) < call.total_choices:  # something may still be running
                    self._send({"do": "abort", "id": name})

    async def ask(self, message: dict[str, Any]) -> Any:
        """A question that needs no engine step, such as what the tokens of a text are."""
        self._check_open()
        name = secrets.token_hex(8)
        answer = self._answers[name] = asyncio.get_running_loop().create_future()
        try:
            self._send({**message, "id": name})
            return await asyncio.wait_for(answer, self.config.request_timeout)
        except TimeoutError:
            raise self._too_slow() from None
        finally:
            self._answers.pop(name, None)
            if answer.cancelled():  # nobody waits any more
                self._send({"do": "abort", "id": name})

    def release(self, name: str) -> None:
        """What was made for a question is not needed any more."""
        self._send({"do": "release", "id": name})

    def _too_slow(self) -> ApiError:
        what = f"the request took longer than {self.config.request_timeout:g} seconds; ask for fewer tokens"
        return ApiError(504, what, "request_timeout")

    def _check_open(self) -> None:
        if self.state != "ok":
            raise unavailable(self.state)

    def _send(self, message: processes.Message) -> None:
        """Never waits: what a dead engine cannot take is lost, and its calls are failed by `run`."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(processes.pack(message))

    async def run(self) -> None:
        """Keep an engine alive until cancelled."""
        backoff = BACKOFF_S
        while True:
            try:
                await self._serve_one()
            finally:  # the engine is gone, and with it everything it was doing
                was_ready, self._is_ready, self._writer = self._is_ready, False, None
                self.metrics.engine_up(False)
                self.fail_all("lost")
            if self.fatal is not None:
                return
            backoff = BACKOFF_S if was_ready else min(backoff * 2, MOST_BACKOFF_S)
            self.num_restarts += 1
            self.metrics.count("engine_restarts")
            log("engine restarting", logging.WARNING, restarts=self.num_restarts, backoff_s=round(backoff, 2))
            await asyncio.sleep(backoff)

    async def _serve_one(self) -> None:
        """One engine process from its birth to its death."""
        started = self._heard_at = time.monotonic()
        process, channel = processes.start("paceline.server.worker", has_session=True)
        reader, self._writer = await asyncio.open_unix_connection(sock=channel, limit=processes.LONGEST)
        self.metrics.gauge("engine_pid", process.pid)
        self._send(self.config.engine_setup())
        guard = asyncio.create_task(self._guard(process))
        try:
            with contextlib.suppress(ConnectionError):
                while (message := processes.unpack(await reader.readline())) is not None:
                    self._heard_at = time.monotonic()
                    self._take(message, started)
        finally:
            guard.cancel()
            self._writer.close()  # the process ends when it reads the end
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, PATIENCE_S)
            processes.kill(process)  # and its ranks, of which one may be stopped
            status = await asyncio.to_thread(process.wait)
        if not self.started.is_set():  # nor ever will be
            ended = f"the engine ended with status {status} while it was starting; see the lines above"
            self.fatal = self.fatal or ended
            self.started.set()
        log("engine ended", logging.WARNING, status=status, calls=self.num_calls)

    async def _guard(self, process: subprocess.Popen[bytes]) -> None:
        """An engine that gives no sign of life for too long is killed; `run` starts another. While it reads a
        model it says by itself that it lives, but not until Python has read the libraries."""
        while True:
            await asyncio.sleep(PING_EVERY_S)
            limit = self.config.engine_timeout + (0.0 if self._is_ready else IMPORTS_S)
            if self._is_ready:
                self._send({"do": "ping"})
            if time.monotonic() - self._heard_at > limit:
                log("engine does not answer", logging.ERROR, seconds=limit)
                processes.kill(process)

    def _take(self, message: processes.Message, started: float) -> None:
        kind, name = message["is"], message.get("id", "")
        if kind == "step":
            for said in message.get("said", ()):
                if said["id"] in self._calls:  # else it was left meanwhile, and an abort is on its way
                    call, part = self._calls[said["id"]]
                    self.metrics.heard(call, said)
                    call.hear(part, said)
            self.metrics.step(message)
        elif kind == "refused":
            self._refuse(name, from_engine(message["error"]))
        elif kind == "answer" and name in self._calls:
            call, part = self._calls[name]
            call.admit(part, message["value"])
        elif kind == "answer":
            if name in self._answers and not self._answers[name].done():
                self._answers[name].set_result(message["value"])
        elif kind == "ready":
            self.info, self._is_ready, seconds = message, True, time.monotonic() - started
            self.metrics.engine_up(True, seconds)
            sizes = {"context": message["max_model_len"], "blocks": message["num_blocks"]}
            log("engine ready", seconds=round(seconds, 2), **sizes)
            self.started.set()
        elif kind == "failed":
            if not self.started.is_set():
                self.fatal = message["message"]
            log("engine cannot start", logging.ERROR)

    def _refuse(self, name: str, error: ApiError) -> None:
        if name in self._calls:
            self._calls[name][0].fail(error)
        elif name in self._answers and not self._answers[name].done():
            self._answers[name].set_exception(error)

    def fail_all(self, state: str) -> None:
        """End what is still running."""
        for name in [*self._calls, *self._answers]:
            self._refuse(name, unavailable(state))

    async def drained(self, seconds: float) -> bool:
        """Wait until no call is left; False if that took too long."""
        end = time.monotonic() + seconds
        while self._calls and time.monotonic() < end:
            await asyncio.sleep(0.02)
        return not self._calls
