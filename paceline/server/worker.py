"""The engine process: reads commands from a socket, steps the engine, and writes one message a step.

Four threads: one reads commands, one turns prompts into requests (messages.py), one those with a grammar to
compile, and the main one owns the engine: no prompt and no grammar holds up a step. Invariant: every id that
is added is refused, or admitted and answered to its end; no exception of one request ends the process
(isolation.py); when the other side is gone it ends, whatever it is doing.
"""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import BinaryIO

from paceline.api.build import build, handovers_of
from paceline.api.intake import Intake
from paceline.api.options import EngineOptions
from paceline.cli.explain_steps import Recorder
from paceline.core import watch
from paceline.core.errors import ConfigError, HandoverError, PacelineError
from paceline.core.options import require
from paceline.core.types import Request, Status, Verdict
from paceline.drafters.registry import FOR_BENCHMARKS
from paceline.engine.engine import Engine
from paceline.engine.handover import Handover
from paceline.server import processes
from paceline.server.grammar_check import GrammarChecker
from paceline.server.handover import HELD_S, Asker, Giver, reading
from paceline.server.isolation import Isolation, unexpected
from paceline.server.messages import Choice, Preparer, description, error_json, figures

Queue = queue.SimpleQueue[processes.Message]
MOST_FETCHES = 8  # prompts that another server reads at a time
ALIVE_EVERY_S = 1.0  # while a model is read
STATS_EVERY_S = 0.2  # while working; at once when there is nothing to do


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the server decides when the engine ends
        signal.signal(number, signal.SIG_IGN)
    channel = socket.socket(fileno=int(sys.argv[1]))
    commands = channel.makefile("rb")
    if (setup := processes.unpack(commands.readline())) is None:
        return
    processes.set_up_logs(setup["log_level"], "engine")
    os.nice(5)  # where the HTTP loop needs a core that the engine computes on, it gets it at once
    try:
        options, apart = EngineOptions(**setup["engine"], progress=sys.stderr.isatty()), setup["apart"]
        with _saying_alive(channel):
            built = build(options)
        for drafter in (each for one in built.engine.policy.drafters for each in one.members):
            remedy = "it knows answers beforehand and is for `paceline bench batch`; choose another method"
            require(drafter.name not in FOR_BENCHMARKS, "speculative_config method", drafter.name, remedy)
        is_apart = apart["gives"] or apart["asks"] is not None
        handovers = handovers_of(built.engine, built.checkpoint, options) if is_apart else None
        publish = _publisher(setup["kv_events"], built.engine)
    except PacelineError as error:
        channel.sendall(processes.pack({"is": "failed", "message": str(error)}))
        return
    engine, vocab_size = built.engine, built.checkpoint.config.vocab_size
    intake = Intake(built.tokenizer, vocab_size, engine.config.max_model_len)
    preparer = Preparer(engine, intake, GrammarChecker(built.tokenizer, vocab_size), **setup["limits"])
    worker = Worker(channel, engine, preparer, Isolation(engine, intake), publish)
    if handovers is not None:
        worker.giver = Giver(handovers) if apart["gives"] else None
        worker.asker = Asker(**apart["asks"], handovers=handovers) if apart["asks"] is not None else None
    worker.prepare_threads()
    gc.freeze()  # the model and the libraries are here to stay: collections need not look at them
    worker.send({"is": "ready", **description(built, options.speculative_config)})
    try:
        worker.run(commands)
    except Exception as error:  # the engine's state may be wrong now: a new process starts with a clean one
        processes.log_error("engine failed", error)
    finally:  # without memory that may fail as well
        os._exit(1)


@dataclass(slots=True)
class Worker:
    channel: socket.socket
    engine: Engine
    preparer: Preparer
    isolation: Isolation
    publish: Callable[[], None] | None = None  # says which blocks are cached, after every step
    giver: Giver | None = None  # of what was read of prompts, to other servers
    asker: Asker | None = None  # of another server
    _commands: Queue = field(default_factory=Queue)  # for the main thread
    _prompts: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1))  # prepares them
    _grammars: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1))  # those to compile
    _fetches: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, MOST_FETCHES))
    _preparing: dict[str, processes.Message] = field(default_factory=dict)  # by id: read and not yet handled
    _choices: dict[str, Choice] = field(default_factory=dict)  # by the engine's request id
    _recorder: Recorder | None = None  # of the request being judged
    _reported_at: float = 0.0
    _is_stale: bool = True  # something has changed since the last report of figures

    def prepare_threads(self) -> None:
        """What comes with the first request otherwise, and fails where memory has become short."""
        self._prompts.submit(import_module, "paceline.loaders.chat_template").result()
        self._grammars.submit(import_module, "llguidance").result()

    def run(self, commands: BinaryIO) -> None:
        threading.Thread(target=self._read, args=(commands,), daemon=True).start()
        while True:
            is_idle = not self.engine.has_work and not self._is_stale
            with contextlib.suppress(queue.Empty):  # all that have come; with nothing to do, wait for one
                patience = HELD_S if self.giver is not None and self.giver.is_holding else None
                self._handle(self._commands.get(is_idle, patience))
                while True:
                    self._handle(self._commands.get_nowait())
            if self.giver is not None:
                self.giver.release()
            message: processes.Message = {"is": "step"}
            if self.engine.has_work and (said := self._step()):
                message["said"] = said
            if self.publish is not None:
                self.publish()
            now, is_idle = time.monotonic(), not self.engine.has_work
            if self._is_stale and (is_idle or now - self._reported_at > STATS_EVERY_S):
                message["figures"] = figures(self.engine)
                message["figures"]["counters"] |= self.asker.counts if self.asker is not None else {}
                self._reported_at, self._is_stale = now, False
            if len(message) > 1:
                self.send(message)

    def send(self, message: processes.Message) -> None:
        self.channel.sendall(processes.pack(message))

    def _read(self, commands: BinaryIO) -> None:
        status = 1
        try:
            while (message := processes.unpack(commands.readline())) is not None:
                if message["do"] in ("abort", "ping", "release"):
                    self._commands.put(message)
                    continue
                self._preparing[message["id"]] = message
                has_grammar = "structured_outputs" in message.get("params", ())
                (self._grammars if has_grammar else self._prompts).submit(self._prepare, message)
            status = 0
        except Exception as error:  # no memory for a thread, say
            processes.log_error("engine failed", error)
        finally:
            os._exit(status)

    def _prepare(self, message: processes.Message) -> None:
        """Everything that may take a while and needs no engine state."""
        asker, is_fetching = self.asker, False
        try:
            if "is_aborted" not in message and message["do"] == "handover":
                message["made"] = self._to_read(message)
            elif "is_aborted" not in message:
                message["made"] = made = self.preparer.prepare(message)
                if asker is not None and message["do"] == "add" and asker.is_wanted(made[0]):
                    self._fetches.submit(self._fetch, asker, message)
                    is_fetching = True
        except Exception as error:  # every id is answered
            message["refused"] = _refusal(error)
        finally:  # without memory a refusal may fail as well, and then the main thread does
            if not is_fetching:
                self._commands.put(message)

    def _to_read(self, message: processes.Message) -> Request:
        """A prompt for another server."""
        if self.giver is None:
            raise HandoverError("this server gives nothing; start it with --role prefill")
        self.giver.check(message)
        request = reading(message["tokens"], self.preparer.intake)
        self.engine.check_fits(request)
        return request

    def _fetch(self, asker: Asker, message: processes.Message) -> None:
        """The K/V of a prompt, which is added then: with them, or to be read here."""
        try:
            if "is_aborted" not in message:
                message["handover"] = asker.fetch(message["made"][0].tokens)
        except Exception as error:
            processes.log_error("a handover failed", error)
        finally:
            self._commands.put(message)

    def _handle(self, message: processes.Message) -> None:
        do, name = message["do"], message.get("id", "")
        if do == "ping":
            return self.send({"is": "pong"})
        if do == "release":
            return self.giver.release(name) if self.giver is not None else None
        if do == "abort":
            if name in self._preparing:
                self._preparing[name]["is_aborted"] = True
            return self._abort(name)
        del self._preparing[name]
        if "is_aborted" in message:
            return None
        if "made" in message:
            try:
                if do == "handover" and self.giver is not None:
                    self.isolation.add(message["made"])
                    return self.giver.begin(name, message["made"], message)
                value = self._add(name, message) if do == "add" else message["made"]
                return self.send({"is": "answer", "id": name, "value": value})
            except Exception as error:
                self._abort(name)
                message["refused"] = _refusal(error)
        return self.send({"is": "refused", "id": name, "error": message["refused"]})

    def _add(self, name: str, message: processes.Message) -> processes.Message:
        """Give the requests to the engine; what the client is told of them."""
        requests, tokenizer = message["made"], self.preparer.intake.tokenizer
        self._adopt(message.get("handover"))
        for index, request in enumerate(requests):
            self.isolation.add(request)
            choice = Choice(name, index, request, self.engine.stats[request.id], tokenizer)
            choice.has_details, choice.thoughts = bool(message.get("details")), message["thoughts"]
            if message.get("details") is True:
                choice.recorder, self.engine.watch = Recorder(tokenizer), self._watch
            self._choices[request.id] = choice
        self._is_stale = True
        first, end = requests[0], self._choices[requests[0].id].prompt_end
        echo = tokenizer.decode(first.tokens[: first.num_prompt]) if message.get("echo") else ""
        return {"num_prompt": first.num_prompt, "echo": echo, "end": end}

    def _adopt(self, handover: Handover | None) -> None:
        if self.asker is None or handover is None:
            return
        try:
            self.asker.handovers.adopt(handover)
        except Exception as error:  # the prompt is read here
            self.asker.failed(error)

    def _give(self, request: Request) -> None:
        """To the server for which the prompt was read, if it was."""
        if self.giver is None or not (name := self.giver.call_of(request)):
            return
        try:
            if request.error is not None:
                raise request.error
            self.send({"is": "answer", "id": name, "value": self.giver.finish(request)})
        except Exception as error:
            self.send({"is": "refused", "id": name, "error": _refusal(error)})
        for each in (request, *self.giver.left(name)):
            self.isolation.abort(each)
            self.engine.stats.pop(each.id, None)

    def _watch(self, event: watch.Begun | watch.Choice | watch.Coin | watch.Redraw | Verdict) -> None:
        """Shows the recorder of the request being judged what the engine shows, and others nothing."""
        if isinstance(event, watch.Begun):
            choice = self._choices.get(event.request.id)
            self._recorder = choice.recorder if choice is not None else None
        if self._recorder is not None:
            self._recorder(event)

    def _abort(self, name: str) -> None:
        for request in [choice.request for choice in self._choices.values() if choice.call == name]:
            self.isolation.abort(request)
            self._forget(request)
        for request in self.giver.left(name) if self.giver is not None else ():
            self.isolation.abort(request)
            self.engine.stats.pop(request.id, None)
        self._is_stale = True

    def _forget(self, request: Request) -> None:
        self._choices.pop(request.id, None)
        self.engine.stats.pop(request.id, None)
        if all(choice.recorder is None for choice in self._choices.values()):
            self.engine.watch = None

    def _step(self) -> list[processes.Message]:
        """What clients are told of a step: one message an emission, none where its request was aborted."""
        started, told = time.monotonic(), []
        emissions = self.isolation.step()
        for choice in self._choices.values():
            if choice.started_at is None and choice.request.status is not Status.WAITING:
                choice.started_at = started
        self._is_stale = True
        for emission in emissions:
            request = emission.request
            self._give(request)
            if request.id not in self._choices:
                continue
            choice = self._choices[request.id]
            try:
                told.append(choice.message(emission))
            except Exception as error:
                told.append({"id": choice.call, "i": choice.index, "n": 0, "error": _refusal(error)})
                self._abort(choice.call)
            if request.is_finished:
                self._forget(request)
        return told


@contextlib.contextmanager
def _saying_alive(channel: socket.socket) -> Iterator[None]:
    """While a model is read: the server takes an engine that is silent for one that hangs."""
    is_over = threading.Event()

    def say() -> None:
        with contextlib.suppress(OSError):  # the server is gone
            while not is_over.wait(ALIVE_EVERY_S):
                channel.sendall(processes.pack({"is": "pong"}))

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _publisher(place: str | None, engine: Engine) -> Callable[[], None] | None:
    if place is None:
        return None
    try:
        from paceline.scale.kv_events import Publisher
    except ModuleNotFoundError as error:
        what = f"kv_events needs {error.name}, which is not installed"
        raise ConfigError(f"{what}; run: pip install 'paceline[scale]'") from None
    return Publisher(place, engine.executor.kv).publish


def _refusal(error: Exception) -> dict[str, str]:
    """What the client is told; a fault of this program is in the log alone."""
    if not isinstance(error, PacelineError):
        processes.log_error("a request failed", error)
        error = unexpected(error)
    return error_json(error)


if __name__ == "__main__":
    main()
