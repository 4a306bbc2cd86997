"""The rows of a comparison (an engine with a method), as options name them, the order they take turns in, and
the report from their samples. Invariant: rows are checked before anything is started; the order is the same
in every run, no row is always the first and none always follows the same other one, so noise hits all alike.
A rate is of decoding, from the first token on, for each repeat over all its requests; the median is reported
with their spread. Speedup and identity are against the plain row of the same engine in the same run.
"""

from __future__ import annotations

import os
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

from paceline.core.errors import ConfigError
from paceline.core.options import nearest, require
from paceline.drafters.registry import DRAFTERS, SMALLER, parse
from paceline.measure.results import OVERALL, Table, Tell, cell

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
# ids or text, num_tokens, first_s, total_s, num_steps, num_drafted, num_accepted; drafted_at, accepted_at
Answer = dict[str, Any]
Unit = tuple["Task", ...]  # run together: one prompt, or with concurrency all of a category
Runners = Mapping["Row", Callable[[Unit], tuple[float, list[Answer]]]]  # seconds it took, and the answers
Records = list[dict[str, Any]]  # of a report, one for each row and task


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
        parse({"method": name, **({"model": draft_model} if name in SMALLER and draft_model else {})})
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
    if peer == OURS or (not is_installed(peer) and find_spec(FOLDERS[peer]) is not None):
        return sys.executable  # this very Python has it
    if not is_installed(peer):
        remedy = "run `make peers`, or set PACELINE_PEERS to where it is"
        raise ConfigError(f"the peer {peer} is not installed in {_folder(peer)}; {remedy}")
    return str(_folder(peer) / "bin" / "python")


class Task(NamedTuple):
    """A prompt as every engine gets it: the same token ids, and the same number of tokens to write."""

    id: str
    category: str
    ids: tuple[int, ...]
    num_tokens: int


class Sample(NamedTuple):
    """One unit, run once by one row."""

    row: Row
    repeat: int
    unit: Unit
    wall_s: float
    answers: Sequence[Answer]


def samples_of(runners: Runners, units: Sequence[Unit], repeats: int, tell: Tell) -> Iterator[list[Sample]]:
    """All rows' samples of one unit after the other, in turn."""
    for number in range(repeats * len(units)):
        found, unit = list[Sample](), units[number % len(units)]
        for row in in_turn(runners, number):
            tell(str(row), 0)
            found.append(Sample(row, number // len(units), unit, *runners[row](unit)))
            tell(str(row), 1)
        yield found


def report_rows(rows: Sequence[Row], samples: Sequence[Sample], peaks: Mapping[Row, Any]) -> Records:
    """One record for each row and category, and one for each row over all. `peaks`: megabytes of memory."""
    categories = list(dict.fromkeys(sample.unit[0].category for sample in samples))
    records = []
    for row in rows:
        for category in [*categories, OVERALL]:
            found = [each for each in samples if category in (OVERALL, each.unit[0].category)]
            mine = [sample for sample in found if sample.row == row]
            plain = [sample for sample in found if sample.row == row._replace(method=PLAIN)]
            labels = {"engine": row.engine, "method": row.method, "task": category}
            records.append({**labels, **_record(mine, plain), "peak_mb": peaks.get(row)})
    return records


def _record(mine: Sequence[Sample], plain: Sequence[Sample]) -> dict[str, Any]:
    rates, answers = rates_of(mine), [answer for sample in mine for answer in sample.answers]
    base, middle = median(rates_of(plain)) if plain else None, median(rates)
    names = ("num_tokens", "num_steps", "num_drafted", "num_accepted")
    num_tokens, num_steps, num_drafted, num_accepted = (sum(a[name] for a in answers) for name in names)
    gaps = [(a["total_s"] - a["first_s"]) / (a["num_tokens"] - 1) for a in answers if a["num_tokens"] > 1]
    return {
        "prompts": len({task.id for sample in mine for task in sample.unit}),
        "tokens_per_second": round(middle, 2),
        "speedup": round(middle / base, 4) if base else None,
        "tau": round(num_tokens / num_steps, 4) if num_steps else None,
        "alpha": round(num_accepted / num_drafted, 4) if num_drafted else None,
        "identical": num_identical(mine, plain) if plain else None,
        "ttft_ms": round(1000 * median(answer["first_s"] for answer in answers), 3),
        "tpot_ms": round(1000 * median(gaps), 3) if gaps else None,
        "end_to_end_tokens_per_second": round(median(rates_of(mine, is_whole=True)), 2),
        "spread": round((max(rates) - min(rates)) / middle, 4) if len(rates) > 1 and middle else None,
        "repeats": len(rates),
        "acceptance_by_position": acceptance_by_position(answers),
    }


def rates_of(samples: Sequence[Sample], is_whole: bool = False) -> list[float]:
    """Tokens a second, for each repeat: of the whole, or from the first token of any request on."""
    tokens, seconds = Counter[int](), defaultdict[int, float](float)
    for _, repeat, _, wall_s, answers in samples:
        tokens[repeat] += sum(answer["num_tokens"] for answer in answers) - (not is_whole)
        first = min(answer["first_s"] for answer in answers)
        seconds[repeat] += wall_s if is_whole else max(answer["total_s"] for answer in answers) - first
    return [tokens[repeat] / seconds[repeat] if seconds[repeat] > 0 else 0.0 for repeat in sorted(tokens)]


def num_identical(mine: Sequence[Sample], plain: Sequence[Sample]) -> int | None:
    """Prompts whose every answer is the plain row's first one; None where answers have no words."""
    own, base = dict[str, list[Any]](), dict[str, list[Any]]()
    for said, samples in ((own, mine), (base, plain)):
        for sample in sorted(samples, key=lambda sample: sample.repeat):
            for task, answer in zip(sample.unit, sample.answers, strict=True):
                said.setdefault(task.id, []).append(answer.get("ids", answer.get("text")))
    if any(text is None for said in own.values() for text in said):
        return None
    return sum(all(text == base[prompt][0] for text in said) for prompt, said in own.items())


def acceptance_by_position(answers: Sequence[Answer]) -> list[float] | None:
    """By depth, the share of the tokens drafted there that were accepted; None where that is not counted."""
    counted = [answer for answer in answers if answer.get("drafted_at")]
    depth = max((len(answer["drafted_at"]) for answer in counted), default=0)

    def total(name: str, i: int) -> int:
        return sum(answer[name][i] for answer in counted if i < len(answer[name]))

    return [round(total("accepted_at", i) / total("drafted_at", i), 4) for i in range(depth)] or None


def by_task(rows: Records, title: str, name: str, form: str, *labels: str) -> Table:
    """One figure: a line for each row, by its labels, a column for all tasks and for each of them."""
    tasks = sorted(dict.fromkeys(row["task"] for row in rows), key=lambda task: task != OVERALL)
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        lines.setdefault(tuple(row[each] for each in labels), {})[row["task"]] = cell(row[name], form)
    made = [(*names, *(cells[task] for task in tasks)) for names, cells in lines.items()]
    return Table(title, labels, tasks, made)
