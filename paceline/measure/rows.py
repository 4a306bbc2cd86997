"""The rows of a comparison (an engine with a method), the units they run (prompts that run together), and the
order they take turns in.

Invariant: rows are checked before anything is started; every row runs every unit once in each repeat, in an
order that is shuffled with a fixed seed, so that noise hits all rows alike and two runs are the same.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from paceline.core.errors import ConfigError
from paceline.core.options import nearest
from paceline.drafters.registry import DRAFTERS, parse

OURS, PLAIN, AUTO, RAW = "paceline", "plain", "auto", " raw"
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
    """One line of the report: which engine, in which precision, with which drafter."""

    peer: str  # OURS or a key of VARIANTS
    variant: str  # a dtype or a quantization; of llama.cpp's raw loop it ends with RAW
    method: str

    @property
    def engine(self) -> str:
        return f"{self.peer} {self.variant}"

    @property
    def is_raw(self) -> bool:
        return self.variant.endswith(RAW)

    def __str__(self) -> str:
        return f"{self.engine}, {self.method}"


class Task(NamedTuple):
    """A prompt as every engine gets it: the same token ids, and the same number of tokens to write."""

    id: str
    category: str
    ids: tuple[int, ...]
    num_tokens: int


Unit = tuple[Task, ...]  # run together: one prompt, or with concurrency all of a category


def methods_of(text: str, draft_model: str | None) -> list[str]:
    """--methods: names of drafters, auto, or none (also spelled plain)."""
    names = [PLAIN if name == "none" else name for name in names_of("--methods", text)]
    for name in names:
        if name not in (PLAIN, AUTO, *DRAFTERS):
            raise ConfigError(f"--methods holds {name!r}; {nearest(name, ['none', AUTO, *DRAFTERS])}")
        if name in DRAFTERS:
            model = {"model": draft_model} if name == "draft_model" and draft_model else {}
            parse({"method": name, **model})
    return names


def our_rows(dtypes: str, methods: Sequence[str]) -> list[Row]:
    names = [] if dtypes == "none" else names_of("--dtypes", dtypes)
    for name in names:
        if name not in DTYPES:
            raise ConfigError(f"--dtypes holds {name!r}; {nearest(name, [*DTYPES, 'none'])}")
    return [Row(OURS, name, method) for name in names for method in methods]


def peer_rows(peers: str, methods: Sequence[str], concurrency: int) -> list[Row]:
    """--peers: none, all, or names such as llama.cpp (its usual files) and llama.cpp:Q8_0 (one of them)."""
    every = {"none": [], "all": list(VARIANTS)}
    chosen: list[tuple[str, str]] = []
    for name in every[peers] if peers in every else names_of("--peers", peers):
        peer, _, variant = name.partition(":")
        if peer not in VARIANTS:
            raise ConfigError(f"--peers holds {name!r}; {nearest(peer, [*VARIANTS, 'all', 'none'])}")
        if variant and variant not in VARIANTS[peer]:
            raise ConfigError(f"--peers holds {name!r}; {peer} runs as {', '.join(VARIANTS[peer])}")
        if concurrency > 1 and peer in NO_BATCHES:
            why = f"{peer} runs one request at a time with drafts; leave one of them out"
            raise ConfigError(f"--concurrency is {concurrency} but {why}")
        chosen += [(peer, v) for v in ([variant] if variant else VARIANTS[peer][: NUM_DEFAULT[peer]])]
    known = [method for method in methods if method in PEER_METHODS]
    if chosen and not known:
        named = ",".join(methods)
        raise ConfigError(f"--methods is {named}, of which the peers have none; add none or ngram")
    return [row for pair in dict.fromkeys(chosen) for row in _rows_of(*pair, known, concurrency)]


def _rows_of(peer: str, variant: str, methods: Sequence[str], concurrency: int) -> list[Row]:
    """llama.cpp's raw loop beside its server's, which samples and makes text."""
    has_raw = peer == "llama.cpp" and PLAIN in methods and concurrency == 1
    raw = [Row(peer, variant + RAW, PLAIN)] if has_raw else []
    return [*(Row(peer, variant, method) for method in methods), *raw]


def names_of(option: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ConfigError(f"{option} is {text!r}; give names separated by commas")
    return list(dict.fromkeys(names))


def sizes_of(option: str, text: str) -> list[int]:
    """Whole numbers above 0, separated by commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"{option} is {text!r}; give whole numbers above 0, separated by commas")
    return [int(part) for part in parts]


def is_installed(peer: str) -> bool:
    return (_folder(peer) / ".installed").is_file() and (_folder(peer) / "bin" / "python").exists()


def _folder(peer: str) -> Path:
    return Path(os.environ.get("PACELINE_PEERS") or ".peers").absolute() / FOLDERS[peer]


def peer_python(peer: str) -> str:
    """The interpreter of a row's engine; an error that says how to install a peer that is missing."""
    if peer == OURS:
        return sys.executable
    if not is_installed(peer):
        remedy = "run `make peers`, or set PACELINE_PEERS to where it is"
        raise ConfigError(f"the peer {peer} is not installed in {_folder(peer)}; {remedy}")
    return str(_folder(peer) / "bin" / "python")


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
    """(repeat, index of the unit, row), each once; the row that begins changes from unit to unit."""
    shuffle = random.Random(SEED).shuffle
    for repeat in range(repeats):
        for index in range(len(units)):
            order = list(rows)
            shuffle(order)
            for row in order:
                yield repeat, index, row
