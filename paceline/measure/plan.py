"""What is to be measured: rows (an engine with a method), units (prompts that run together), and the order
they take turns in.

Invariant: a plan is checked before anything is started; every row runs every unit once in each repeat, in an
order that is shuffled with a fixed seed, so that noise hits all rows alike and two runs of one plan are the
same.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline.core.errors import ConfigError
from paceline.core.options import nearest
from paceline.drafters.registry import DRAFTERS, parse
from paceline.measure.prompts import Prompt

OURS = "paceline"
PLAIN = "plain"
AUTO = "auto"
DTYPES = ("int8", "float32", "int4")
FILE_AS_IS = "file"
VARIANTS: dict[str, tuple[str, ...]] = {  # of each peer; the first ones are taken when only the peer is named
    "llama.cpp": ("Q8_0", "Q4_0", FILE_AS_IS, "F32"),
    "transformers": ("float32",),
    "vllm": ("float32",),
}
NUM_DEFAULT = {"llama.cpp": 3, "transformers": 1, "vllm": 1}
FOLDERS = {"llama.cpp": "llamacpp", "transformers": "transformers", "vllm": "vllm"}
PEER_METHODS = (PLAIN, "ngram")
NO_BATCHES = ("transformers",)
SEED = 7


class Row(NamedTuple):
    """One line of the report: who computes, in which precision, and who drafts."""

    peer: str  # OURS or a key of VARIANTS
    variant: str  # a dtype or a quantization
    method: str

    @property
    def engine(self) -> str:
        return f"{self.peer} {self.variant}"

    def __str__(self) -> str:
        return f"{self.engine}, {self.method}"


class Task(NamedTuple):
    """A prompt as every engine gets it: the same token ids, and the same number of tokens to write."""

    id: str
    category: str
    ids: tuple[int, ...]
    num_tokens: int


Unit = tuple[Task, ...]  # run together: one prompt, or with concurrency all of a category


@dataclass(frozen=True, slots=True)
class Plan:
    model: str
    rows: tuple[Row, ...]
    prompts: tuple[Prompt, ...]
    draft_model: str | None = None
    max_new_tokens: int = 128
    min_new_tokens: int = 8
    repeats: int = 3
    concurrency: int = 1

    def speculative_config(self, row: Row) -> dict[str, Any] | str | None:
        """A drafter by its name drafts its usual length at every step; only "auto" chooses."""
        if row.method in (PLAIN, AUTO):
            return None if row.method == PLAIN else AUTO
        config = {
            "method": row.method,
            **({"model": self.draft_model} if row.method == "draft_model" else {}),
        }
        return {**config, "num_speculative_tokens": parse(config)[1].num_speculative_tokens}


def methods_of(text: str, draft_model: str | None) -> list[str]:
    """--methods: names of drafters, auto, or none (also spelled plain)."""
    names = [PLAIN if name == "none" else name for name in _names("--methods", text)]
    for name in names:
        if name not in (PLAIN, AUTO, *DRAFTERS):
            raise ConfigError(f"--methods holds {name!r}; {nearest(name, ['none', AUTO, *DRAFTERS])}")
        if name in DRAFTERS:
            parse(
                {"method": name, **({"model": draft_model} if name == "draft_model" and draft_model else {})}
            )
    return names


def our_rows(dtypes: str, methods: Sequence[str]) -> list[Row]:
    names = [] if dtypes == "none" else _names("--dtypes", dtypes)
    for name in names:
        if name not in DTYPES:
            raise ConfigError(f"--dtypes holds {name!r}; {nearest(name, [*DTYPES, 'none'])}")
    return [Row(OURS, name, method) for name in names for method in methods]


def peer_rows(peers: str, methods: Sequence[str], concurrency: int) -> list[Row]:
    """--peers: none, all, or names such as llama.cpp (its usual files) and llama.cpp:Q8_0 (one of them)."""
    names = (
        {"none": [], "all": list(VARIANTS)}.get(peers)
        if peers in ("none", "all")
        else _names("--peers", peers)
    )
    chosen: list[tuple[str, str]] = []
    for name in names or ():
        peer, _, variant = name.partition(":")
        if peer not in VARIANTS:
            raise ConfigError(f"--peers holds {name!r}; {nearest(peer, [*VARIANTS, 'all', 'none'])}")
        if variant and variant not in VARIANTS[peer]:
            raise ConfigError(f"--peers holds {name!r}; {peer} runs as {', '.join(VARIANTS[peer])}")
        if concurrency > 1 and peer in NO_BATCHES:
            raise ConfigError(
                f"--concurrency is {concurrency} but {peer} runs one request at a time with drafts; leave one of them out"
            )
        chosen += [(peer, v) for v in ([variant] if variant else VARIANTS[peer][: NUM_DEFAULT[peer]])]
    known = [method for method in methods if method in PEER_METHODS]
    if chosen and not known:
        raise ConfigError(
            f"--methods is {','.join(methods)}, of which the peers have none; add none or ngram"
        )
    return [Row(peer, variant, method) for peer, variant in dict.fromkeys(chosen) for method in known]


def _names(option: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ConfigError(f"{option} is {text!r}; give names separated by commas")
    return list(dict.fromkeys(names))


def peer_python(peer: str) -> str:
    """The interpreter of a row's engine; a peer that is not installed is an error that says how to install
    it.
    """
    if peer == OURS:
        return sys.executable
    folder = Path(os.environ.get("PACELINE_PEERS") or ".peers").absolute() / FOLDERS[peer]
    python = folder / "bin" / "python"
    if not (folder / ".installed").is_file() or not python.exists():
        raise ConfigError(
            f"the peer {peer} is not installed in {folder}; run `make peers`, or set PACELINE_PEERS to where it is"
        )
    return str(python)


def units_of(tasks: Sequence[Task], concurrency: int) -> list[Unit]:
    if concurrency == 1:
        return [(task,) for task in tasks]
    by_category: dict[str, list[Task]] = {}
    for task in tasks:
        by_category.setdefault(task.category, []).append(task)
    return [tuple(group) for group in by_category.values()]


def warm_up_of(units: Sequence[Unit]) -> list[Unit]:
    """The first unit of each category: enough to compile, to page weights in and to reach every kernel."""
    return list({unit[0].category: unit for unit in reversed(units)}.values())


def turns(rows: Sequence[Row], units: Sequence[Unit], repeats: int) -> Iterator[tuple[int, int, Row]]:
    """(repeat, index of the unit, row), each once; who begins changes from unit to unit."""
    shuffle = random.Random(SEED).shuffle
    for repeat in range(repeats):
        for index in range(len(units)):
            order = list(rows)
            shuffle(order)
            for row in order:
                yield repeat, index, row
