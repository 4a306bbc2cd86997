"""`paceline bench decode`, `batch`, `step` and `soak` for real on a small model, and documents' tables made
from their results.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.core.errors import ConfigError
from paceline.measure.results import Table
from paceline.measure.tables import markdown, rewritten
from tests.make_models import tiny_hf, tiny_tokenizer

PROMPTS = [
    {"question_id": 1, "category": "copy", "turns": ["the line the line the line the line"]},
    {"question_id": 2, "category": "code", "turns": ["def ride(line): return def ride(line): return"]},
]
ORIGIN = {"verb", "command", "date", "machine", "versions"}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, PROMPTS)))
    return str(path)


def report_of(verb: str, tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    path = tmp_path / f"{verb}.json"
    done = CliRunner().invoke(app, ["bench", verb, *arguments, "--json", str(path)])
    assert done.exit_code == 0, done.stderr
    report: dict[str, Any] = json.loads(path.read_text())
    assert set(report) > ORIGIN
    assert report["verb"] == verb
    assert report["machine"]["cores"] >= 1
    return report, done.stdout


def test_decode_compares_every_text_with_plain_decoding(
    tiny_folder: Path, prompts: str, tmp_path: Path
) -> None:
    options = f"--model {tiny_folder} --dtype float32 --prompts {prompts} --max-new-tokens 16".split()
    report, out = report_of("decode", tmp_path, *options, "--rows", "auto,ngram/2")
    assert "speedup over plain decoding, 2 prompts" in out
    assert report["is_ok"]
    names = {(row["method"], row["task"]) for row in report["rows"]}
    assert names == {(r, t) for r in ("plain", "auto", "ngram/2") for t in ("copy", "code", "overall")}
    for row in report["rows"]:
        assert row["different"] == 0
        assert row["tau"] >= 1
        assert row["method"] != "plain" or row["speedup"] == 1
    document = tmp_path / "README.md"
    second = "<!-- table:decode 2 -->\n<!-- end -->\n"
    document.write_text(f"before\n<!-- table:decode -->\nold\n<!-- end -->\n{second}")
    tables = ["bench", "tables", "--results", str(tmp_path), "--files", str(document)]
    done = CliRunner().invoke(app, tables)
    assert (done.exit_code, done.stderr.split()) == (0, ["wrote", str(document)])
    text = document.read_text()
    assert text.startswith("before\n<!-- table:decode -->\n\n| row | overall |")
    assert "| plain | 1.00 |" in text
    assert "old" not in text
    assert f"({report['machine']['cpu']}, {report['machine']['cores']} cores, {report['date']})" in text
    assert CliRunner().invoke(app, tables).stderr == ""  # nothing has changed
    assert document.read_text() == text


def test_batch_counts_waves_in_which_all_decode(tiny_folder: Path, prompts: str, tmp_path: Path) -> None:
    options = ("--model", str(tiny_folder), "--dtype", "float32", "--prompts", prompts, "--waves", "1")
    rows = ("--concurrency", "2,4", "--rows", "suffix/2,synthetic/3", "--acceptance", "0.9,0.5")
    rows = (*rows, "--max-new-tokens", "8", "--plot", str(tmp_path))
    # The tiny model's context is what the waves would need, so the limit is the model's own.
    report, out = report_of("batch", tmp_path, *options, *rows)
    assert "requests at once" in out
    assert [level["concurrency"] for level in report["levels"]] == [2, 4]
    for level in report["levels"]:
        assert level["different"] == 0
        assert level["ratio"]["plain"] == 1
        assert min(level["ratio"]["suffix/2"], level["ratio"]["synthetic/3"]) > 0
    assert (tmp_path / "concurrency_cpu.png").read_bytes().startswith(b"\x89PNG")


def cold_options(folder: Path, prompts: str) -> tuple[str, ...]:
    chosen = ("--model", str(folder), "--dtype", "float32", "--prompts", prompts, "--waves", "2", "--cold")
    return (*chosen, "--concurrency", "2,12", "--max-new-tokens", "8")


def test_a_cold_batch_counts_everything(tiny_folder: Path, prompts: str, tmp_path: Path) -> None:
    rows = ("--rows", "auto-free,suffix/2")
    report, out = report_of("batch", tmp_path, *cold_options(tiny_folder, prompts), *rows)
    assert "nothing left out" in out
    names = ("plain", "auto-free", "suffix/2")
    assert [(row["requests"], row["row"]) for row in report["cold"]] == [
        (n, r) for n in (2, 12) for r in names
    ]
    for row in report["cold"]:
        assert (row["different"], row["recordings"]) == (0, 0)
        assert row["worst_s"] >= row["median_s"] > 0
        assert min(row["load_s"], row["ratio"], row["steady_tokens_per_s"]) > 0
        assert row["row"] != "plain" or row["ratio"] == 1
    text = rewritten("<!-- table:batch -->\n<!-- end -->", tmp_path)
    assert "| requests | row | load | tok/s | ratio | steady |" in text


FAKE_VLLM = """
from types import SimpleNamespace as SamplingParams

class LLM:
    def __init__(self, model, **options):
        assert options["dtype"] == "float32" and options["max_num_seqs"] == 12

    def generate(self, prompts, params, use_tqdm):
        text = SamplingParams(token_ids=[0] * params.max_tokens)
        return [SamplingParams(outputs=[text]) for _ in prompts]
"""


def test_a_peer_meets_the_same_cold_waves(
    tiny_folder: Path, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    monkeypatch.setenv("PACELINE_PEERS", str(tmp_path / "none"))
    options = (*cold_options(tiny_folder, prompts), "--rows", "plain", "--peers", "vllm")
    done = CliRunner().invoke(app, ["bench", "batch", *options])
    assert done.exit_code == 2
    assert "the peer vllm is not installed" in done.stderr
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    report, out = report_of("batch", tmp_path, *options)
    theirs = [row for row in report["cold"] if row["row"] == "vllm"]
    assert [row["requests"] for row in theirs] == [2, 12]
    assert all((row["different"], row["recordings"]) == (0, None) and row["ratio"] > 0 for row in theirs)
    assert "vllm eagle is left out: no eagle head is shipped" in out


def test_step_is_beside_its_floor(tiny_folder: Path, tmp_path: Path) -> None:
    options = f"--model {tiny_folder} --dtypes float32,int8 --rows 1,4 --contexts 32,64".split()
    more = ("--repeats", "2", "--requests", "2", "--plot", str(tmp_path))
    report, out = report_of("step", tmp_path, *options, *more)
    assert "floor" in out
    shapes = [(row["dtype"], row["context"], row["rows"]) for row in report["rows"]]
    assert sorted(shapes) == sorted((d, c, n) for d in ("float32", "int8") for c in (32, 64) for n in (1, 4))
    assert all(row["ms"] > 0 and row["queued_ms"] > 0 and row["floor_ms"] > 0 for row in report["rows"])
    assert all(row["ratio"] == 1 for row in report["rows"] if row["rows"] == 1)
    assert (tmp_path / "verify_cost.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_server_stands_load(tmp_path: Path) -> None:
    """Clients that leave, killed engines and signals: tests/server/test_faults.py."""
    tiny_hf(tmp_path, "llama", max_position_embeddings=4096)
    tiny_tokenizer(tmp_path)
    limits = ("--clients", "3", "--seconds", "3", "--may-lag")
    report, out = report_of("soak", tmp_path, "load", "--model", str(tmp_path), *limits)
    assert "passed" in out
    assert report["is_ok"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("decode", "--rows", "ngrm"), "did you mean 'ngram'"),
        (("decode", "--rows", "plain/3"), "write a drafter and its length"),
        (("decode", "--rows", "suffix/x"), "write a drafter and its length"),
        (("batch", "--concurrency", "1,x"), "--concurrency is '1,x'"),
        (("batch", "--peers", "vllm"), "measured with --cold"),
        (("batch", "--acceptance", "1.2"), "--acceptance is '1.2'"),
        (("batch", "--cold", "--rows", "synthetic/3"), "--rows holds 'synthetic/3'"),
        (("batch", "--cold", "--peers", "vlm"), "did you mean 'vllm'"),
        (("step", "--rows", "0"), "--rows is '0'"),
        (("soak", "lod"), "did you mean 'load'"),
        (("serve", "--peers", "Q9"), "llama.cpp"),
        (("tables", "--files", "absent.md"), "there is no such file"),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], words: str) -> None:
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert words in line


def test_a_table_is_markdown() -> None:
    table = Table("title", ("row",), ("a", "b"), [("x", "1", "2"), ("y", "-", "3")])
    assert markdown(table) == "| row | a | b |\n| --- | ---: | ---: |\n| x | 1 | 2 |\n| y | - | 3 |\n"


def test_a_document_that_names_no_result_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.json: is no result"):
        rewritten("<!-- table:absent -->\n<!-- end -->", tmp_path)
    assert rewritten("no table here", tmp_path) == "no table here"
