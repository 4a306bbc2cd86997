"""Prompts: the ones shipped with the package, and a user's own files.

The shipped file has the Spec-Bench shape, one JSON object a line: question_id, category, turns. A user's file
may also hold {"prompt": "..."} objects, or be a .txt with one prompt a line. Invariant: what comes back has
text, or the line is named.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from paceline.core.errors import ConfigError

CATEGORIES = ("chat", "code", "math", "translation", "summarization", "retrieval")
SHIPPED = Path(__file__).parent.parent / "data" / "prompts.jsonl"


class Prompt(NamedTuple):
    id: str
    category: str
    turns: tuple[str, ...]  # what the user says, turn by turn; at least one

    @property
    def text(self) -> str:
        return self.turns[0]


def load(path: str | Path | None = None) -> list[Prompt]:
    """The shipped prompts, or those of a .jsonl or .txt file."""
    path = SHIPPED if path is None else Path(path)
    read_line = {".jsonl": _from_json, ".txt": _from_text}.get(path.suffix)
    if read_line is None:
        raise ConfigError(
            f"{path}: prompts come as .jsonl (question_id, category, turns; or prompt) or .txt (one a line)"
        )
    prompts = [
        read_line(path, number, line) for number, line in enumerate(_lines(path), start=1) if line.strip()
    ]
    if not prompts:
        raise ConfigError(f"{path}: holds no prompt; write one a line")
    repeated = {p.id for p in prompts if sum(other.id == p.id for other in prompts) > 1}
    if repeated:
        raise ConfigError(
            f"{path}: question_id {min(repeated)} occurs more than once; give each prompt its own"
        )
    return prompts


def chosen(path: Path | None, limit: int | None, every: int = 1) -> list[Prompt]:
    """The prompts of a file, or the shipped ones: every n-th, and at most `limit` of each category."""
    prompts = load(path)[::every]
    return prompts if limit is None else first_of_each(prompts, limit)


def first_of_each(prompts: list[Prompt], limit: int) -> list[Prompt]:
    """At most `limit` prompts of each category, in their order."""
    taken: dict[str, int] = {}
    kept = []
    for prompt in prompts:
        taken[prompt.category] = taken.get(prompt.category, 0) + 1
        if taken[prompt.category] <= limit:
            kept.append(prompt)
    return kept


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); give the path of a .jsonl or .txt file"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text; save it as UTF-8") from None


def _from_text(path: Path, number: int, line: str) -> Prompt:
    return Prompt(str(number), path.stem, (line.strip(),))


def _from_json(path: Path, number: int, line: str) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{number}: is not JSON ({error.msg}); write one object a line") from None
    if not isinstance(record, dict):
        raise ConfigError(
            f"{path}:{number}: holds {line.strip()[:40]!r}; write an object with turns or prompt"
        )
    turns = [record["prompt"]] if "prompt" in record else record.get("turns")
    if (
        not isinstance(turns, list)
        or not turns
        or not all(isinstance(turn, str) and turn.strip() for turn in turns)
    ):
        raise ConfigError(f'{path}:{number}: has no text; write "turns": ["..."] or "prompt": "..."')
    name, category = record.get("question_id", number), record.get("category", record.get("task", path.stem))
    return Prompt(str(name), str(category), tuple(turns))
