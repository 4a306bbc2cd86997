"""From samples to the report: pure arithmetic, no process and no clock.

A rate is taken for each repeat over all its requests, and the median of the repeats is reported with their
spread, (largest - smallest) / median. Tokens a second are those of decoding, from the first token on: reading
the prompt is what the time to the first token tells, and `end_to_end_tokens_per_second` counts both. Speedup
and identity are against the plain row of the same engine in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from paceline.measure.results import OVERALL
from paceline.measure.rows import PLAIN, Row, Unit

NO_NAMES: Mapping[Row, str] = {}
# ids or text, num_tokens, first_s, total_s, num_steps, num_drafted, num_accepted; drafted_at, accepted_at
Answer = dict[str, Any]


class Sample(NamedTuple):
    """One unit, run once by one row."""

    row: Row
    repeat: int
    unit: Unit
    wall_s: float
    answers: Sequence[Answer]


def report_rows(
    rows: Sequence[Row],
    samples: Sequence[Sample],
    peaks: Mapping[Row, float | None],
    names: Mapping[Row, str] = NO_NAMES,
) -> list[dict[str, Any]]:
    """One record for each row and category, and one for each row over all. `peaks`: megabytes of memory;
    `names`: better ones for engines."""
    categories = list(dict.fromkeys(sample.unit[0].category for sample in samples))
    records = []
    for row in rows:
        mine = [sample for sample in samples if sample.row == row]
        plain = [sample for sample in samples if sample.row == row._replace(method=PLAIN)]
        for category in [*categories, OVERALL]:
            found = _record(_of(mine, category), _of(plain, category))
            labels = {"engine": names.get(row, row.engine), "method": row.method, "task": category}
            records.append({**labels, **found, "peak_mb": peaks.get(row)})
    return records


def _of(samples: Sequence[Sample], category: str) -> list[Sample]:
    return [sample for sample in samples if category in (OVERALL, sample.unit[0].category)]


def _record(mine: Sequence[Sample], plain: Sequence[Sample]) -> dict[str, Any]:
    rates, answers = rates_of(mine, decoding), [answer for sample in mine for answer in sample.answers]
    base = median(rates_of(plain, decoding)) if plain else None
    names = ("num_tokens", "num_steps", "num_drafted", "num_accepted")
    num_tokens, num_steps, num_drafted, num_accepted = (sum(a[name] for a in answers) for name in names)
    middle = median(rates)
    longer = [answer for answer in answers if answer["num_tokens"] > 1]
    return {
        "prompts": len({task.id for sample in mine for task in sample.unit}),
        "tokens_per_second": round(middle, 2),
        "speedup": round(middle / base, 4) if base else None,
        "tau": round(num_tokens / num_steps, 4) if num_steps else None,
        "alpha": round(num_accepted / num_drafted, 4) if num_drafted else None,
        "identical": num_identical(mine, plain) if plain else None,
        "ttft_ms": _median_ms(answers, lambda answer: answer["first_s"]),
        "tpot_ms": _median_ms(longer, lambda a: (a["total_s"] - a["first_s"]) / (a["num_tokens"] - 1)),
        "end_to_end_tokens_per_second": round(median(rates_of(mine, end_to_end)), 2),
        "spread": round((max(rates) - min(rates)) / middle, 4) if len(rates) > 1 and middle else None,
        "repeats": len(rates),
        "acceptance_by_position": acceptance_by_position(answers),
    }


def decoding(sample: Sample) -> tuple[int, float]:
    """Tokens after the first one, and the seconds they took; of requests in flight together, after the first
    of any."""
    num_tokens = sum(answer["num_tokens"] for answer in sample.answers)
    first = min(answer["first_s"] for answer in sample.answers)
    return num_tokens - 1, max(answer["total_s"] for answer in sample.answers) - first


def end_to_end(sample: Sample) -> tuple[int, float]:
    return sum(answer["num_tokens"] for answer in sample.answers), sample.wall_s


def rates_of(samples: Sequence[Sample], counted: Callable[[Sample], tuple[int, float]]) -> list[float]:
    """Tokens a second, for each repeat."""
    rates = []
    for repeat in sorted({sample.repeat for sample in samples}):
        counts = [counted(sample) for sample in samples if sample.repeat == repeat]
        tokens, seconds = (sum(column) for column in zip(*counts, strict=True))
        rates.append(tokens / seconds if seconds > 0 else 0.0)
    return rates


def num_identical(mine: Sequence[Sample], plain: Sequence[Sample]) -> int | None:
    """Prompts whose every answer is the plain row's first one; None where answers have no words."""
    if any(text is None for said in _said(mine).values() for text in said):
        return None
    first = {key: said[0] for key, said in _said(plain).items()}
    return sum(all(text == first[prompt] for text in said) for prompt, said in _said(mine).items())


def _said(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Prompt -> what was answered, in the order of the repeats."""
    said: dict[str, list[Any]] = {}
    for sample in sorted(samples, key=lambda sample: sample.repeat):
        for task, answer in zip(sample.unit, sample.answers, strict=True):
            said.setdefault(task.id, []).append(answer.get("ids", answer.get("text")))
    return said


def acceptance_by_position(answers: Sequence[Answer]) -> list[float] | None:
    """By depth, the share of the tokens drafted there that were accepted; None where the engine does not
    count by depth."""
    counted = [answer for answer in answers if answer.get("drafted_at")]
    depth = max((len(answer["drafted_at"]) for answer in counted), default=0)

    def total(name: str, i: int) -> int:
        return sum(answer[name][i] for answer in counted if i < len(answer[name]))

    return [round(total("accepted_at", i) / total("drafted_at", i), 4) for i in range(depth)] or None


def _median_ms(answers: Sequence[Answer], seconds: Callable[[Answer], float]) -> float | None:
    return round(1000 * median(map(seconds, answers)), 3) if answers else None
