"""One replica: the whole server (server/app.py) with an engine process of its own, in a Ray actor. Ray keeps
it alive, counts its requests and chooses it; the requests themselves come over HTTP, for every piece of every
stream would be a call by Ray. Each has a seat: a call by Ray that lasts as long as the
request does, so that Ray knows how busy a replica is. Invariant: a seat ends when its request has, when that
does not come, and when the replica dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray import serve
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from paceline.core.errors import ModelError
from paceline.scale.fleet import SEAT
from paceline.server import processes, run
from paceline.server.app import make_app
from paceline.server.client import EngineClient
from paceline.server.config import ServerConfig
from paceline.server.metrics import Metrics
from paceline.server.service import Service

COMES_WITHIN_S = 10.0  # a request, once it has its seat


@dataclass(slots=True)
class _Taken:
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Replica:
    async def __init__(self, options: dict[str, Any], threads: int) -> None:  # type: ignore[misc]
        """Ray sends it requests once this is done, with the engine ready."""
        for name in ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS"):  # the engine's process has them from here
            os.environ[name] = str(threads)
        context, host = serve.get_replica_context(), ray.util.get_node_ip_address()
        self.name = context.replica_id.unique_id
        config = replace(ServerConfig(**options), host=host, port=0, ssl_certfile=None, ssl_keyfile=None)
        if config.kv_events is not None:
            place, _, port = config.kv_events.rpartition(
                ":"
            )  # those of one machine, one port after the other
            config = replace(config, kv_events=f"{place}:{int(port) + context.rank.local_rank}")
        processes.set_up_logs(config.log_level, f"replica {self.name}")
        name = run.name_of(config)
        metrics = Metrics(name)
        self.engine = EngineClient(config, metrics)
        self.app = make_app(Service(config, self.engine, metrics, name))
        self.seats: dict[str, _Taken] = {}
        listener = run.listen(config)
        port_number = listener.getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port_number}"
        http = run.http_server(self.seated, config)
        self.tasks = [asyncio.create_task(each) for each in (self.engine.run(), http.serve([listener]))]
        await self.engine.started.wait()
        if self.engine.fatal is not None:
            raise ModelError(self.engine.fatal)

    async def attend(self, pieces: Sequence[str], avoid: Sequence[str]) -> AsyncIterator[dict[str, str]]:
        """A seat: where to send the request and under what name. What is given is for the router."""
        name, taken = secrets.token_hex(8), _Taken()
        self.seats[name] = taken
        try:
            yield {"replica": self.name, "url": self.url, "seat": name}
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(COMES_WITHIN_S):
                    await taken.begun.wait()
                await taken.done.wait()
        finally:
            del self.seats[name]

    async def seated(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The app, with the news of a request's begin and end for its seat."""
        taken = self.seats.get(Headers(scope=scope).get(SEAT, "")) or _Taken()
        taken.begun.set()
        try:
            await self.app(scope, receive, send)
        finally:
            taken.done.set()

    async def describe(self) -> dict[str, str]:
        return {"replica": self.name, "url": self.url, "state": self.engine.state}

    async def check_health(self) -> None:
        """Ray replaces a replica where this fails. An engine that died is started again without it."""
        if any(task.done() for task in self.tasks):
            raise RuntimeError("a task of the replica has ended")
