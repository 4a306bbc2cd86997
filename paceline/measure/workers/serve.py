"""The worker's side of the pipe: `python serve.py MODULE` answers messages {"op": NAME, ...} in the peer's
own environment, so it imports nothing of Paceline. The first is "load" with the options of `MODULE.load`,
which returns operations by name, and perhaps a "note" for the report; of "answer" (one request) and "begin"
(called with the prompts before) "generate" is made. Invariant: descriptor 0 is the pipe, what a library
prints goes to the log, and a closed pipe ends the worker.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import Any


def generate(operations: dict[str, Any], prompts: list[dict[str, Any]], in_flight: int) -> dict[str, Any]:
    """All prompts, `in_flight` of them at any time; one alone runs in this thread, with its OpenMP team."""
    answer = operations["answer"]
    if "begin" in operations:
        operations["begin"](prompts)
    started = time.perf_counter()
    if in_flight == 1:
        answers = [answer(prompt) for prompt in prompts]
    else:
        with ThreadPoolExecutor(in_flight) as pool:
            answers = list(pool.map(answer, prompts))
    return {"wall_s": time.perf_counter() - started, "answers": answers}


def main(module: str) -> None:
    pipe: Any = Connection(os.dup(0))
    try:
        operations = importlib.import_module(module).load(pipe.recv()["options"])
        if "answer" in operations:
            operations["generate"] = partial(generate, operations)
        pipe.send({"note": operations.get("note")})
        while True:
            try:
                message = pipe.recv()
            except (OSError, EOFError):
                return  # the process that asked has closed it
            pipe.send(operations[message.pop("op")](**message))
    # whatever a peer raises: the process that asked hears of it in one message, the log has the rest
    except Exception as error:
        traceback.print_exc()
        pipe.send({"error": str(error) or type(error).__name__, "kind": type(error).__name__})
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
