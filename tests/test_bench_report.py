"""The arithmetic of the benchmark: plans, medians, speedups, identity, with known inputs. Nothing is started
here.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.measure import rows as planning
from paceline.measure.compare import units_of
from paceline.measure.results import OVERALL
from paceline.measure.rows import (
    OURS,
    PLAIN,
    Row,
    Sample,
    Task,
    acceptance_by_position,
    num_identical,
    rates_of,
    report_rows,
)
from paceline.measure.tables import rewritten

SLOW, FAST, ALONE = (
    Row(OURS, "float32", PLAIN),
    Row(OURS, "float32", "ngram"),
    Row("vllm", "float32", "ngram"),
)
CODE, CHAT = Task("1", "code", (5, 6), 4), Task("2", "chat", (7,), 4)


def answer(ids: list[int], first_s: float = 0.1, total_s: float = 0.4, **counts: Any) -> dict[str, Any]:
    told = {"num_steps": len(ids), "num_drafted": 0, "num_accepted": 0, **counts}
    return {"ids": ids, "num_tokens": len(ids), "first_s": first_s, "total_s": total_s, **told}


def sample(row: Row, repeat: int, task: Task, wall_s: float, ids: list[int], **counts: Any) -> Sample:
    """A quarter of the time goes to the first of four tokens."""
    return Sample(row, repeat, (task,), wall_s, [answer(ids, wall_s / 4, wall_s, **counts)])


def all_samples() -> list[Sample]:
    """Plain needs 1, 2, 4 s for 4 tokens of code; with drafts half of it. Chat takes both 1 s; once, the
    drafted text differs.
    """
    samples = []
    for repeat, seconds in enumerate((1.0, 2.0, 4.0)):
        for row, factor in ((SLOW, 1.0), (FAST, 0.5)):
            counts = {"num_steps": 2, "num_drafted": 4, "num_accepted": 2} if row == FAST else {}
            samples.append(sample(row, repeat, CODE, seconds * factor, [1, 2, 3, 4], **counts))
            samples.append(sample(row, repeat, CHAT, 1.0, [9, 9, 9, 8 if row == FAST and repeat == 1 else 9]))
    return samples


def test_rates_are_tokens_over_seconds_of_each_repeat() -> None:
    mine = [s for s in all_samples() if s.row == SLOW]
    assert rates_of(mine, is_whole=True) == [8 / 2, 8 / 3, 8 / 5]
    assert rates_of(mine) == [6 / 1.5, 6 / 2.25, 6 / 3.75]


def test_reading_the_prompt_counts_end_to_end_alone() -> None:
    slow_start = Sample(SLOW, 0, (CODE,), 3.2, [answer([1, 2, 3, 4], 2.5, 3.1)])
    (record, _) = report_rows([SLOW], [slow_start], {SLOW: None})
    assert (record["tokens_per_second"], record["end_to_end_tokens_per_second"]) == (5.0, 1.25)


def test_answers_of_one_token_have_no_decoding_to_compare() -> None:
    (record, _) = report_rows([SLOW], [Sample(SLOW, 0, (CODE,), 0.2, [answer([1], 0.1, 0.1)])], {SLOW: None})
    assert (record["tokens_per_second"], record["speedup"], record["tpot_ms"]) == (0.0, None, None)


def test_report_has_medians_speedups_and_counts() -> None:
    records = report_rows([SLOW, FAST], all_samples(), {SLOW: 100.0, FAST: None})
    assert [(r["method"], r["task"]) for r in records] == [
        (m, t) for m in (PLAIN, "ngram") for t in ("code", "chat", OVERALL)
    ]
    by_name = {(r["method"], r["task"]): r for r in records}
    code = by_name["ngram", "code"]
    assert code["tokens_per_second"] == 4.0
    assert code["speedup"] == 2.0
    assert code["spread"] == pytest.approx((8 - 2) / 4)
    assert (code["tau"], code["alpha"]) == (2.0, 0.5)
    assert (code["identical"], code["prompts"], code["repeats"]) == (1, 1, 3)
    assert (code["ttft_ms"], code["tpot_ms"]) == (250.0, 250.0)
    assert by_name["ngram", "chat"]["identical"] == 0
    overall = by_name["ngram", OVERALL]
    assert (overall["prompts"], overall["identical"], overall["tokens_per_second"]) == (2, 1, 4.0)
    assert overall["speedup"] == pytest.approx(4.0 / (8 / 3), abs=1e-4)
    assert by_name[PLAIN, "code"]["alpha"] is None
    assert by_name[PLAIN, "code"]["speedup"] == 1.0
    assert (by_name[PLAIN, OVERALL]["peak_mb"], overall["peak_mb"]) == (100.0, None)


def test_without_a_plain_row_there_is_no_speedup() -> None:
    (record, _) = report_rows([ALONE], [sample(ALONE, 0, CODE, 2.0, [1, 2, 3, 4])], {ALONE: 1.0})
    assert (record["speedup"], record["identical"], record["spread"]) == (None, None, None)
    assert record["tokens_per_second"] == 2.0


def test_a_unit_of_several_requests_counts_its_wall_time_once() -> None:
    both = Sample(
        SLOW, 0, (CODE, CODE._replace(id="3")), 2.0, [answer([1] * 4, 0.3, 1.5), answer([2] * 4, 0.25, 2.0)]
    )
    (record, _) = report_rows([SLOW], [both], {SLOW: None})
    assert (record["end_to_end_tokens_per_second"], record["prompts"], record["identical"]) == (4.0, 2, 2)
    assert record["tokens_per_second"] == 7 / 1.75


def test_texts_are_compared_where_there_are_no_ids() -> None:
    def said(row: Row, text: str) -> Sample:
        return Sample(
            row, 0, (CODE,), 1.0, [{**{k: v for k, v in answer([1]).items() if k != "ids"}, "text": text}]
        )

    assert num_identical([said(FAST, "a")], [said(SLOW, "a")]) == 1
    assert num_identical([said(FAST, "b")], [said(SLOW, "a")]) == 0


def test_answers_without_words_are_not_called_the_same() -> None:
    silent = {name: value for name, value in answer([1]).items() if name != "ids"}
    assert num_identical([Sample(SLOW, 0, (CODE,), 1.0, [silent])], []) is None


def test_a_table_of_llamacpp_has_its_server_and_its_raw_loop(tmp_path: Path) -> None:
    server, raw = planning.peer_rows("llama.cpp:Q8_0", [PLAIN], 1)
    silent = {name: value for name, value in answer([1] * 4).items() if name != "ids"}
    samples = [sample(server, 0, CODE, 1.0, [1] * 4), Sample(raw, 0, (CODE,), 1.0, [silent])]
    origin = {"verb": "compare", "command": "paceline bench", "date": "2026-01-01"}
    machine = {"cpu": "a processor", "cores": 2, "gpu": None}
    report = {**origin, "machine": machine, "rows": report_rows([server, raw], samples, {}), "notes": {}}
    (tmp_path / "cpu.json").write_text(json.dumps(report))
    text = rewritten("<!-- table:cpu -->\n<!-- end -->", tmp_path)
    assert "| llama.cpp Q8_0 | plain | 4.0 |" in text
    assert "| llama.cpp Q8_0 raw | plain | 10.0 |" in text
    assert "`paceline bench` (a processor, 2 cores, 2026-01-01)" in text


def test_acceptance_by_position_adds_up_over_answers() -> None:
    answers = [
        answer([1], drafted_at=[4, 2], accepted_at=[2, 1]),
        answer([1], drafted_at=[6], accepted_at=[3]),
        answer([1]),
    ]
    assert acceptance_by_position(answers) == [0.5, 0.5]
    assert acceptance_by_position([answer([1])]) is None


def test_every_row_has_its_turn_and_none_is_always_the_first_or_after_the_same_one() -> None:
    rows = [SLOW, FAST, ALONE]
    orders = [planning.in_turn(rows, number) for number in range(6)]
    assert all(sorted(order) == sorted(rows) for order in orders)
    assert Counter(order[0] for order in orders) == dict.fromkeys(rows, 2)
    assert {order[i - 1] for order in orders for i in (1, 2) if order[i] == SLOW} == {FAST, ALONE}


def test_with_concurrency_the_prompts_of_a_task_are_one_unit() -> None:
    tasks = [CODE, CHAT, CODE._replace(id="3")]
    assert units_of(tasks, 1) == [(task,) for task in tasks]
    assert units_of(tasks, 4) == [(CODE, CODE._replace(id="3")), (CHAT,)]


def test_rows_of_methods_precisions_and_peers() -> None:
    methods = planning.methods_of("none, ngram", None)
    assert methods == [PLAIN, "ngram"]
    assert planning.dtypes_of("float32, int8") == ["float32", "int8"]
    assert planning.dtypes_of("none") == []
    assert planning.peer_rows("none", methods, 1) == []
    names = [str(row) for row in planning.peer_rows("llama.cpp:Q8_0,transformers", methods, 1)]
    assert names == [
        "llama.cpp Q8_0, plain",
        "llama.cpp Q8_0, ngram",
        "llama.cpp Q8_0 raw, plain",
        "transformers float32, plain",
        "transformers float32, ngram",
    ]
    assert {row.peer for row in planning.peer_rows("all", methods, 1)} == set(planning.VARIANTS)
    together = [str(row) for row in planning.peer_rows("llama.cpp:Q8_0", methods, 4)]
    assert together == ["llama.cpp Q8_0, plain", "llama.cpp Q8_0, ngram"]  # the raw loop has one request


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: planning.methods_of("ngrams", None), "did you mean 'ngram'"),
        (lambda: planning.methods_of("none,,ngram", None), "separated by commas"),
        (lambda: planning.methods_of("draft_model", None), "model"),
        (lambda: planning.dtypes_of("int9"), "--dtypes holds 'int9'"),
        (lambda: planning.peer_rows("lama.cpp", [PLAIN], 1), "did you mean 'llama.cpp'"),
        (lambda: planning.peer_rows("llama.cpp:Q5_9", [PLAIN], 1), "runs as Q8_0"),
        (lambda: planning.peer_rows("vllm", ["quantized"], 1), "the peers have none"),
        (lambda: planning.peer_rows("transformers", [PLAIN], 4), "one request at a time"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(call: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()
