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

import uvicorn
from starlette.types import Receive, Scope, Send

from paceline.core.errors import ConfigError
from paceline.server import logs
from paceline.server.app import Service, make_app
from paceline.server.client import EngineClient
from paceline.server.config import ServerConfig
from paceline.server.logs import log
from paceline.server.metrics import Metrics

DEFAULT_NAME = "SmolLM2-135M-Instruct"
LAG_EVERY_S = 0.05
LAST_WORDS_S = 2  # for connections to close after their answers
BACKLOG = 2048


class _Http(uvicorn.Server):
    """Signals are ours."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


def serve(config: ServerConfig) -> int:
    """Until a signal; the exit status."""
    logs.set_up(config.log_level, "server")
    http = _Http(_http_config(config))
    with (
        contextlib.closing(_listen(config)) as listener,
        asyncio.Runner(loop_factory=http.config.get_loop_factory()) as runner,
    ):
        return runner.run(_main(config, listener, http))


def _http_config(config: ServerConfig) -> uvicorn.Config:
    """Checks the certificate, too, before anything is started."""
    http = uvicorn.Config(
        _not_yet,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=30,
        backlog=BACKLOG,
        timeout_graceful_shutdown=LAST_WORDS_S,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
    )
    try:
        http.load()
    except (OSError, ssl.SSLError) as error:
        files = f"ssl_certfile {config.ssl_certfile} and ssl_keyfile {config.ssl_keyfile}"
        raise ConfigError(f"{files} cannot be used ({error}); give PEM files") from None
    return http


async def _not_yet(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("the application takes this place before anyone is let in")


def _listen(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if sys.platform == "linux":  # a client that reads nothing at all for that long is gone
        timeout_ms = int(min(config.request_timeout, 2e6) * 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        where, why = f"{config.host}:{config.port}", error.strerror or error
        raise ConfigError(f"{where} cannot be listened on ({why}); choose another --port or --host") from None
    listener.set_inheritable(False)
    return listener


def model_name(config: ServerConfig) -> str:
    if config.served_model_name:
        return config.served_model_name
    if config.model == "default":
        return DEFAULT_NAME
    return Path(config.model).name.removesuffix(".gguf") if Path(config.model).exists() else config.model


async def _main(config: ServerConfig, listener: socket.socket, http: _Http) -> int:
    name = model_name(config)
    metrics = Metrics(name)
    engine = EngineClient(config, metrics)
    http.config.loaded_app = make_app(Service(config, engine, metrics, name))
    gc.collect()
    # what is loaded is here to stay: a collection that looked at all of it would hold up the loop for 30 ms
    gc.freeze()
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
    scheme = "https" if config.ssl_certfile else "http"
    host, port = listener.getsockname()[:2]
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    log("listening", url=url, model=name, settings=config.to_log())
    work = (http.serve([listener]), engine.run(), _watch_lag(metrics))
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await _until_done(config, engine, signals)
    finally:
        http.should_exit = True
        await tasks[0]
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks[1:], return_exceptions=True)
        log("stopped")


async def _until_done(config: ServerConfig, engine: EngineClient, signals: asyncio.Queue[int]) -> int:
    first, started = asyncio.create_task(signals.get()), asyncio.create_task(engine.started.wait())
    await asyncio.wait((first, started), return_when=asyncio.FIRST_COMPLETED)
    engine.raise_if_fatal()
    number = await first
    engine.is_draining = True
    log("draining", signal=signal.Signals(number).name, calls=engine.num_calls, seconds=config.drain_timeout)
    drained = asyncio.create_task(engine.drained(config.drain_timeout))
    second = asyncio.create_task(signals.get())
    await asyncio.wait((drained, second), return_when=asyncio.FIRST_COMPLETED)
    is_complete = drained.done() and drained.result()
    if not is_complete:
        log("cutting off", logging.WARNING, calls=engine.num_calls)
        engine.cut_off()
        await engine.drained(LAST_WORDS_S)
    return 0 if is_complete else 1


async def _watch_lag(metrics: Metrics) -> None:
    """How late the loop comes to what was due: anything that holds it up shows here."""
    while True:
        due = time.monotonic() + LAG_EVERY_S
        await asyncio.sleep(LAG_EVERY_S)
        metrics.observe("event_loop_lag_seconds", max(0.0, time.monotonic() - due))
