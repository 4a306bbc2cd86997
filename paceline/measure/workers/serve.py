"""The worker's side of the pipe: `python serve.py MODULE` loads an engine once and then answers JSON lines,
one for each that comes.

Runs in the peer's own environment, so it imports nothing of Paceline. The first line in holds the options of
`MODULE.load`, which returns the operations by name, and under "note" perhaps a remark for the report; every
later line is {"op": NAME, ...}. Invariant: the pipe carries answers alone; what a library prints goes to
stderr. A closed stdin ends the worker, so none outlives the process that started it; while it waits it
sleeps.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import IO, Any


def take_stdout() -> IO[str]:
    """The pipe, as a file of our own; descriptor 1 becomes stderr for all else, C++ included."""
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return pipe


def send(pipe: IO[str], answer: dict[str, Any]) -> None:
    pipe.write(json.dumps(answer) + "\n")
    pipe.flush()


def main(module: str) -> None:
    pipe = take_stdout()
    try:
        options = json.loads(sys.stdin.readline())
        operations = importlib.import_module(module).load(options)
        send(pipe, {"ready": True, "note": operations.pop("note", None)})
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
