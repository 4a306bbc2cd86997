"""Grammars come from strangers, and no bound on their size bounds the time that compiling them takes. So a
process apart compiles each first, under a limit of time and memory; what it could not do in time is refused,
and the process is replaced.

Invariant: the engine's process compiles only what was compiled within the limits before.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import resource
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import GrammarError, PacelineError
from paceline.core.grammar import GrammarCompiler, GrammarTokenizer
from paceline.core.params import StructuredOutputs
from paceline.server import wire

LIMIT_S = 2.0
START_S = 60.0  # for the process to read the tokenizer, on a busy machine
MAX_BYTES = 4 * 2**30
KNOWN = 256  # grammars remembered as good


class GrammarChecker:
    """Used by one thread. The process is started when the first grammar comes."""

    def __init__(self, tokenizer: GrammarTokenizer, vocab_size: int) -> None:
        self._setup = (tokenizer, vocab_size)
        self._good: OrderedDict[bytes, None] = OrderedDict()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def check(self, spec: Mapping[str, Any]) -> None:
        """Raises a GrammarError for what does not compile, or not in time."""
        name = hashlib.blake2b(json.dumps(spec, sort_keys=True).encode(), digest_size=16).digest()
        if name not in self._good:
            self._ask(spec)
            self._good[name] = None
        self._good.move_to_end(name)
        while len(self._good) > KNOWN:
            self._good.popitem(last=False)

    def _ask(self, spec: Mapping[str, Any]) -> None:
        channel = self._channel or self._start()
        channel.settimeout(LIMIT_S)
        try:
            channel.sendall(wire.pack(dict(spec)))
            answer = wire.read_blocking(channel)  # None at the end of the time, too
        except OSError:
            answer = None
        if answer is None:
            self._stop()
            what = f"the grammar or schema takes more than {LIMIT_S:g} seconds or too much memory to compile"
            raise GrammarError(f"{what}; simplify it")
        if answer["error"] is not None:
            raise GrammarError(answer["error"])

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        tokenizer, vocab_size = self._setup
        with theirs:
            command = [sys.executable, "-P", "-m", "paceline.server.grammar_check", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
        self._channel = ours
        ours.settimeout(START_S)
        setup = {
            "json": tokenizer.json(),
            "eos_ids": sorted(tokenizer.eos_ids),
            "size": tokenizer.vocab_size,
            "vocab_size": vocab_size,
        }
        ours.sendall(wire.pack(setup))
        answer = wire.read_blocking(ours)
        if answer is None or answer["error"] is not None:
            self._stop()
            raise GrammarError(answer["error"] if answer else "grammars cannot be used with this model")
        return ours

    def _stop(self) -> None:
        if self._channel is not None and self._process is not None:
            self._channel.close()
            self._process.kill()
            self._process.wait()
        self._channel = self._process = None


@dataclass(slots=True)
class _Tokenizer:
    """As much of the tokenizer as a grammar needs."""

    text: str
    eos_ids: frozenset[int]
    vocab_size: int

    def json(self) -> str:
        return self.text


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    with contextlib.suppress(ValueError, OSError):  # a system may have a lower limit already
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    setup = wire.read_blocking(channel)
    if setup is None:
        return
    compiler: GrammarCompiler | None = None
    try:
        tokenizer = _Tokenizer(setup["json"], frozenset(setup["eos_ids"]), setup["size"])
        compiler = GrammarCompiler(tokenizer, setup["vocab_size"])
        channel.sendall(wire.pack({"error": None}))
    except PacelineError as error:
        channel.sendall(wire.pack({"error": str(error)}))
    while compiler is not None and (spec := wire.read_blocking(channel)) is not None:
        channel.sendall(wire.pack({"error": _problem(compiler, spec)}))


def _problem(compiler: GrammarCompiler, spec: Mapping[str, Any]) -> str | None:
    try:
        compiler.matcher(StructuredOutputs(**spec))
    except (PacelineError, RecursionError, MemoryError) as error:
        return str(error) or "the grammar or schema is too large; simplify it"
    return None


if __name__ == "__main__":
    main()
