"""`paceline bench kernels` and `paceline bench quality`: the arithmetic of floors, perplexity against torch,
and both verbs for real.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.core.types import Cached, Segment
from paceline.loaders.checkpoint import open_checkpoint
from paceline.measure.quality import BASELINE, SHIPPED, compared, contexts_of, negative_log_likelihood
from paceline.measure.roofline import Hardware, Work
from paceline.measure.rows import FOLDERS
from paceline.measure.step import figures
from paceline.runtime.backend import backend_for
from paceline.runtime.executor import LocalExecutor

LIMITS = Hardware("test", 10e9, 40e9, 40e9, 1e9, int8_flops=200e9, threads=2)
PRODUCTS = ("qkv", "out", "gate_up", "down", "head")
PEERS = Path(os.environ.get("PACELINE_PEERS") or Path(__file__).parent.parent / ".peers")


def bench(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["bench", *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_the_floor_is_the_longer_of_reading_and_multiplying() -> None:
    assert LIMITS.seconds(Work(num_bytes=10e6)) == pytest.approx(1e-3)
    assert LIMITS.seconds(Work(num_bytes=10e6, int8_flops=600e6)) == pytest.approx(3e-3)
    assert LIMITS.seconds(Work(10e6, int8_flops=600e6, float_flops=40e6)) == pytest.approx(4e-3)


def test_figures_of_known_times() -> None:
    found = figures([0.002, 0.004, 0.005], Work(num_bytes=20e6, int8_flops=200e6), LIMITS, first_ms=2.0)
    assert (found["ms"], found["ratio"], found["gb_s"], found["gmac_s"]) == (4.0, 2.0, 5.0, 25.0)
    assert (found["floor_ms"], found["of_floor"], found["spread"]) == (2.0, 0.5, 0.75)
    assert figures([0.001], Work(num_bytes=1e6), LIMITS, None)["spread"] is None


def test_a_difference_that_came_out_as_nothing_has_no_rates() -> None:
    found = figures([-0.001, -0.001], Work(num_bytes=1e6), LIMITS, None)
    assert (found["gb_s"], found["of_floor"], found["ratio"]) == (None, None, None)


@pytest.fixture(scope="module")
def report(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("kernels") / "k.json"
    options = f"--model {tiny_folder} --peers none --context 40 --repeats 2 --json {path}".split()
    status, out, err = bench("kernels", *options)
    assert status == 0, err
    assert "limits of" in out
    assert "attention" in out
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.slow
def test_every_number_of_tokens_is_timed(report: dict[str, Any]) -> None:
    assert min(report["limits"].values()) > 0
    for dtype in ("int8", "float32", "int4"):
        rows = [
            row
            for row in report["forward"]
            if (row["engine"], row["dtype"], row["context"]) == ("paceline", dtype, 40)
        ]
        assert [row["tokens"] for row in rows] == list(range(1, 33))
        assert min(row["ms"] for row in rows) > 0
        assert rows[0]["ratio"] == 1
        (prompt,) = [row for row in report["forward"] if row["dtype"] == dtype and row["context"] == 0]
        assert prompt["tokens"] == 512
        for name in PRODUCTS:
            rows = [row for row in report["kernels"] if (row["kernel"], row["dtype"]) == (name, dtype)]
            assert [row["tokens"] for row in rows] == list(range(1, 33))
            assert min(row["ms"] for row in rows) > 0
            assert (
                max(row["gb_s"] for row in rows) > 0
            )  # of a tiny product that was interrupted nothing is left after rounding
    assert [row["tokens"] for row in report["kernels"] if row["kernel"] == "attention"] == list(range(1, 33))


@pytest.mark.slow
def test_a_pass_must_do_at_least_what_its_products_do(report: dict[str, Any]) -> None:
    for dtype in ("int8", "float32", "int4"):
        for tokens in (1, 8, 32):
            parts = [
                r["floor_ms"]
                for r in report["kernels"]
                if (r["dtype"], r["tokens"]) == (dtype, tokens) and r["kernel"] in PRODUCTS
            ]
            (whole,) = [
                r for r in report["forward"] if (r["dtype"], r["tokens"], r["context"]) == (dtype, tokens, 40)
            ]
            rounding = 0.0005  # a tiny model's floors are as small as the digits they are given with
            assert whole["floor_ms"] + rounding >= max(parts)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("kernels", "--dtypes", "none"), "--dtypes holds 'none'; known: float32, int4, int8"),
        (("kernels", "--peers", "transformers"), "cannot be timed alone"),
        (("kernels", "--json", "no/such/folder/k.json"), "there is no folder"),
        (("quality", "--dtypes", "int9"), "--dtypes holds 'int9'"),
        (("quality", "--text", "missing.txt"), "missing.txt: cannot be read"),
        (("--limit", "2", "quality"), "--limit stands before quality"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in FOLDERS.values():  # so that a peer is refused for what it is, wherever the test runs
        (tmp_path / folder / "bin").mkdir(parents=True)
        (tmp_path / folder / "bin" / "python").touch()
        (tmp_path / folder / ".installed").touch()
    monkeypatch.setenv("PACELINE_PEERS", str(tmp_path))
    status, _, err = bench(*arguments)
    assert status == 2
    (line,) = err.splitlines()
    assert words in line


def test_a_context_the_model_does_not_have_is_refused(tiny_folder: Path) -> None:
    status, _, err = bench("kernels", "--model", str(tiny_folder), "--peers", "none", "--context", "500")
    assert status == 2
    assert "--context is 500; the model's own leaves room for 480" in err


def test_contexts_hold_every_token_once() -> None:
    assert contexts_of(range(7), None, 3) == [[0, 1, 2], [3, 4, 5]]  # a last token alone predicts nothing
    assert contexts_of(range(5), 9, 3) == [[9, 0, 1], [9, 2, 3], [9, 4]]


def test_negative_log_likelihood_is_torchs_cross_entropy_whatever_the_chunks(tiny_folder: Path) -> None:
    checkpoint = open_checkpoint(str(tiny_folder))
    tokens = [(5 * i) % 200 for i in range(300)]  # more than two chunks
    ours, oracle = (
        LocalExecutor.load(backend_for(torch.device("cpu"), kernels, False), checkpoint, 32, dtype="float32")
        for kernels in ("exact", "torch")
    )
    total = negative_log_likelihood(ours, tokens)
    assert ours.kv.num_used == 0
    cache = Cached()
    assert oracle.kv.reserve(cache, len(tokens))
    logits = oracle.forward([Segment(tokens, cache, None, len(tokens))]).logits
    expected = -sum(float(torch.log_softmax(logits[i], -1)[tokens[i + 1]]) for i in range(299))
    assert total == pytest.approx(expected, rel=1e-5)


def test_changes_are_against_float32() -> None:
    records = [{"dtype": "int8", "perplexity": 11.0}, {"dtype": BASELINE, "perplexity": 10.0}]
    assert [row["change"] for row in compared(records)] == [pytest.approx(0.1), 0.0]
    assert compared(records[:1])[0]["change"] is None


def test_the_shipped_text_is_long_enough() -> None:
    assert len(SHIPPED.read_text(encoding="utf-8").split()) > 2000


@pytest.mark.slow
def test_int8_is_within_one_percent_of_float32(tmp_path: Path) -> None:
    path = tmp_path / "q.json"
    status, out, err = bench("quality", "--dtypes", "float32,int8", "--json", str(path))
    assert status == 0, err
    assert "int8" in out
    rows = {row["dtype"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["float32"]["tokens"] == rows["int8"]["tokens"] > 3000
    assert math.isfinite(rows["float32"]["perplexity"])
    assert abs(rows["int8"]["change"]) < 0.01


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.serial
def test_llamacpp_is_timed_beside_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (PEERS / FOLDERS["llama.cpp"] / ".installed").exists():
        pytest.skip("not installed; `make peers` does it")
    monkeypatch.setenv("PACELINE_PEERS", str(PEERS.absolute()))
    path = tmp_path / "k.json"
    options = ("--dtypes", "int8", "--peers", "llama.cpp:Q8_0", "--repeats", "1", "--json", str(path))
    status, _, err = bench("kernels", *options)
    assert status == 0, err
    rows = [row for row in json.loads(path.read_text())["forward"] if row["engine"] == "llama.cpp"]
    assert {row["dtype"] for row in rows} == {"Q8_0"}
    assert [row["tokens"] for row in rows] == [*range(1, 33), 512]
    assert min(row["ms"] for row in rows) > 0
