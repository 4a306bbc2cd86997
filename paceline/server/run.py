"""Puts the server together and runs it: the HTTP loop, the engine's process, signals, and the way out.
SIGTERM or SIGINT: new requests are turned away, running ones finish, then the process ends with status 0. A
second signal, or the end of `drain_timeout`, cuts off what is still running: status 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import ssl
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import uvicorn

from paceline.core.errors import ConfigError, ModelError
from paceline.server import processes
from paceline.server.app import make_app
from paceline.server.client import EngineClient
from paceline.server.config import ServerConfig
from paceline.server.metrics import Metrics
from paceline.server.processes import log
from paceline.server.service import Service

DEFAULT_NAME = "SmolLM2-135M-Instruct"
LAG_EVERY_S = 0.05
LAST_WORDS_S = 2  # for connections to close after their answers
BACKLOG = 2048


class Engine(Protocol):
    """What answers: an engine of our own, or replicas that have one each."""

    config: ServerConfig
    metrics: Metrics
    is_draining: bool
    fatal: str | None  # why it could not be started at all
    started: asyncio.Event  # it is there, or never will be

    @property
    def num_calls(self) -> int: ...
    async def run(self) -> None: ...
    async def drained(self, seconds: float) -> bool: ...
    def fail_all(self, state: str) -> None: ...


def serve(config: ServerConfig) -> int:
    """Until a signal; the exit status. What cannot work is found before anything is started."""
    processes.set_up_logs(config.log_level, "server")
    name = name_of(config)
    metrics = Metrics(name)
    engine = EngineClient(config, metrics)
    return serve_app(make_app(Service(config, engine, metrics, name)), engine, name)


def name_of(config: ServerConfig) -> str:
    """What clients call the model."""
    if config.served_model_name or config.model == "default":
        return config.served_model_name or DEFAULT_NAME
    path = Path(config.model)
    return path.name.removesuffix(".gguf") if path.exists() else config.model


def serve_app(app: Any, engine: Engine, name: str) -> int:
    config = engine.config
    http = http_server(app, config)
    gc.collect()
    # what is loaded is here to stay: a collection that looked at all of it would hold up the loop for 30 ms
    gc.freeze()
    with listen(config) as listener, asyncio.Runner(loop_factory=http.config.get_loop_factory()) as runner:
        host, port = listener.getsockname()[:2]
        scheme, host = "https" if config.ssl_certfile else "http", f"[{host}]" if ":" in host else host
        log("listening", url=f"{scheme}://{host}:{port}", model=name, settings=config.to_log())
        return runner.run(_main(engine, http, listener))


def http_server(app: Any, config: ServerConfig) -> uvicorn.Server:
    settings = uvicorn.Config(
        app,
        interface="asgi3",
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        backlog=BACKLOG,
        timeout_graceful_shutdown=LAST_WORDS_S,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
    )
    http = uvicorn.Server(settings)
    # Signals are ours.
    http.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]
    try:
        settings.load()
    except (OSError, ssl.SSLError) as error:
        files = f"ssl_certfile {config.ssl_certfile} and ssl_keyfile {config.ssl_keyfile}"
        raise ConfigError(f"{files} cannot be used ({error}); give PEM files") from None
    settings.http_protocol_class = _timed(settings.http_protocol_class, config.body_timeout)
    return http


def _timed(kind: Any, seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's protocol, but a connection on which no request begins in time is closed: uvicorn itself waits
    for headers for ever, and a client that sends a byte now and then holds a connection."""

    class Timed(kind):
        timer: asyncio.TimerHandle | None = None

        def is_waiting(self) -> bool:
            return self.cycle is None or bool(self.cycle.response_complete)

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.timer = self.loop.call_later(seconds, self.give_up)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not self.is_waiting():
                self.stop()
            elif self.timer is None:  # the first bytes of a further request
                self.timer = self.loop.call_later(seconds, self.give_up)

        def connection_lost(self, error: Exception | None) -> None:
            self.stop()
            super().connection_lost(error)

        def stop(self) -> None:
            if self.timer is not None:
                self.timer.cancel()
            self.timer = None

        def give_up(self) -> None:
            if self.is_waiting():
                self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\n\r\n")
                self.transport.close()

    return Timed


def listen(config: ServerConfig) -> socket.socket:
    is_six, address = ":" in config.host, (config.host, config.port)
    family, is_dual = socket.AF_INET6 if is_six else socket.AF_INET, is_six and socket.has_dualstack_ipv6()
    try:
        listener = socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=is_dual)
    except OSError as error:
        where, why = f"{config.host}:{config.port}", error.strerror or error
        raise ConfigError(f"{where} cannot be listened on ({why}); choose another --port or --host") from None
    if sys.platform == "linux":  # a client that reads nothing at all for that long is gone
        timeout_ms = int(min(config.request_timeout, 2e6) * 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
    return listener


async def _main(engine: Engine, http: uvicorn.Server, listener: socket.socket) -> int:
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
    work = (http.serve([listener]), engine.run(), _watch_lag(engine.metrics))
    tasks = [asyncio.create_task(each) for each in work]
    try:
        first, started = asyncio.create_task(signals.get()), asyncio.create_task(engine.started.wait())
        await asyncio.wait((first, started), return_when=asyncio.FIRST_COMPLETED)
        if engine.fatal is not None:
            raise ModelError(engine.fatal)
        received, seconds = await first, engine.config.drain_timeout
        engine.is_draining = True
        log("draining", signal=signal.Signals(received).name, calls=engine.num_calls, seconds=seconds)
        drained = asyncio.create_task(engine.drained(seconds))
        second = asyncio.create_task(signals.get())
        await asyncio.wait((drained, second), return_when=asyncio.FIRST_COMPLETED)
        if drained.done() and drained.result():
            return 0
        log("cutting off", logging.WARNING, calls=engine.num_calls)
        engine.fail_all("draining")
        await engine.drained(LAST_WORDS_S)
        return 1
    finally:
        http.should_exit = True
        await tasks[0]
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks[1:], return_exceptions=True)
        log("stopped")


async def _watch_lag(metrics: Metrics) -> None:
    """How late the loop comes to what was due: anything that holds it up shows here."""
    while True:
        due = time.monotonic() + LAG_EVERY_S
        await asyncio.sleep(LAG_EVERY_S)
        metrics.observe("event_loop_lag_seconds", max(0.0, time.monotonic() - due))
