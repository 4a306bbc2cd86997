"""Prompts: those shipped with the package, and a user's own files: one JSON object a line as Spec-Bench has
it (question_id, category, turns) or with "prompt", compressed or not, or a .txt with one prompt a line.
Invariant: what comes back has text and an id of its own, or the line is named.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from paceline.core.errors import ConfigError

SHIPPED = Path(__file__).parent.parent / "data" / "prompts.jsonl"


class Prompt(NamedTuple):
    id: str
    category: str
    turns: tuple[str, ...]  # what the user says, turn by turn; at least one

    @property
    def text(self) -> str:
        return self.turns[0]


def load(path: str | Path | None = None) -> list[Prompt]:
    """The shipped prompts, or those of a .jsonl, .jsonl.gz or .txt file."""
    path = SHIPPED if path is None else Path(path)
    name = path.name.removesuffix(".gz")
    if not name.endswith(".jsonl") and path.suffix != ".txt":
        form = ".jsonl or .jsonl.gz (question_id, category, turns; or prompt) or .txt (one a line)"
        raise ConfigError(f"{path}: prompts come as {form}")
    stem, prompts = Path(name).stem, []
    text = text_of(path, "give a .jsonl or .txt file")
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip() and path.suffix == ".txt":
            prompts.append(Prompt(str(number), stem, (line.strip(),)))
        elif line.strip():
            prompts.append(_from_json(f"{path}:{number}", stem, number, line))
    if not prompts:
        raise ConfigError(f"{path}: holds no prompt; write one a line")
    repeated = [each for each, count in Counter(prompt.id for prompt in prompts).items() if count > 1]
    if repeated:
        raise ConfigError(f"{path}: question_id {min(repeated)} occurs more than once; give each its own")
    return prompts


def chosen(path: Path | None, limit: int | None, every: int = 1) -> list[Prompt]:
    """The prompts of a file, or the shipped ones: every n-th, and at most `limit` of each category."""
    taken, kept = Counter[str](), []
    for prompt in load(path)[::every]:
        taken[prompt.category] += 1
        if limit is None or taken[prompt.category] <= limit:
            kept.append(prompt)
    return kept


def text_of(path: Path, remedy: str) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text; save it as UTF-8") from None
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read ({why}); {remedy}") from None


def _from_json(where: str, stem: str, number: int, line: str) -> Prompt:
    """`where` is the file and the line; `stem` is the category of a prompt that names none."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: is not JSON ({error.msg}); write one object a line") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: holds {line.strip()[:40]!r}; write an object with turns or prompt")
    turns = [record["prompt"]] if "prompt" in record else record.get("turns")
    is_text = isinstance(turns, list) and all(isinstance(turn, str) and turn.strip() for turn in turns)
    if not turns or not is_text:
        raise ConfigError(f'{where}: has no text; write "turns": ["..."] or "prompt": "..."')
    category = record.get("category", record.get("task", stem))
    return Prompt(str(record.get("question_id", number)), str(category), tuple(turns))
