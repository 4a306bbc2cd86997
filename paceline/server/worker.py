"""The engine process: reads commands from a socket, steps the engine while there is work, and writes one
message a step.

Four threads: one reads commands, one turns prompts into requests (preparing.py), one does so for those with a
grammar to compile, and the main one owns the engine. So neither a long prompt nor a hard grammar holds up a
step for longer than Python switches threads. Invariant: every id that is added is answered: refused, or
admitted and then said to the end. When the other side is gone the process ends, whatever it is doing.
"""

from __future__ import annotations

import gc
import os
import queue
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.core.errors import PacelineError
from paceline.core.types import Status
from paceline.server import logs, wire

if TYPE_CHECKING:
    from paceline.core.types import Request
    from paceline.engine.engine import Engine
    from paceline.server.outputs import Voice
    from paceline.server.preparing import Preparer

STATS_EVERY_S = 0.2  # while working; at once when there is nothing to do


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the server decides when the engine ends
        signal.signal(number, signal.SIG_IGN)
    channel = socket.socket(fileno=int(sys.argv[1]))
    setup = wire.read_blocking(channel)
    if setup is None:
        return
    logs.set_up(setup["log_level"], "engine")
    try:
        worker = _build(channel, setup)
    except PacelineError as error:
        channel.sendall(wire.pack({"is": "failed", "message": str(error)}))
        return
    try:
        worker.run()
    except (
        Exception
    ) as error:  # whatever it was, the engine's books may be wrong now: a new process starts with clean ones
        logs.log_error("engine failed", error)
        os._exit(1)


def _build(channel: socket.socket, setup: wire.Message) -> Worker:
    from paceline.api.build import build
    from paceline.api.intake import Intake
    from paceline.api.options import EngineOptions
    from paceline.server.preparing import Preparer, description

    if hasattr(os, "nice"):
        os.nice(5)  # where the HTTP loop needs a core that the engine computes on, it gets it at once
    started = time.monotonic()
    options = EngineOptions(**setup["engine"], progress=sys.stderr.isatty())
    built = build(options)
    intake = Intake(built.tokenizer, built.checkpoint.config.vocab_size)
    preparer = Preparer(built.tokenizer, built.engine, intake, **setup["limits"])
    gc.freeze()  # the model and the libraries are here to stay: collections need not look at them
    ready = description(built, options.speculative_config, time.monotonic() - started)
    channel.sendall(wire.pack({"is": "ready", **ready}))
    return Worker(channel, built.engine, preparer)


@dataclass(slots=True)
class Worker:
    channel: socket.socket
    engine: Engine
    preparer: Preparer
    _commands: queue.SimpleQueue[wire.Message] = field(
        default_factory=queue.SimpleQueue
    )  # for the main thread
    _prompts: queue.SimpleQueue[wire.Message] = field(
        default_factory=queue.SimpleQueue
    )  # for the preparing thread
    _grammars: queue.SimpleQueue[wire.Message] = field(
        default_factory=queue.SimpleQueue
    )  # the same for those with a grammar to compile
    _preparing: set[str] = field(default_factory=set)  # ids between the reading thread and the main one
    _unwanted: set[str] = field(default_factory=set)  # of them, those aborted meanwhile
    _voices: dict[str, Voice] = field(default_factory=dict)  # by the engine's request id
    _unstarted: dict[str, Voice] = field(
        default_factory=dict
    )  # of them, those still waiting for their first step
    _owned: dict[str, list[Request]] = field(default_factory=dict)  # by the client's id
    _reported_at: float = 0.0
    _is_stale: bool = True  # something has changed since the last report of figures

    def run(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        for prompts in (self._prompts, self._grammars):
            threading.Thread(target=self._prepare, args=(prompts,), daemon=True).start()
        while True:
            self._obey()
            said = self._step() if self.engine.has_work else []
            self._send(said)

    def _send(self, said: list[wire.Message]) -> None:
        now = time.monotonic()
        message: wire.Message = {"is": "step", "said": said} if said else {"is": "step"}
        if self._is_stale and (now - self._reported_at > STATS_EVERY_S or not self.engine.has_work):
            message["figures"] = self._figures()
            self._reported_at, self._is_stale = now, False
        if len(message) > 1:
            self.channel.sendall(wire.pack(message))

    def _read(self) -> None:
        try:
            while (message := wire.read_blocking(self.channel)) is not None:
                if message["do"] == "add":
                    self._preparing.add(message["id"])
                self._queue_of(message).put(message)
        finally:
            os._exit(0)

    def _queue_of(self, message: wire.Message) -> queue.SimpleQueue[wire.Message]:
        if message["do"] in ("abort", "ping"):
            return self._commands
        return self._grammars if "structured_outputs" in message.get("params", ()) else self._prompts

    def _prepare(self, prompts: queue.SimpleQueue[wire.Message]) -> None:
        """Everything that may take a while and needs no engine state."""
        while True:
            message = prompts.get()
            if message["id"] in self._unwanted:
                message["refused"] = {"kind": "Aborted", "message": "the request was aborted"}
            else:
                try:
                    message["made"] = self.preparer.prepare(message)
                except PacelineError as error:
                    message["refused"] = {"kind": type(error).__name__, "message": str(error)}
                # a mistake of ours fails this request alone: without its thread all later ones would hang
                except Exception as error:
                    logs.log_error("request could not be prepared", error)
                    message["refused"] = {
                        "kind": "Internal",
                        "message": "the request could not be prepared; the server's log says where",
                    }
            self._commands.put(message)

    def _obey(self) -> None:
        """All commands that have come; with nothing to do, wait for one."""
        is_idle = not self.engine.has_work and not self._is_stale
        while True:
            try:
                message = self._commands.get(block=is_idle)
            except queue.Empty:
                return
            self._handle(message)
            is_idle = False

    def _handle(self, message: wire.Message) -> None:
        do, name = message["do"], message.get("id", "")
        if do == "abort":
            if name in self._preparing:
                self._unwanted.add(name)
            self._abort(name)
        elif do == "ping":
            self._tell({"is": "pong"})
        elif "refused" in message:
            self._settle(name)
            self._tell({"is": "refused", "id": name, "error": message["refused"]})
        elif do == "add":
            if not self._settle(name):
                self._add(name, message["made"], bool(message.get("details")), bool(message.get("echo")))
        else:
            self._tell({"is": "answer", "id": name, "value": message["made"]})

    def _settle(self, name: str) -> bool:
        """The id has reached the main thread; was it aborted on the way?"""
        self._preparing.discard(name)
        is_unwanted = name in self._unwanted
        self._unwanted.discard(name)
        return is_unwanted

    def _tell(self, message: wire.Message) -> None:
        self.channel.sendall(wire.pack(message))

    def _add(self, name: str, requests: list[Request], has_details: bool, has_echo: bool) -> None:
        from paceline.server.outputs import Voice

        for index, request in enumerate(requests):
            self.engine.add(request)
            stats = self.engine.stats[request.id]
            voice = Voice(name, index, request, stats, self.preparer.tokenizer, has_details)
            self._voices[request.id] = self._unstarted[request.id] = voice
        self._owned[name] = requests
        if has_details:
            self.preparer.watcher.watch(requests)
            self.engine.watch = self.preparer.watcher
        self._is_stale = True
        echo = self.preparer.echo(requests[0]) if has_echo else ""
        self._tell({"is": "admitted", "id": name, "num_prompt": requests[0].num_prompt, "echo": echo})

    def _abort(self, name: str) -> None:
        for request in self._owned.pop(name, ()):
            self.engine.abort(request)
            self._forget(request)
        self._is_stale = True

    def _forget(self, request: Request) -> None:
        self._voices.pop(request.id, None)
        self._unstarted.pop(request.id, None)
        self.engine.stats.pop(request.id, None)
        self.preparer.watcher.forget(request)
        if not self.preparer.watcher.is_watching:
            self.engine.watch = None

    def _step(self) -> list[wire.Message]:
        started = time.monotonic()
        said = []
        emissions = self.engine.step()
        self._note_started(started)
        for emission in emissions:
            voice = self._voices[emission.request.id]
            details = self.preparer.watcher.take(emission) if voice.has_details else None
            said.append(voice.say(emission, details))
            if emission.request.is_finished:
                self._finish(voice)
        self._is_stale = True
        return said

    def _note_started(self, now: float) -> None:
        for name in [
            name for name, voice in self._unstarted.items() if voice.request.status is not Status.WAITING
        ]:
            self._unstarted.pop(name).started_at = now

    def _finish(self, voice: Voice) -> None:
        self._forget(voice.request)
        owned = self._owned.get(voice.owner, [])
        if all(request.is_finished for request in owned):
            self._owned.pop(voice.owner, None)

    def _figures(self) -> dict[str, Any]:
        from paceline.server.outputs import figures

        return figures(self.engine)


if __name__ == "__main__":
    main()
