"""What experts cost: a pass reads those that its rows wake, and plan, tune and explain say so."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline import LLM
from paceline.cli.main import app
from paceline.loaders.hf_config import read_config
from paceline.measure.roofline import HARDWARE, WIDTHS, Deployment
from paceline.measure.tune import woken_by_rows
from paceline.models.config import ExpertsConfig
from paceline.runtime.timing import measure
from tests.make_models import tiny_hf, tiny_tokenizer
from tests.test_decoder import TOKENS

# Qwen3-30B-A3B
VALUES: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151_936,
    "max_position_embeddings": 40_960, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
EXPERT = 48 * 3 * 768 * 2048  # weights of one in every layer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tiny_hf(tmp_path_factory.mktemp("model"), "olmoe"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), speculative_config=None, progress=False) as made:
        yield made


def invoke(*arguments: str) -> str:
    done = CliRunner().invoke(app, [*arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_described_model_has_its_experts() -> None:
    config = read_config("config.json", VALUES)
    assert config.experts == ExpertsConfig(128, 8, 768, "softmax", True)
    deployed = Deployment(config, HARDWARE["h200"], "bfloat16", "bfloat16")
    assert deployed.num_parameters == 30_532_122_624
    assert deployed.active_parameters == pytest.approx(3.35e9 - config.vocab_size * 2048, rel=0.01)


@pytest.mark.parametrize("rows", [1, 2, 5, 40])
def test_the_expected_number_is_that_of_a_simulation(rows: int) -> None:
    dice, experts = random.Random(rows), ExpertsConfig(16, 3, 8)
    woken = [len({e for _ in range(rows) for e in dice.sample(range(16), 3)}) for _ in range(4_000)]
    assert experts.expected_woken(rows) == pytest.approx(sum(woken) / len(woken), rel=0.02)


def test_a_pass_reads_the_experts_that_its_rows_wake() -> None:
    config = read_config("config.json", VALUES)
    deployed = Deployment(config, HARDWARE["h200"], "int8", "bfloat16", batch=2, context=0)
    one, two, three = (deployed.work(rows) for rows in (1, 2, 3))
    assert config.experts is not None
    woken = [config.experts.expected_woken(rows) for rows in (2, 4, 6)]
    assert deployed.woken(2) == woken[1]
    cached = 2 * 4 * 48 * 2 * 128 * 2  # of one more row of each request: KV heads, layers, keys and values
    assert two.num_bytes - one.num_bytes == pytest.approx(
        (woken[1] - woken[0]) * EXPERT * WIDTHS["int8"] + cached
    )
    assert three.num_bytes - two.num_bytes < two.num_bytes - one.num_bytes  # some are awake already
    assert two.half_flops == pytest.approx(2 * one.half_flops, rel=1e-3)  # a row multiplies with its own
    assert deployed.bytes_read < 0.2 * deployed.weight_bytes
    assert deployed.relative(2) > 1.5
    assert deployed.free_rows == 1


def test_experts_alone_are_read_in_mxfp4() -> None:
    """Whatever else there is has 16 bits."""
    config = read_config("config.json", VALUES)
    narrow, whole = (Deployment(config, HARDWARE["h200"], each, "bfloat16") for each in ("mxfp4", "bfloat16"))
    saved = EXPERT * (2 - 4.25 / 8)
    assert whole.weight_bytes - narrow.weight_bytes == pytest.approx(128 * saved)
    assert whole.bytes_read - narrow.bytes_read == pytest.approx(8 * saved)


def test_plan_shows_experts(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(VALUES))
    said = invoke("plan", str(path), "--hardware", "h200")
    assert "experts of 128" in said
    assert "wakes experts of its own" in said
    assert "30.5 G parameters (3" in said
    found = json.loads(invoke("plan", str(path), "--hardware", "h200", "--json"))
    assert [row["experts"] for row in found["passes"][:2]] == [8.0, 15.5]
    assert "experts" not in json.loads(invoke("plan", "llama-8b", "--hardware", "h200", "--json"))["model"]


def test_tune_counts_experts_of_texts(llm: LLM) -> None:
    found = woken_by_rows(llm.engine.executor, TOKENS)
    assert [*found] == [1, 2, 3, 4, 6, 8, 12, 16]
    assert found[1] == 3
    assert sorted(found.values()) == [*found.values()]
    assert found[2] > 3
    assert llm.engine.executor.kv.num_used == 0


def test_what_several_rows_cost_is_measured_however_short_the_time(llm: LLM, tiny: LLM) -> None:
    assert [*measure(llm.engine.executor, 0.0).seconds] == [1, 2, 4, 8]
    assert [*measure(tiny.engine.executor, 0.0).seconds] == [1, 2]


def test_explain_tells_how_many_experts_a_pass_woke(folder: Path, tiny_folder: Path) -> None:
    asked = ("explain", "a b a b a b", "--model", str(folder), "--raw", "--steps", "2")
    steps = json.loads(invoke(*asked, "--json"))["steps"]
    assert all(3 <= step["experts"] <= 8 for step in steps)
    assert "experts a layer" in invoke(*asked)
    dense = ("explain", "a b", "--model", str(tiny_folder), "--raw", "--steps", "1")
    assert json.loads(invoke(*dense, "--json"))["steps"][0]["experts"] is None
    assert "experts" not in invoke(*dense)
