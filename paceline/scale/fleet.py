"""The replicas as the front sees them: which there are, which of them answer, and a seat at one of them for
each request. Invariant: a request that asks for a seat has one or an error within seconds, and one whose
replica is lost is told so at once; while none answers the state says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from paceline.server.config import ServerConfig
from paceline.server.metrics import Metrics
from paceline.server.processes import log, log_error
from paceline.server.responses import unavailable

SEAT = "x-paceline-seat"  # the header that says which seat a request takes
LOOK_EVERY_S = 0.5
PATIENCE_S = 4.0  # for the replicas to say how they are
SEATED_WITHIN_S = 9.0
GONE = (RayError, RayServeException, TimeoutError, StopAsyncIteration)


class Lost(Exception):
    """The replica is gone, or cannot answer now."""


@dataclass(frozen=True, slots=True)
class Seat:
    replica: str
    url: str
    name: str
    end: asyncio.Task[None]  # fails with Lost when the replica is lost


class Fleet:
    """It has what server/run.py asks of an engine. start: joins or starts the cluster and gives a handle of
    the replicas; trouble: why they cannot be started at all; stop: leaves nothing behind. These may block.
    settle: what is left to do in the main thread."""

    def __init__(self, config: ServerConfig, metrics: Metrics, cluster: Any) -> None:
        self.config, self.metrics, self.cluster = config, metrics, cluster
        self.states: dict[str, tuple[str, str]] = {}  # of each replica: its state and address
        self.started = asyncio.Event()
        self.fatal: str | None = None
        self.is_draining = False
        self.num_calls = 0
        self._handle: Any = None
        self._ends = set[asyncio.Task[None]]()
        self.lost_state = "lost"  # what clients are told of a request that was lost

    @property
    def ready(self) -> list[str]:
        return [name for name, (state, _) in self.states.items() if state == "ok"]

    @property
    def state(self) -> str:
        if self.is_draining:
            return "draining"
        return "ok" if self.ready else ("restarting" if self.started.is_set() else "starting")

    @contextlib.asynccontextmanager
    async def attend(self, pieces: Sequence[str], avoid: set[str]) -> AsyncIterator[Seat]:
        """A seat for a request: where its beginning was read, and not at one of those to avoid if there is
        another."""
        if self.state != "ok":
            raise unavailable(self.state)
        shunned = avoid | (self.states.keys() - set(self.ready))
        stream = self._handle.attend.remote(list(pieces), sorted(shunned))
        try:
            async with asyncio.timeout(SEATED_WITHIN_S):
                said = await anext(stream)
        except TimeoutError:  # all are busy, or one hangs of which Ray does not know yet
            stream.cancel()
            raise unavailable("busy") from None
        except GONE as error:
            stream.cancel()
            raise Lost(str(error)) from None
        end = asyncio.create_task(self._until_end(stream, said["replica"]))
        self._ends.add(end)
        end.add_done_callback(self._ends.discard)
        seat = Seat(said["replica"], said["url"], said["seat"], end)
        self.num_calls += 1
        try:
            yield seat
        finally:
            self.num_calls -= 1

    async def _until_end(self, stream: Any, replica: str) -> None:
        try:
            async for _ in stream:
                pass
        except GONE as error:
            self.lose(replica)
            raise Lost(str(error)) from None

    def lose(self, replica: str) -> None:
        """It does not answer: nothing is sent there until it says that it does."""
        if self.states.pop(replica, None) is not None:
            log("replica lost", logging.WARNING, replica=replica, left=len(self.ready))

    async def run(self) -> None:
        """Keep the replicas' states known until cancelled."""
        start = asyncio.create_task(asyncio.to_thread(self.cluster.start))
        try:
            self._handle = (await asyncio.shield(start)).options(stream=True)
            self.cluster.settle()
            while self.fatal is None:
                await self._look()
                await asyncio.sleep(LOOK_EVERY_S)
        except Exception as error:
            log_error("replicas cannot be served", error)
            self.fatal = self.fatal or str(error)
            self.started.set()
        finally:
            for end in self._ends:
                end.cancel()
            await asyncio.wait([start])  # what has begun to start can only be stopped when it has
            await asyncio.to_thread(self.cluster.stop)

    async def _look(self) -> None:
        try:
            asked = self._handle.broadcast("describe")
            said = await asked.results_async(timeout_s=PATIENCE_S, return_exceptions=True)
        except TimeoutError:  # one of them is slow to say anything, which tells nothing of the others
            return
        except GONE:  # there is none
            said = []
        before = self.ready
        found = [each for each in said if isinstance(each, dict)]
        self.states = {each["replica"]: (each["state"], each["url"]) for each in found}
        if self.ready != before:
            log("replicas", ready=len(self.ready), names=self.ready)
        self.metrics.gauge("replicas", len(self.ready))
        if self.ready:
            self.started.set()
        elif not self.started.is_set():
            self.fatal = await asyncio.to_thread(self.cluster.trouble)
            if self.fatal is not None:
                self.started.set()

    async def drained(self, seconds: float) -> bool:
        end = asyncio.get_running_loop().time() + seconds
        while self.num_calls and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.02)
        return not self.num_calls

    def fail_all(self, state: str) -> None:
        self.lost_state = state
        for end in self._ends:
            end.cancel()
