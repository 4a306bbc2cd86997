"""Structured logs: one JSON object a line on stderr. Invariant: no prompt, no answer and no key is ever
handed to a log call. Error messages may quote what a client sent, so only an error's kind and place are
logged, never its words.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from typing import Any

LOGGER = logging.getLogger("paceline.server")


class _Json(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line: dict[str, Any] = {"time": stamp, "level": record.levelname.lower(), "process": self._process}
        line |= {"event": record.getMessage(), **getattr(record, "fields", {})}
        if record.exc_info and (error := record.exc_info[1]) is not None:
            frames = traceback.extract_tb(error.__traceback__)[-12:]
            line["error"] = type(error).__name__
            line["trace"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
        return json.dumps(line, default=str)


def set_up(level: str, process: str) -> None:
    """All logs of this process, those of libraries too, become JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio"):
        library = logging.getLogger(name)
        library.handlers.clear()
        library.setLevel(logging.WARNING)
        library.propagate = name != "uvicorn.access"


def log(event: str, level: int = logging.INFO, **fields: Any) -> None:
    LOGGER.log(level, event, extra={"fields": fields})


def log_error(event: str, error: BaseException, **fields: Any) -> None:
    LOGGER.error(event, exc_info=error, extra={"fields": fields})
