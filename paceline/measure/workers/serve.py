"""The worker's side of the pipe: `python serve.py MODULE` loads an engine once and then answers JSON lines,
one for each that comes.

Runs in the peer's own environment, so it imports nothing of Paceline. The first line in holds the options of
`MODULE.load`, which returns the operations by name, and under "note" perhaps a remark for the report; every
later line is {"op": NAME, ...}. A module that names "answer", one request's, gets "generate" made from it.
Invariant: the pipe carries answers alone; what a library prints goes to stderr. A closed stdin ends the
worker, so none outlives the process that started it; while it waits it sleeps.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import IO, Any


def generate(answer: Callable[..., Any], prompts: list[dict[str, Any]], in_flight: int) -> dict[str, Any]:
    """All prompts, `in_flight` of them at any time."""
    started = time.perf_counter()
    with ThreadPoolExecutor(in_flight) as pool:
        answers = list(pool.map(answer, prompts))
    return {"wall_s": time.perf_counter() - started, "answers": answers}


def send(pipe: IO[str], answer: dict[str, Any]) -> None:
    pipe.write(json.dumps(answer) + "\n")
    pipe.flush()


def main(module: str) -> None:
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # descriptor 1 becomes stderr for all else, C++ included
    try:
        operations = importlib.import_module(module).load(json.loads(sys.stdin.readline()))
        if "answer" in operations:
            operations["generate"] = partial(generate, operations["answer"])
        send(pipe, {"ready": True, "note": operations.get("note")})
        for line in sys.stdin:
            message = json.loads(line)
            send(pipe, operations[message.pop("op")](**message))
    # whatever a peer raises: the process that asked hears of it in one line, the log has the rest
    except Exception as error:
        traceback.print_exc()
        send(pipe, {"error": str(error) or type(error).__name__, "kind": type(error).__name__})
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
