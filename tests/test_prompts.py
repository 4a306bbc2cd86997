"""The shipped prompts are complete, and a user's file is read or refused with its line named."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from paceline import ConfigError
from paceline.measure.prompts import Prompt, chosen, load

CATEGORIES = ("chat", "code", "math", "translation", "summarization", "retrieval")


def test_shipped_prompts_cover_every_category() -> None:
    prompts = load()
    counts = Counter(prompt.category for prompt in prompts)
    assert set(counts) == set(CATEGORIES)
    assert min(counts.values()) >= 8
    assert len({prompt.text for prompt in prompts}) == len(prompts)


@pytest.mark.parametrize("category", ["summarization", "retrieval"])
def test_texts_to_copy_from_are_long_enough(category: str) -> None:
    for prompt in load():
        if prompt.category == category:
            assert 120 <= len(prompt.text.split()) <= 300, prompt.id


def test_first_of_each_keeps_order_and_limit() -> None:
    kept = chosen(None, 2)
    assert Counter(prompt.category for prompt in kept) == dict.fromkeys(CATEGORIES, 2)
    assert kept == [prompt for prompt in load() if prompt in kept]


def test_reads_the_three_user_formats(tmp_path: Path) -> None:
    spec_bench = tmp_path / "bench.jsonl"
    spec_bench.write_text(
        json.dumps({"question_id": 7, "category": "writing", "turns": ["a", "b"], "task": "x"}) + "\n\n"
    )
    assert load(spec_bench) == [Prompt("7", "writing", ("a", "b"))]
    bare = tmp_path / "mine.jsonl"
    bare.write_text('{"prompt": "one"}\n{"prompt": "two\\u2028lines"}\n', encoding="utf-8")
    assert load(bare) == [Prompt("1", "mine", ("one",)), Prompt("2", "mine", ("two\u2028lines",))]
    text = tmp_path / "lines.txt"
    text.write_text("first\n\n  second  \n")
    assert [prompt.turns for prompt in load(text)] == [("first",), ("second",)]


def test_a_compressed_file_is_read_however_long(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl.gz"
    lines = [json.dumps({"prompt": f"number {i}"}) for i in range(50_000)]
    path.write_bytes(gzip.compress("\n".join(lines).encode(), 1))
    prompts = load(path)  # comparing every pair of ids would take minutes
    assert len(prompts) == 50_000
    assert prompts[0] == Prompt("1", "mine", ("number 0",))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match="cannot be read"):
        load(path)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.jsonl", '{"prompt": "ok"}\nnot json\n', "a.jsonl:2"),
        ("a.jsonl", '{"prompt": "ok"}\n[1]\n', "a.jsonl:2"),
        ("a.jsonl", '{"turns": []}\n', "a.jsonl:1"),
        ("a.jsonl", '{"turns": ["ok", 3]}\n', "a.jsonl:1"),
        ("a.jsonl", '{"prompt": "  "}\n', "a.jsonl:1"),
        (
            "a.jsonl",
            '{"question_id": 1, "prompt": "a"}\n{"question_id": 1, "prompt": "b"}\n',
            "question_id 1",
        ),
        ("a.txt", "\n\n", "holds no prompt"),
        ("a.csv", "x\n", ".jsonl"),
    ],
)
def test_malformed_files_are_named(tmp_path: Path, name: str, content: str, named: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ConfigError, match=named):
        load(path)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "absent.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(ConfigError, match="UTF-8"):
        load(tmp_path / "latin.txt")
