"""The rows of a comparison (an engine with a method), as options name them, and the order they take turns in.
Invariant: rows are checked before anything is started; the order is the same in every run, no row is always
the first and none always follows the same other one, so that noise hits all alike.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from paceline.core.errors import ConfigError
from paceline.core.options import nearest, require
from paceline.drafters.registry import DRAFTERS, parse

T = TypeVar("T")
OURS, PLAIN, AUTO, RAW = "paceline", "plain", "auto", " raw"
DTYPES = ("int8", "float32", "int4")
FILE_AS_IS = "file"
VARIANTS: dict[str, tuple[str, ...]] = {  # of each peer; the first ones are taken when only the peer is named
    "llama.cpp": ("Q8_0", "Q4_0", FILE_AS_IS, "F32"),
    "transformers": ("float32",),
    "vllm": ("float32",),
}
NUM_DEFAULT = {"llama.cpp": 3, "transformers": 1, "vllm": 1}
FOLDERS = {peer: peer.replace(".", "") for peer in VARIANTS}
PEER_METHODS = (PLAIN, "ngram")
NO_BATCHES = ("transformers",)


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


def names_of(option: str, text: str, known: Sequence[str] = ()) -> list[str]:
    """Names separated by commas, each once; of them all must be known, where it is said which are."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if not name or (known and name not in known):
            remedy = nearest(name, list(known)) if name else "give names separated by commas"
            raise ConfigError(f"{option} holds {name!r}; {remedy}")
    return list(dict.fromkeys(names))


def sizes_of(option: str, text: str) -> list[int]:
    """Whole numbers above 0, separated by commas."""
    parts = [part.strip() for part in text.split(",")]
    is_ok = all(part.isdecimal() and int(part) for part in parts)
    require(is_ok, option, text, "give whole numbers above 0, separated by commas")
    return [int(part) for part in parts]


def dtypes_of(text: str) -> list[str]:
    """--dtypes: precisions of our own engine, or none."""
    return [name for name in names_of("--dtypes", text, [*DTYPES, "none"]) if name != "none"]


def methods_of(text: str, draft_model: str | None) -> list[str]:
    """--methods: names of drafters, auto, or none (also spelled plain)."""
    names = names_of("--methods", text, ["none", PLAIN, AUTO, *DRAFTERS])
    for name in set(names).intersection(DRAFTERS):
        parse({"method": name, **({"model": draft_model} if name == "draft_model" and draft_model else {})})
    return [PLAIN if name == "none" else name for name in names]


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
        alone = f"{peer} runs one request at a time with drafts; leave one of them out"
        require(concurrency == 1 or peer not in NO_BATCHES, "--concurrency", concurrency, alone)
        chosen += [(peer, v) for v in ([variant] if variant else VARIANTS[peer][: NUM_DEFAULT[peer]])]
    known = [method for method in methods if method in PEER_METHODS]
    remedy = "of these the peers have none; add none or ngram"
    require(not chosen or bool(known), "--methods", ",".join(methods), remedy)
    rows = []
    for peer, variant in dict.fromkeys(chosen):
        rows += [Row(peer, variant, method) for method in known]
        if peer == "llama.cpp" and PLAIN in known and concurrency == 1:  # beside its server's loop
            rows.append(Row(peer, variant + RAW, PLAIN))
    return rows


def in_turn(rows: Iterable[T], number: int) -> list[T]:
    """The order of a turn: it begins one row later each time, and is backwards in every other round."""
    order = deque(rows)
    order.rotate(-number)
    return [*reversed(order)] if number // len(order) % 2 else [*order]


def _folder(peer: str) -> Path:
    return Path(os.environ.get("PACELINE_PEERS") or ".peers").absolute() / FOLDERS[peer]


def is_installed(peer: str) -> bool:
    return (_folder(peer) / ".installed").is_file() and (_folder(peer) / "bin" / "python").exists()


def peer_python(peer: str) -> str:
    """The interpreter of a row's engine; an error that says how to install a peer that is missing."""
    if peer == OURS:
        return sys.executable
    if not is_installed(peer):
        remedy = "run `make peers`, or set PACELINE_PEERS to where it is"
        raise ConfigError(f"the peer {peer} is not installed in {_folder(peer)}; {remedy}")
    return str(_folder(peer) / "bin" / "python")
