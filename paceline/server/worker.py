"""The engine process: reads commands from a socket, steps the engine while there is work, and writes one
message a step.

Four threads: one reads commands, one turns prompts into requests (preparing.py), one does so for those with a
grammar to compile, and the main one owns the engine. So neither a long prompt nor a hard grammar holds up a
step for longer than Python switches threads.

Invariant: every id that is added is answered: refused, or admitted and then answered to its end. No exception
of one request ends the process (isolation.py); when the other side is gone it ends, whatever it is doing.
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
from typing import TYPE_CHECKING

from paceline.core.errors import PacelineError
from paceline.core.types import Status
from paceline.server import logs, wire

if TYPE_CHECKING:
    from paceline.core.types import Request
    from paceline.engine.commit import Emission
    from paceline.engine.engine import Engine
    from paceline.server.isolation import Isolation
    from paceline.server.outputs import Choice
    from paceline.server.preparing import Preparer

Queue = queue.SimpleQueue[wire.Message]
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
    except Exception as error:  # the engine's state may be wrong now: a new process starts with a clean one
        logs.log_error("engine failed", error)
        os._exit(1)


def _build(channel: socket.socket, setup: wire.Message) -> Worker:
    from paceline.api.build import build
    from paceline.api.intake import Intake
    from paceline.api.options import EngineOptions
    from paceline.server.isolation import Isolation
    from paceline.server.preparing import Preparer, description

    if sys.platform != "win32":
        os.nice(5)  # where the HTTP loop needs a core that the engine computes on, it gets it at once
    started = time.monotonic()
    options = EngineOptions(**setup["engine"], progress=sys.stderr.isatty())
    built = build(options)
    engine, vocab_size = built.engine, built.checkpoint.config.vocab_size
    intake = Intake(built.tokenizer, vocab_size, engine.config.max_model_len)
    preparer = Preparer(built.tokenizer, engine, intake, **setup["limits"])
    gc.freeze()  # the model and the libraries are here to stay: collections need not look at them
    ready = description(built, options.speculative_config, time.monotonic() - started)
    channel.sendall(wire.pack({"is": "ready", **ready}))
    return Worker(channel, engine, preparer, Isolation(engine, intake))


@dataclass(slots=True)
class Worker:
    channel: socket.socket
    engine: Engine
    preparer: Preparer
    isolation: Isolation
    _commands: Queue = field(default_factory=Queue)  # for the main thread
    _prompts: Queue = field(default_factory=Queue)  # for the preparing thread
    _grammars: Queue = field(default_factory=Queue)  # likewise, with a grammar to compile
    _preparing: set[str] = field(default_factory=set)  # ids between the reading thread and the main one
    _aborted: set[str] = field(default_factory=set)  # of them, those aborted meanwhile
    _choices: dict[str, Choice] = field(default_factory=dict)  # by the engine's request id
    _unstarted: dict[str, Choice] = field(default_factory=dict)  # of them, those waiting for their first step
    _requests: dict[str, list[Request]] = field(default_factory=dict)  # by the client's id
    _reported_at: float = 0.0
    _is_stale: bool = True  # something has changed since the last report of figures

    def run(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        for prompts in (self._prompts, self._grammars):
            threading.Thread(target=self._prepare, args=(prompts,), daemon=True).start()
        while True:
            self._handle_commands()
            self._report(self._step() if self.engine.has_work else [])

    def _report(self, said: list[wire.Message]) -> None:
        now = time.monotonic()
        message: wire.Message = {"is": "step", "said": said} if said else {"is": "step"}
        if self._is_stale and (now - self._reported_at > STATS_EVERY_S or not self.engine.has_work):
            from paceline.server.outputs import figures

            message["figures"] = figures(self.engine)
            self._reported_at, self._is_stale = now, False
        if len(message) > 1:
            self._send(message)

    def _send(self, message: wire.Message) -> None:
        self.channel.sendall(wire.pack(message))

    def _read(self) -> None:
        try:
            while (message := wire.read_blocking(self.channel)) is not None:
                if message["do"] in ("abort", "ping"):
                    self._commands.put(message)
                    continue
                if message["do"] == "add":
                    self._preparing.add(message["id"])
                has_grammar = "structured_outputs" in message.get("params", ())
                (self._grammars if has_grammar else self._prompts).put(message)
        finally:
            os._exit(0)

    def _prepare(self, prompts: Queue) -> None:
        """Everything that may take a while and needs no engine state."""
        while True:
            message = prompts.get()
            if message["id"] in self._aborted:
                message["refused"] = {"kind": "Aborted", "message": "the request was aborted"}
            else:
                try:
                    message["made"] = self.preparer.prepare(message)
                except (
                    Exception
                ) as error:  # fails this request alone: without this thread all later ones would hang
                    message["refused"] = _refusal(error)
            self._commands.put(message)

    def _handle_commands(self) -> None:
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
        if do == "ping":
            return self._send({"is": "pong"})
        if do == "abort":
            if name in self._preparing:
                self._aborted.add(name)
            return self._abort(name)
        is_aborted = name in self._aborted
        self._preparing.discard(name)
        self._aborted.discard(name)
        if do == "add" and "made" in message and not is_aborted:
            try:
                return self._send(self._add(name, message))
            except Exception as error:
                self._abort(name)
                message["refused"] = _refusal(error)
        if "refused" in message:
            self._send({"is": "refused", "id": name, "error": message["refused"]})
        elif do != "add":
            self._send({"is": "answer", "id": name, "value": message["made"]})
        return None

    def _add(self, name: str, message: wire.Message) -> wire.Message:
        """Give the requests to the engine; what the client is told of them."""
        from paceline.server.outputs import Choice

        requests, has_details = message["made"], bool(message.get("details"))
        self._requests[name] = requests
        for index, request in enumerate(requests):
            self.isolation.add(request)
            stats = self.engine.stats[request.id]
            choice = Choice(name, index, request, stats, self.preparer.tokenizer, has_details)
            self._choices[request.id] = self._unstarted[request.id] = choice
        if has_details:
            self.preparer.watcher.watch(requests)
            self.engine.watch = self.preparer.watcher
        self._is_stale = True
        echo = self.preparer.echo(requests[0]) if message.get("echo") else ""
        return {"is": "admitted", "id": name, "num_prompt": requests[0].num_prompt, "echo": echo}

    def _abort(self, name: str) -> None:
        for request in self._requests.pop(name, ()):
            if request.id in self._choices:
                self.isolation.abort(request)
                self._forget(request)
        self._is_stale = True

    def _forget(self, request: Request) -> None:
        self._choices.pop(request.id, None)
        self._unstarted.pop(request.id, None)
        self.engine.stats.pop(request.id, None)
        self.preparer.watcher.forget(request)
        if not self.preparer.watcher.is_watching:
            self.engine.watch = None

    def _step(self) -> list[wire.Message]:
        started = time.monotonic()
        emissions = self.isolation.step()
        for name, choice in list(self._unstarted.items()):
            if choice.request.status is not Status.WAITING:
                self._unstarted.pop(name).started_at = started
        self._is_stale = True
        return [message for emission in emissions for message in self._messages(emission)]

    def _messages(self, emission: Emission) -> list[wire.Message]:
        """What the client is told of one emission: one message, none where its request was aborted."""
        choice = self._choices.get(emission.request.id)
        if choice is None:
            return []
        try:
            details = self.preparer.watcher.take(emission) if choice.has_details else None
            message = choice.message(emission, details)
        except Exception as error:
            message = {"id": choice.call, "i": choice.index, "n": 0, "error": _refusal(error)}
            self._abort(choice.call)
        if emission.request.is_finished:
            self._forget(emission.request)
            if all(request.is_finished for request in self._requests.get(choice.call, ())):
                self._requests.pop(choice.call, None)
        return [message]


def _refusal(error: Exception) -> dict[str, str]:
    """What the client is told; a fault of this program is in the log alone."""
    from paceline.server.isolation import InternalError
    from paceline.server.outputs import error_json

    if not isinstance(error, PacelineError):
        logs.log_error("a request failed", error)
        error = InternalError("the request could not be answered; the server's log says where")
    return error_json(error)


if __name__ == "__main__":
    main()
