"""Grammars come from strangers, and no bound on their size bounds the time that compiling them takes. So a
process apart compiles each first, under a limit of time and memory; what it could not do in time is refused,
and the process is replaced. Invariant: the engine's process compiles only what was compiled within the limits
before.
"""

from __future__ import annotations

import contextlib
import functools
import json
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from paceline.core.errors import GrammarError, PacelineError
from paceline.core.grammar import GrammarCompiler, GrammarTokenizer
from paceline.core.params import StructuredOutputs
from paceline.server import processes

LIMIT_S = 2.0  # of computing, not by the clock: on a busy machine a grammar may wait for its turn
START_S = 60.0  # by the clock: for the process to read the tokenizer, or to come to an end
MAX_BYTES = 4 * 2**30
KNOWN = 256  # grammars remembered as good
TOO_HARD = f"the grammar or schema takes over {LIMIT_S:g} seconds or too much memory to compile; simplify it"


class GrammarChecker:
    """Used by one thread. The process is started when the first grammar comes."""

    def __init__(self, tokenizer: GrammarTokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._compile_once = functools.lru_cache(KNOWN)(self._compile)

    def check(self, spec: Mapping[str, Any]) -> None:
        """Raises a GrammarError for what does not compile, or not in time."""
        self._compile_once(json.dumps(spec, sort_keys=True))

    def _compile(self, spec: str) -> None:
        problem = None
        if self._channel is None:
            self._process, self._channel = processes.start("paceline.server.grammar_check")
            known = {"text": self._tokenizer.json(), "eos_ids": sorted(self._tokenizer.eos_ids)}
            sizes = {"vocab_size": self._tokenizer.vocab_size, "model_vocab_size": self._vocab_size}
            if problem := self._ask({**known, **sizes}, START_S, "grammars cannot be used with this model"):
                self._stop()
        if problem := problem or self._ask(json.loads(spec), START_S, TOO_HARD):
            raise GrammarError(problem)

    def _ask(self, message: processes.Message, seconds: float, too_late: str) -> str | None:
        """What is wrong, None if nothing is. A process that does not answer in time is ended."""
        assert self._channel is not None
        self._channel.settimeout(seconds)
        try:
            self._channel.sendall(processes.pack(message))
            if (answer := processes.unpack(self._channel.makefile("rb").readline())) is not None:
                return str(answer["error"]) if answer["error"] else None
        except OSError:  # the end of the time, too
            pass
        self._stop()
        return too_late

    def _stop(self) -> None:
        if self._channel is not None and self._process is not None:
            self._channel.close()
            self._process.kill()
            self._process.wait()
        self._channel = self._process = None


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    with contextlib.suppress(ValueError, OSError):  # a system may have a lower limit already
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    compiler: GrammarCompiler | None = None
    file = channel.makefile("rb")
    while (message := processes.unpack(file.readline())) is not None:
        problem = None
        if compiler is not None:
            signal.setitimer(signal.ITIMER_PROF, LIMIT_S)  # which ends the process
        try:
            if compiler is None:
                # as much of the tokenizer as a grammar needs
                known: Any = SimpleNamespace(**message, json=functools.partial(str, message["text"]))
                compiler = GrammarCompiler(known, message["model_vocab_size"])
            else:
                compiler.matcher(StructuredOutputs(**message))
        except (PacelineError, RecursionError, MemoryError) as error:
            problem = str(error) or "the grammar or schema is too large; simplify it"
        signal.setitimer(signal.ITIMER_PROF, 0)
        channel.sendall(processes.pack({"error": problem}))


if __name__ == "__main__":
    main()
