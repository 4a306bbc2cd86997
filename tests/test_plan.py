"""`paceline plan`: the formulas against their definitions, the roofline against the real engine's sizes, the
command as a user meets it.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from paceline import LLM
from paceline.cli.main import app
from paceline.core.errors import ModelNotFound
from paceline.loaders.checkpoint import LLAMA_8B, SMOLLM2_135M, describe
from paceline.measure import roofline as costs
from paceline.measure.roofline import HARDWARE, THIS, Deployment, training
from paceline.models.config import ModelConfig
from tests.make_models import tiny_gguf, tiny_hf

CHANCES = st.floats(0, 1, allow_nan=False)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


def report(*arguments: str) -> dict[str, Any]:
    done = invoke(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


@given(CHANCES.filter(lambda a: a < 0.999), st.integers(0, 16))
def test_expected_tokens_is_the_geometric_sum(alpha: float, k: int) -> None:
    assert costs.expected_tokens(alpha, k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))
    assert costs.expected_tokens([alpha] * k, k) == pytest.approx(costs.expected_tokens(alpha, k))


def test_expected_tokens_is_what_a_simulation_gives() -> None:
    alphas, dice, trials = [0.9, 0.5, 0.7], random.Random(3), 40_000
    total = 0
    for _ in range(trials):
        total += 1 + next((i for i, alpha in enumerate(alphas) if dice.random() >= alpha), len(alphas))
    assert costs.expected_tokens(alphas, 3) == pytest.approx(total / trials, rel=0.02)


@given(CHANCES, st.floats(0, 2), st.floats(0, 1))
def test_the_best_k_is_no_worse_than_any_other(alpha: float, draft_cost: float, slope: float) -> None:
    def verify(n: int) -> float:
        return 1 + slope * (n - 1)

    best = costs.best_k(alpha, draft_cost, verify, 12)
    gains = [costs.speedup(alpha, k, draft_cost, verify(k + 1)) for k in range(13)]
    assert gains[best] == max(gains)
    assert gains[best] >= 1  # drafting nothing is always a choice


@given(st.integers(1, 12), st.floats(0, 0.5), st.floats(1, 4))
def test_from_the_break_even_alpha_on_drafting_pays(k: int, draft_cost: float, verify_cost: float) -> None:
    edge = costs.break_even_alpha(k, draft_cost, verify_cost)
    if edge is None:
        assert costs.speedup(1.0, k, draft_cost, verify_cost) < 1
        return
    assert costs.speedup(edge, k, draft_cost, verify_cost) >= 1
    if edge > 0.01:
        assert costs.speedup(edge - 0.01, k, draft_cost, verify_cost) < 1


def on(config: ModelConfig, hardware: str = "h200", **changes: Any) -> Deployment:
    return Deployment(config, HARDWARE[hardware], **{"dtype": "bfloat16", "kv_dtype": "bfloat16", **changes})


def test_the_sizes_are_those_of_the_real_engine(default_model: LLM) -> None:
    executor = default_model.engine.executor
    cpu = replace(HARDWARE["m2"], int8_flops=1e12)
    found = Deployment(executor.config, cpu, "int8", cpu.kv_dtype("int8"))
    assert found.weight_bytes == pytest.approx(executor.decoder.num_bytes, rel=0.01)
    keys, values = executor.memory.parts
    assert found.kv_bytes_per_token == (keys.nbytes + values.nbytes) // keys.shape[1]
    floats = Deployment(executor.config, cpu, "float32", "float32")
    # values are a byte each here
    assert floats.kv_bytes_per_token == 2 * 4 * values.nbytes // values.shape[1]


def test_a_pass_of_llama_8b_worked_out_by_hand() -> None:
    """16.06 GB of weights less the embedding, which is looked up, and 128 KiB of K/V a token; two operations
    a parameter.
    """
    found = on(LLAMA_8B, context=999)
    layer = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14_336
    multiplied = 32 * layer + 128_256 * 4096
    assert found.num_parameters == pytest.approx(8.03e9, rel=1e-3)
    work = found.work(1)
    assert work.num_bytes == 2 * multiplied + 1000 * 131_072
    assert work.flops == 2 * multiplied + 1000 * 32 * 4 * 32 * 128
    assert found.seconds(1) == pytest.approx(work.num_bytes / 4.8e12)


def test_tokens_are_free_until_arithmetic_takes_longer() -> None:
    found = on(LLAMA_8B)
    assert 100 < found.free_rows < found.hardware.ridge("bfloat16")
    assert found.is_memory_bound(found.free_rows)
    assert not found.is_memory_bound(found.free_rows + 1)
    assert found.relative(found.free_rows) < 1.02 < found.relative(2 * found.free_rows)
    crowded = on(LLAMA_8B, batch=512, context=0)  # with little to read beside the weights
    assert crowded.free_rows == 0
    assert crowded.relative(2) == pytest.approx(2, rel=0.01)


def test_a_sliding_window_bounds_what_is_read() -> None:
    window = ModelConfig(
        **{**_fields(SMOLLM2_135M), "sliding_window": 128, "local_layers": (True,) * 15 + (False,) * 15}
    )
    narrow, wide = on(window, context=4095).work(1), on(SMOLLM2_135M, context=4095).work(1)
    assert wide.num_bytes - narrow.num_bytes == 15 * (4096 - 128) * 2 * 3 * 64 * 2


def _fields(config: ModelConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__slots__}


def test_small_weights_are_read_sooner_and_multiplied_no_faster() -> None:
    half, small = on(LLAMA_8B), on(LLAMA_8B, dtype="int4")
    assert small.seconds(1) < 0.4 * half.seconds(1)
    assert small.free_rows < 0.4 * half.free_rows


def test_a_draft_costs_what_its_pass_costs() -> None:
    options = ("llama-8b", "--hardware", "h200", "--alpha", "0.5", "--alpha", "0.9", "-k", "4")
    free, drafted = report(*options), report(*options, "--draft", "smollm2-135m")
    assert drafted["draft_cost"] == pytest.approx(on(SMOLLM2_135M).seconds(1) / on(LLAMA_8B).seconds(1))
    assert free["draft_cost"] == 0
    gains = [found["speedups"][1]["by_k"]["4"]["speedup"] for found in (drafted, free)]
    assert gains[0] < gains[1]
    assert drafted["speedups"][1]["best_k"] > drafted["speedups"][0]["best_k"]


def test_training_spends_the_whole_budget_at_twenty_tokens_a_parameter() -> None:
    found = training(1e18, on(LLAMA_8B))
    parameters, tokens = found["parameters"] or 0.0, found["tokens"] or 0.0
    assert 6 * parameters * tokens == pytest.approx(1e18)
    assert tokens == pytest.approx(20 * parameters)
    assert found["hours"] == pytest.approx(1e18 / (0.4 * 989e12) / 3600)


def test_no_weights_are_read(tmp_path: Path, tiny_folder: Path) -> None:
    """A config.json alone is enough, and a GGUF file whose weights are garbage."""
    whole = describe(str(tiny_folder))
    (tmp_path / "config.json").write_bytes((tiny_folder / "config.json").read_bytes())
    assert describe(str(tmp_path)).config == whole.config
    assert describe(str(tmp_path / "config.json")).config == whole.config
    gguf = tiny_gguf(tmp_path / "tiny.gguf", tiny_folder)
    gguf.write_bytes(gguf.read_bytes()[:-5000])
    assert describe(str(gguf)).config.hidden_size == whole.config.hidden_size
    scaled = tiny_hf(
        tmp_path / "scaled", "llama",
        rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    )  # fmt: skip
    assert (
        describe(str(tiny_gguf(tmp_path / "scaled.gguf", scaled))).config.num_layers
        == whole.config.num_layers
    )


def test_the_default_model_and_shapes_have_names() -> None:
    assert describe("default").config.hidden_size == describe("smollm2-135m").config.hidden_size == 576
    with pytest.raises(ModelNotFound, match="llama-8b"):
        describe("llama-9b")


def test_a_plan_says_it_all(tmp_path: Path) -> None:
    picture = tmp_path / "speedup.png"
    found = report(
        "llama-8b",
        "--hardware",
        "h200",
        "--draft",
        "smollm2-135m",
        "--budget",
        "1e18",
        "--plot",
        str(picture),
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert found["model"]["kv_bytes_per_token"] == 131_072
    assert found["hardware"]["ridge"] == pytest.approx(206, abs=0.1)
    assert [row["bound"] for row in found["passes"]] == ["memory"] * 8 + ["arithmetic"]
    assert found["free_tokens"] == on(LLAMA_8B).free_rows - 1
    row = next(row for row in found["speedups"] if row["alpha"] == 0.8)
    assert row["by_k"]["4"]["tokens"] == pytest.approx(3.3616)
    assert row["best_speedup"] >= max(cell["speedup"] for cell in row["by_k"].values())
    held = found["memory"]
    assert (
        held["total"] == held["target_weights"] + held["target_kv"] + held["draft_weights"] + held["draft_kv"]
    )
    assert held["fits"] is True
    assert math.isclose(found["training"]["parameters"], math.sqrt(1e18 / 120))


def test_the_table_has_the_rows_and_columns_asked_for() -> None:
    done = invoke(
        "smollm2-135m",
        "--hardware",
        "l4",
        "--alpha",
        "0.7",
        "--alpha",
        "0.3",
        "-k",
        "2",
        "-k",
        "5",
        "--batch",
        "4",
    )
    assert done.exit_code == 0, done.output
    for word in ("K=2", "K=5", "0.7", "0.3", "pays from", "checked for free", "smollm2-135m", "l4"):
        assert word in done.stdout
    assert "K=4" not in done.stdout


def test_what_does_not_fit_is_said() -> None:
    found = report("llama-8b", "--bandwidth", "100", "--flops", "1", "--memory", "10")
    assert found["memory"]["fits"] is False
    assert found["memory"]["most_sequences"] == 0
    assert found["hardware"]["name"] == "given"
    assert "does not fit" in invoke("llama-8b", "--hardware", "l4", "--memory", "10").stdout


@pytest.mark.serial
def test_this_machine_is_measured() -> None:
    found = report("--hardware", THIS)
    assert found["model"]["dtype"] == "int8"
    assert found["model"]["kv_dtype"] == "int8"  # as every quantized model on a CPU has it
    assert "(int8)" in invoke("--hardware", THIS).stdout
    assert 1e9 < found["hardware"]["bandwidth"] < 1e13
    assert 1e9 < found["hardware"]["flops"] < 1e15


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--hardware", "h20"], "h200"),
        (["--hardware", "l4", "--dtype", "int9"], "int9"),
        (["--hardware", "l4", "--kv-dtype", "int8"], "--kv-dtype is 'int8'"),
        (["--bandwidth", "100"], "--flops, --memory left out"),
        (["--bandwidth", "-1", "--flops", "1", "--memory", "1"], "--bandwidth is -1"),
        (["--hardware", "l4", "--flops", "nan"], "--flops is nan"),
        (["--hardware", "l4", "--alpha", "1.5"], "--alpha is 1.5"),
        (["--hardware", "l4", "--alpha", "nan"], "--alpha is nan"),
        (["--hardware", "l4", "-k", "0"], "-k is 0"),
        (["--hardware", "l4", "--budget", "-3"], "--budget is -3"),
        (["--hardware", "l4", "--batch", "0"], "--batch"),
        (["--hardware", "l4", "--context", "999999"], "--context is 999999"),
        (["--hardware", "l4", "--draft", "no-such-shape"], "no-such-shape"),
        (["--hardware", "l4", "--plot", "absent/p.png"], "absent"),
        (["nowhere.gguf", "--hardware", "l4"], "nowhere.gguf"),
        (["x" * 400, "--hardware", "l4"], "xxx"),
        (["", "--hardware", "l4"], "no model ''"),
    ],
)
def test_what_a_user_can_mend_is_one_line(arguments: list[str], named: str) -> None:
    done = invoke(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert named in done.stderr


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": -1}')
    done = invoke(str(tmp_path), "--hardware", "l4")
    assert done.exit_code == 2
    assert "config.json" in done.stderr


def test_help_teaches_by_example() -> None:
    done = invoke("--help")
    assert done.exit_code == 0
    assert "paceline plan llama-8b" in done.stdout
