"""Hugging Face folders: the weights and settings are those transformers would use, and what is not supported
is refused by name.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from paceline.core.errors import ModelFileError
from paceline.loaders.checkpoint import Checkpoint, open_checkpoint
from paceline.loaders.fields import Fields
from paceline.loaders.hf_config import read_config
from paceline.loaders.quantized.formats import quantization_of
from paceline.loaders.safetensors import SafetensorsCheckpoint
from paceline.models.config import RopeConfig
from tests.make_models import (
    FAMILIES,
    FAMILY_SIZES,
    LLAMA3_ROPE,
    OTHER_FAMILIES,
    SIZES,
    part_of,
    tiny_hf,
    tiny_tokenizer,
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tiny_hf(tmp_path_factory.mktemp("llama") / "tiny-llama", "llama"))


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(llama, tmp_path / "model")


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def opened(folder: Path) -> SafetensorsCheckpoint:
    return SafetensorsCheckpoint(folder, folder.name)


def assert_weights_of_transformers(checkpoint: Checkpoint, folder: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    state = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for name, shape in checkpoint.config.weight_names().items():
        weight = part_of(state, name, checkpoint.config)
        expected = weight + 1 if family == "gemma3" and name.endswith("norm.weight") else weight
        assert torch.equal(checkpoint.tensor(name, slice(1, 7)), expected[1:7]), name
        found = checkpoint.tensor(name)
        assert (found.dtype, tuple(found.shape)) == (torch.float32, shape)
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("family", FAMILIES + OTHER_FAMILIES)
@pytest.mark.parametrize(
    ("dtype", "is_sharded"), [("float32", False), ("bfloat16", True), ("float16", False)]
)
def test_weights_are_those_of_transformers(family: str, dtype: str, is_sharded: bool, tmp_path: Path) -> None:
    folder = tiny_hf(tmp_path / "hf", family, dtype=dtype, is_sharded=is_sharded)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == is_sharded
    assert_weights_of_transformers(open_checkpoint(str(folder)), folder, family)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", ""])
def test_multimodal_prefixes_and_text_config(prefix: str, tmp_path: Path) -> None:
    folder = tiny_hf(tmp_path / "hf", "gemma3", tie_word_embeddings=False)
    plain = opened(folder)
    expected = {name: plain.tensor(name) for name in plain.config.weight_names()}
    head = "language_model.lm_head.weight" if prefix.startswith("language") else "lm_head.weight"
    weights = load_file(folder / "model.safetensors")
    renamed = {
        head if n == "lm_head.weight" else prefix + n.removeprefix("model."): w for n, w in weights.items()
    }
    save_file(renamed | {"vision_tower.patch.weight": torch.zeros(3)}, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": text, "eos_token_id": [2, 7]})
    )
    checkpoint = opened(folder)
    assert (checkpoint.config, checkpoint.eos_ids) == (plain.config, (2, 7))
    assert all(torch.equal(checkpoint.tensor(name), weight) for name, weight in expected.items())


@pytest.mark.parametrize("family", FAMILIES + OTHER_FAMILIES)
def test_settings_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    folder = tiny_hf(tmp_path / "hf", family)
    theirs, ours = AutoConfig.from_pretrained(folder), opened(folder).config
    assert ours.num_layers == theirs.num_hidden_layers
    assert (ours.num_heads, ours.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert ours.max_context == theirs.max_position_embeddings
    assert ours.rms_eps == theirs.rms_norm_eps
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    if family == "gemma3":
        assert [ours.is_local(i) for i in range(4)] == [
            kind == "sliding_attention" for kind in theirs.layer_types
        ]
        assert ours.rope_local is not None
        assert ours.rope_local.theta == theirs.rope_parameters["sliding_attention"]["rope_theta"]
        assert ours.scale == theirs.query_pre_attn_scalar**-0.5
    if family == "mistral":
        assert (ours.sliding_window, ours.local_layers) == (theirs.sliding_window, (True, True))


BASE = {k: v for k, v in SIZES.items() if not k.endswith("token_id")}
LINEAR = RopeConfig(theta=5e4, kind="linear", factor=4.0)
YARN = RopeConfig(theta=5e4, kind="yarn", factor=4.0, original_context=128)
LLAMA3 = RopeConfig(kind="llama3", factor=8.0, original_context=64)
ROPES: list[tuple[dict[str, Any], RopeConfig]] = [
    ({}, RopeConfig()),
    ({"rope_theta": 5e4, "rope_scaling": None}, RopeConfig(theta=5e4)),
    ({"rope_theta": 5e4, "rope_scaling": {"type": "linear", "factor": 4.0}}, LINEAR),
    ({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4}}, LINEAR),
    (
        {
            "rope_theta": 5e4,
            "rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 128},
        },
        YARN,
    ),
    (
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "rope_theta": 5e4,
            }
        },
        YARN,
    ),
    (
        {"rope_theta": 10_000.0, "rope_scaling": {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}},
        LLAMA3,
    ),
    ({"rope_parameters": LLAMA3_ROPE}, LLAMA3),
]


@pytest.mark.parametrize(("keys", "expected"), ROPES)
def test_both_spellings_of_rotary_settings(keys: dict[str, Any], expected: RopeConfig) -> None:
    from transformers import LlamaConfig

    assert read_config("config.json", {"model_type": "llama", **BASE, **keys}).rope == expected
    theirs = LlamaConfig(**BASE, **json.loads(json.dumps(keys))).rope_parameters
    assert theirs["rope_theta"] == expected.theta
    assert theirs["rope_type"] == {"none": "default"}.get(expected.kind, expected.kind)
    assert theirs.get("factor", 1.0) == expected.factor


def test_released_gemma3_config_leaves_most_keys_out() -> None:
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config = read_config("config.json", {"model_type": "gemma3", "text_config": text})
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262_208, 8, 4, 256)
    assert config.rope == RopeConfig(theta=1e6, kind="linear", factor=8.0)
    assert config.rope_local == RopeConfig(theta=1e4)
    assert [i for i in range(34) if not config.is_local(i)] == [5, 11, 17, 23, 29]
    assert config.tie_embeddings
    assert config.embed_scale == torch.tensor(2560**0.5).item()


def test_window_settings_of_qwen_and_mistral() -> None:
    qwen = {
        "model_type": "qwen2",
        **BASE,
        "num_hidden_layers": 4,
        "sliding_window": 32,
        "max_window_layers": 2,
    }
    assert read_config("c", qwen).local_layers == ()
    assert read_config("c", qwen | {"use_sliding_window": True}).local_layers == (False, False, True, True)
    mistral = {"model_type": "mistral", **BASE, "head_dim": None}
    assert read_config("c", mistral | {"sliding_window": None}).sliding_window is None
    assert read_config("c", mistral).sliding_window == 4096  # the family's default
    assert read_config("c", mistral | {"sliding_window": None}).head_dim == 16


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "mamba"}, "model type 'mamba'"),
    ({"model_type": None}, "missing key model_type"),
    ({"num_local_experts": 8}, "num_local_experts = 8"),
    ({"model_type": "mistral", "attention_bias": True}, "attention_bias = True"),
    ({"model_type": "qwen3", "mlp_bias": True}, "mlp_bias = True"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
    ({"hidden_act": "relu"}, "hidden_act = 'relu'"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
    ({"model_type": "phi3", "rope_parameters": {"partial_rotary_factor": 0.01}}, "rotary_factor = 0.01"),
    ({"model_type": "phi3", "rope_parameters": {"partial_rotary_factor": 1.5}}, "rotary_factor = 1.5"),
    (
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [0]}},
        "long_factor",
    ),
    ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1], "long_factor": [2]}}, "divisors"),
    ({"model_type": "smollm3", "no_rope_layers": [1, 2]}, "no_rope_layers = .1, 2"),
    ({"model_type": "smollm3", "no_rope_layers": [0]}, "no_rope_layers is given for some layers"),
    ({"model_type": "granite", "logits_scaling": 0}, "logits_scaling = 0"),
    ({"model_type": "mistral3", "text_config": {"model_type": "mistral4"}}, "model type 'mistral4'"),
    ({"hidden_size": "wide"}, "hidden_size = 'wide'"),
    ({"hidden_size": -64}, "hidden_size = -64"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan"),
    ({"num_hidden_layers": 10**9}, "1000000000 layers"),
    ({"num_key_value_heads": 3}, "4 heads are not a multiple of 3 KV heads"),
    ({"head_dim": 15}, "head size 15 is odd"),
    ({"model_type": "gemma3_text", "layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
    ({"model_type": "gemma3_text", "layer_types": ["sliding_attention"]}, "some layers only"),
    ({"rope_parameters": [1]}, "rope_parameters = .1. is not an object"),
]


@pytest.mark.parametrize(("keys", "message"), REFUSALS)
def test_what_is_not_supported_is_refused_by_name(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message) as caught:
        read_config("config.json", {"model_type": "llama", **BASE, **keys})
    assert str(caught.value).startswith("config.json")


def test_tokens_and_template(folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=[5, 0])
    checkpoint = open_checkpoint(str(folder))
    source = checkpoint.tokenizer_source()
    assert checkpoint.eos_ids == source.eos_ids == (5, 0, 2)  # generation config, then config and tokenizer
    assert checkpoint.bos_id == source.bos_id == 1
    assert source.json_path == folder / "tokenizer.json"
    assert source.chat_template == source.config["chat_template"]
    edit_json(
        folder / "tokenizer_config.json",
        chat_template=[{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}],
    )
    assert opened(folder).tokenizer_source().chat_template == "D"
    (folder / "chat_template.jinja").write_text("J")
    assert opened(folder).tokenizer_source().chat_template == "J"


def test_name_and_fingerprint(folder: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    assert (checkpoint.name, checkpoint.path) == ("model", folder)
    assert opened(shutil.copytree(folder, tmp_path / "copy")).fingerprint == checkpoint.fingerprint
    weights = load_file(folder / "model.safetensors")
    save_file({name: weight * 1.01 for name, weight in weights.items()}, folder / "model.safetensors")
    assert opened(folder).fingerprint != checkpoint.fingerprint


def test_rotary_buffers_are_ignored_and_other_extras_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(
        weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)},
        folder / "model.safetensors",
    )
    assert opened(folder).config.num_layers == 2
    save_file(
        weights | {"model.layers.0.self_attn.o_proj.bias": torch.ones(64)}, folder / "model.safetensors"
    )
    with pytest.raises(
        ModelFileError, match=r"model\.layers\.0\.self_attn\.o_proj\.bias is not part of a llama decoder"
    ):
        opened(folder)


def test_missing_misshapen_and_mistyped_tensors_are_named(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for change, message in [
        ({}, f"missing tensor {name}"),
        (
            {name: torch.zeros(128, 32)},
            rf"tensor {name} has shape \[128, 32\] where its config asks for \[128, 64\]",
        ),
        ({name: torch.zeros(128, 64, dtype=torch.int8)}, f"tensor {name} has type I8"),
    ]:
        save_file({n: w for n, w in weights.items() if n != name} | change, folder / "model.safetensors")
        with pytest.raises(ModelFileError, match=message):
            opened(folder)


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match=r"only pytorch_model.bin; only \.safetensors and \.gguf"):
        open_checkpoint(str(folder))
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ModelFileError, match="has no weights"):
        open_checkpoint(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(ModelFileError, match=r"no config\.json"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/hosts", "sub/model.safetensors", ".."])
def test_shards_outside_the_folder_are_refused(shard: str, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": shard}})
    )
    with pytest.raises(ModelFileError, match=r"plain file name|is missing"):
        opened(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = tiny_hf(tmp_path / "hf", "qwen2", is_sharded=True)
    first = min(folder.glob("*.safetensors"))
    first.unlink()
    with pytest.raises(ModelFileError, match=f"shard {first.name} is missing"):
        opened(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '{"model_type": "llama"', "\x00"])
def test_damaged_json_is_named(text: str, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelFileError, match=r"config\.json") as caught:
        opened(folder)
    assert "\n" not in str(caught.value)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 200_000), at=st.integers(0, 3_000), value=st.integers(0, 2**64 - 1))
def test_damaged_weights_raise_nothing_else(
    cut: int, at: int, value: int, llama: Path, tmp_path: Path
) -> None:
    target = shutil.copytree(llama, tmp_path / "model", dirs_exist_ok=True)
    data = bytearray((llama / "model.safetensors").read_bytes())
    data[at : at + 8] = value.to_bytes(8, "little")
    (target / "model.safetensors").write_bytes(data[: max(len(data) - cut, 0)])
    message = ""
    try:
        checkpoint = opened(target)
        for name in checkpoint.config.weight_names():
            checkpoint.tensor(name)
    except ModelFileError as error:
        message = str(error)
    assert "\n" not in message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda v: st.lists(v, max_size=3),
    max_leaves=3,
)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), family=st.sampled_from(sorted(FAMILY_SIZES)))
def test_any_value_under_any_key_is_a_config_or_an_error(data: st.DataObject, family: str) -> None:
    values: dict[str, Any] = {
        "model_type": {"llama3": "llama", "gemma3": "gemma3_text"}.get(family, family.split("_")[0]),
        **SIZES,
        **FAMILY_SIZES[family],
    }
    extra = [
        "no_rope_layers",
        "rope_parameters",
        "attention_bias",
        "residual_multiplier",
        "rope_theta",
        "rope_scaling",
        "layer_types",
        "use_sliding_window",
        "max_window_layers",
        "text_config",
        "quantization_config",
    ]
    for key in data.draw(st.lists(st.sampled_from([*values, *extra]), min_size=1, max_size=3)):
        values[key] = data.draw(JSON | st.fixed_dictionaries({"rope_type": JSON, "factor": JSON}))
    try:
        config = read_config("config.json", values)
        quantization_of(Fields("config.json", values))
    except ModelFileError:
        return
    assert len(config.weight_names()) >= 9 * config.num_layers + 2
