"""The wall clock may jump, so nothing is measured, limited or ordered by it: it is read for dates that are
shown, in the places listed here and nowhere else.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent / "paceline"
WALL = {"time", "time_ns", "localtime", "gmtime", "ctime", "asctime", "strftime", "now", "utcnow", "today"}
OWNERS = {"time", "datetime", "date"}  # modules and classes that have them
# How often each reads it, and for what.
ALLOWED = {
    "server/service.py": 1,  # `created` of a model
    "server/writer.py": 1,  # `created` of an answer
    "server/processes.py": 2,  # the date of a log line, which `logging` has read
    "train/session.py": 2,  # when a head was made
    "loaders/chat_template.py": 1,  # strftime_now of chat templates
    "scale/kv_events.py": 1,  # the date that vLLM's form has
    "measure/results.py": 1,  # when a report was made
}


def readings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in WALL:
            if ast.unparse(node.value).rpartition(".")[2] in OWNERS:
                yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (name.name for name in node.names if name.name in WALL)
        elif isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node).endswith("CLOCK_REALTIME"):
            yield ast.unparse(node)


def test_the_wall_clock_is_read_for_dates_alone() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.rglob("*.py")}
    found = Counter(path.relative_to(ROOT).as_posix() for path, tree in trees.items() for _ in readings(tree))
    assert found == Counter(ALLOWED)


def test_readings_are_found_however_they_are_written() -> None:
    texts = ("time.time()", "datetime.datetime.now(UTC)", "from time import time", "clock = time.time_ns")
    assert all(list(readings(ast.parse(text))) for text in (*texts, "clock_gettime(time.CLOCK_REALTIME)"))
    assert not list(readings(ast.parse("time.monotonic(); loop.time(); time.thread_time(); text.now()")))
