"""GGUF: the weights are those of the model that was written, and no damage to a file is more than a
ModelFileError.
"""

from __future__ import annotations

import math
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.core.errors import ModelFileError
from paceline.loaders import hub
from paceline.loaders.checkpoint import open_checkpoint
from paceline.loaders.gguf import GgufCheckpoint
from paceline.loaders.gguf_header import GgufHeader, read_config, read_header
from paceline.models.config import ModelConfig, RopeConfig
from tests.make_models import GGUF_FAMILIES, folder_weights, part_of, tiny_gguf, tiny_hf, tiny_tokenizer

KINDS = gguf.GGMLQuantizationType
TOLERANCE = {
    "F16": 1e-3,
    "BF16": 1e-2,
    "Q8_0": 1e-2,
    "Q5_0": 0.08,
    "Q4_1": 0.12,
    "Q4_0": 0.15,
}  # of the weights' own size
RANDOM_BLOCKS = [
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "IQ2_XXS",
    "IQ3_S",
    "TQ1_0",
    "Q5_1",
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tiny_hf(tmp_path_factory.mktemp("llama") / "llama", "llama"))


@pytest.fixture(scope="module")
def llama_gguf(llama: Path) -> Path:
    return tiny_gguf(llama.parent / "llama.gguf", llama)


def open_file(path: Path) -> GgufCheckpoint:
    return GgufCheckpoint(path, path.stem)


def read_all(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_file(path)
    return {name: checkpoint.tensor(name) for name in checkpoint.config.weight_names()}


def patched(source: Path, target: Path, old: bytes, new: bytes) -> Path:
    """A copy with one run of bytes replaced by another of the same length."""
    data = source.read_bytes()
    assert len(old) == len(new)
    assert old in data
    target.write_bytes(data.replace(old, new, 1))
    return target


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_f32_weights_and_config_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_hf(tmp_path / "hf", family)
    checkpoint = open_checkpoint(str(tiny_gguf(tmp_path / "m.gguf", folder)))
    state = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for name in checkpoint.config.weight_names():
        weight = part_of(state, name, checkpoint.config)
        expected = weight + 1 if family == "gemma3" and name.endswith("norm.weight") else weight
        assert torch.equal(checkpoint.tensor(name), expected), name
        assert torch.equal(checkpoint.tensor(name, slice(1, 7)), expected[1:7]), name
    other = open_checkpoint(str(folder)).config
    if family == "llama3":  # a GGUF file stores what the scaling does, not what it is called
        assert checkpoint.config.rope.divisors is not None
        assert len(checkpoint.config.rope.divisors) == other.head_dim // 2
        assert min(checkpoint.config.rope.divisors) == 1.0
        assert max(checkpoint.config.rope.divisors) == other.rope.factor
    elif family == "phi3_long":  # and its divisors as float32
        theirs, ours = other.rope, checkpoint.config.rope
        assert (ours.kind, ours.factor, ours.original_context) == ("longrope", 16.0, 32)
        assert ours.divisors == pytest.approx(theirs.divisors)
        assert ours.long_divisors == pytest.approx(theirs.long_divisors)
        assert ours.attention_factor == pytest.approx(theirs.attention_factor)
    else:
        assert checkpoint.config == other


@pytest.mark.parametrize("quant", TOLERANCE)
def test_quantized_weights_are_what_gguf_says(quant: str, llama: Path, tmp_path: Path) -> None:
    weights = read_all(tiny_gguf(tmp_path / "q.gguf", llama, quant))
    for name, original in folder_weights(llama).items():
        kind = KINDS[quant] if original.ndim > 1 else KINDS.F32
        expected = gguf.quants.dequantize(
            gguf.quants.quantize(original, kind), kind
        )  # rows are quantized alone: permuting them commutes
        found = weights[name.removeprefix("model.")].numpy()
        np.testing.assert_array_equal(found, expected, err_msg=name)
        assert np.abs(found - original).mean() <= TOLERANCE[quant] * np.abs(original).mean(), name


@pytest.mark.parametrize("quant", RANDOM_BLOCKS)
def test_random_blocks_of_every_kind_agree_with_gguf(quant: str, tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 32,
    }
    path = tiny_gguf(tmp_path / "k.gguf", tiny_hf(tmp_path / "hf", "llama", **sizes), quant)
    weights, reader = read_all(path), gguf.GGUFReader(path)
    with np.errstate(all="ignore"):
        stored = {t.name: gguf.quants.dequantize(np.array(t.data), t.tensor_type) for t in reader.tensors}
    np.testing.assert_array_equal(weights["layers.0.mlp.down_proj.weight"], stored["blk.0.ffn_down.weight"])
    order = [head * 128 + half + 2 * i for head in range(2) for half in (0, 1) for i in range(64)]
    np.testing.assert_array_equal(
        weights["layers.0.self_attn.q_proj.weight"], stored["blk.0.attn_q.weight"][order]
    )
    assert reader.tensors[0].tensor_type == KINDS[quant]


def test_default_model_opens_fast_and_is_what_it_says() -> None:
    path = hub.resolve("default", progress=False)
    start = time.process_time()  # not the clock's: others may use the machine
    checkpoint = open_checkpoint("default", progress=False)
    assert time.process_time() - start < 2.0
    assert (checkpoint.name, checkpoint.path) == (hub.DEFAULT_MODEL, path)
    assert checkpoint.config == ModelConfig(
        family="llama",
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1_536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_context=8_192,
        rms_eps=1e-5,
        rope=RopeConfig(theta=100_000.0),
        tie_embeddings=True,
    )
    assert (checkpoint.bos_id, checkpoint.eos_ids) == (1, (2,))
    source = checkpoint.tokenizer_source()
    assert source.gguf_metadata is not None
    assert source.gguf_metadata["tokenizer.ggml.tokens"][:3] == [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
    ]
    assert len(source.gguf_metadata["tokenizer.ggml.merges"]) == 48_900
    assert source.chat_template is not None
    assert "<|im_start|>" in source.chat_template
    assert checkpoint.tensor("embed_tokens.weight").std().item() == pytest.approx(0.1, abs=0.05)


def config_of(arch: str, **keys: Any) -> ModelConfig:
    sizes = {
        "embedding_length": 64,
        "block_count": 8,
        "feed_forward_length": 128,
        "context_length": 512,
        "attention.head_count": 4,
    }
    metadata = {
        f"{arch}.{key}": value
        for key, value in (sizes | {"attention.layer_norm_rms_epsilon": 1e-6, "vocab_size": 9} | keys).items()
    }
    header = GgufHeader({"general.architecture": arch, **metadata}, {}, 0, 0)
    return read_config(Path("m.gguf"), header)


def test_rotary_scaling_and_windows_of_the_metadata() -> None:
    scaled = {"rope.freq_base": 5e4, "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
    yarn = RopeConfig(theta=5e4, kind="yarn", factor=4.0, original_context=128)
    assert config_of("qwen2", **scaled, **{"rope.scaling.type": "yarn"}).rope == yarn
    boosted = config_of(
        "qwen2", **scaled, **{"rope.scaling.type": "yarn", "rope.scaling.attn_factor": 0.5}
    ).rope
    assert boosted.attention_factor == pytest.approx(0.5 * (0.1 * math.log(4) + 1))
    gemma = config_of("gemma3", **scaled, **{"rope.scaling.type": "linear", "attention.sliding_window": 16})
    assert (gemma.rope.kind, gemma.rope.factor, gemma.rope_local) == ("linear", 4.0, RopeConfig(theta=1e4))
    assert gemma.local_layers == (True, True, True, True, True, False, True, True)
    assert (
        config_of(
            "gemma3", **{"attention.sliding_window": 16, "attention.sliding_window_pattern": 2}
        ).local_layers
        == (True, False) * 4
    )
    assert config_of("gemma3").local_layers == ()
    assert config_of("gemma3", block_count=62).scale == (64 / 4) ** -0.5
    with pytest.raises(ModelFileError, match=r"rope\.scaling\.type = 'longrope' is not supported"):
        config_of("llama", **{"rope.scaling.type": "longrope"})
    with pytest.raises(ModelFileError, match=r"rope\.dimension_count = 8 differs from the head size 16"):
        config_of("llama", **{"rope.dimension_count": 8})


def test_chat_end_tokens_are_found_by_key_and_by_text(llama: Path, llama_gguf: Path, tmp_path: Path) -> None:
    assert open_file(llama_gguf).eos_ids == (2,)
    moved = patched(llama_gguf, tmp_path / "m.gguf", *_scalar(b"tokenizer.ggml.eos_token_id", 2, 0))
    assert open_file(moved).eos_ids == (0, 2)  # what the file says, and <|im_end|>
    outside = patched(llama_gguf, tmp_path / "o.gguf", *_scalar(b"tokenizer.ggml.eos_token_id", 2, 999_999))
    assert open_file(outside).eos_ids == (2,)


def test_fingerprint_is_stable_and_tells_models_apart(llama: Path, llama_gguf: Path, tmp_path: Path) -> None:
    again = tiny_gguf(tmp_path / "llama.gguf", llama)
    assert open_file(again).fingerprint == open_file(llama_gguf).fingerprint
    tuned = tiny_gguf(tmp_path / "llama.gguf", tiny_tokenizer(tiny_hf(tmp_path / "hf", "llama", seed=1)))
    assert open_file(tuned).fingerprint != open_file(llama_gguf).fingerprint


# ---- damage


def _scalar(key: bytes, old: int, new: int) -> tuple[bytes, bytes]:
    head = key + struct.pack("<I", 4)  # a uint32 follows
    return head + struct.pack("<I", old), head + struct.pack("<I", new)


def _tensor(name: bytes, dims: tuple[int, ...], kind: int) -> bytes:
    return name + struct.pack(f"<I{len(dims)}QI", len(dims), *dims, kind)


DAMAGE: dict[str, tuple[tuple[bytes, bytes], str]] = {
    "magic": ((b"GGUF", b"GGML"), "is not a GGUF file"),
    "version": ((b"GGUF" + struct.pack("<I", 3), b"GGUF" + struct.pack("<I", 9)), "version 9"),
    "big endian": ((b"GGUF" + struct.pack("<I", 3), b"GGUF" + struct.pack(">I", 3)), "big-endian"),
    "architecture": (
        (struct.pack("<Q", 5) + b"llama", struct.pack("<Q", 5) + b"lamma"),
        "architecture 'lamma'",
    ),
    "missing key": ((b"llama.block_count", b"llama.block_kount"), "missing key block_count"),
    "missing tensor": (
        (b"blk.1.attn_v.weight", b"blq.1.attn_v.weight"),
        "missing tensor blk.1.attn_v.weight",
    ),
    "wrong shape": (
        _scalar(b"llama.embedding_length", 64, 96),
        r"shape \[384, 64\] where its config asks for \[384, 96\]",
    ),
    "too many layers": (_scalar(b"llama.block_count", 2, 4_000_000_000), "4000000000 layers"),
    "no heads": (_scalar(b"llama.attention.head_count", 4, 0), "attention.head_count = 0"),
    "odd heads": (_scalar(b"llama.attention.head_count_kv", 2, 3), "not a multiple of 3 KV heads"),
    "key type": (
        (b"llama.block_count" + struct.pack("<I", 4), b"llama.block_count" + struct.pack("<I", 6)),
        "block_count",
    ),
    "unknown value type": (
        (b"llama.block_count" + struct.pack("<I", 4), b"llama.block_count" + struct.pack("<I", 77)),
        "value type 77",
    ),
    "unknown quantization": (
        (_tensor(b"token_embd.weight", (64, 384), 0), _tensor(b"token_embd.weight", (64, 384), 99)),
        "type 99",
    ),
    "absurd dimension": (
        (_tensor(b"token_embd.weight", (64, 384), 0), _tensor(b"token_embd.weight", (64, 2**62), 0)),
        "truncated",
    ),
    "twice": ((b"blk.1.attn_v.weight", b"blk.0.attn_v.weight"), "is there twice"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_in_one_line(kind: str, llama_gguf: Path, tmp_path: Path) -> None:
    (old, new), message = DAMAGE[kind]
    with pytest.raises(ModelFileError, match=message) as caught:
        open_file(patched(llama_gguf, tmp_path / "d.gguf", old, new))
    assert "\n" not in str(caught.value)
    assert "d.gguf" in str(caught.value)


def test_a_tensor_the_decoder_would_not_use_is_refused(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", tiny_hf(tmp_path / "hf", "llama3"))
    with pytest.raises(ModelFileError, match=r"tensor blk\.0\.sink\.weight is not part of a llama decoder"):
        open_file(patched(path, tmp_path / "d.gguf", b"rope_freqs.weight", b"blk.0.sink.weight"))


@pytest.mark.parametrize(("offset", "message"), [(8, "tensors"), (16, "metadata keys"), (24, "string")])
def test_absurd_counts_allocate_nothing(offset: int, message: str, llama_gguf: Path, tmp_path: Path) -> None:
    data = bytearray(llama_gguf.read_bytes())
    struct.pack_into("<Q", data, offset, 2**63)
    (tmp_path / "d.gguf").write_bytes(data)
    tracemalloc.start()
    with pytest.raises(ModelFileError, match=message):
        open_file(tmp_path / "d.gguf")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_truncation_anywhere_is_named(llama_gguf: Path, tmp_path: Path) -> None:
    data, header = llama_gguf.read_bytes(), read_header(llama_gguf)
    lengths = [
        0,
        3,
        4,
        7,
        20,
        30,
        100,
        header.data_start // 2,
        header.data_start - 40,
        header.data_start,
        header.data_start + 100,
    ]
    for length in [*lengths, len(data) - 4096, len(data) - 33]:
        (tmp_path / "t.gguf").write_bytes(data[:length])
        with pytest.raises(ModelFileError, match=r"truncated|bytes long"):
            open_file(tmp_path / "t.gguf")


def test_a_type_that_cannot_be_read_is_named(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"tensor token_embd.weight has type Q8_1"):
        open_file(tiny_gguf(tmp_path / "q.gguf", llama, "Q8_1"))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [("llama.expert_count", 8, "expert_count = 8"), ("split.count", 3, "part None of 3")],
)
def test_unsupported_features_are_refused_by_name(
    key: str, value: int, message: str, llama_gguf: Path, tmp_path: Path
) -> None:
    data = bytearray(llama_gguf.read_bytes())
    entry = struct.pack("<Q", len(key)) + key.encode() + struct.pack("<II", 4, value)
    struct.pack_into("<Q", data, 16, struct.unpack_from("<Q", data, 16)[0] + 1)
    (tmp_path / "m.gguf").write_bytes(bytes(data[:24]) + entry + bytes(data[24:]) + bytes(64))
    with pytest.raises(ModelFileError, match=message):
        open_file(tmp_path / "m.gguf")


def test_a_folder_or_unreadable_path_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot be read"):
        open_file(tmp_path / "absent.gguf")


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_fuzzed_headers_raise_nothing_else_and_stay_small(
    data: st.DataObject, llama_gguf: Path, tmp_path: Path
) -> None:
    content = bytearray(llama_gguf.read_bytes())
    end = read_header(llama_gguf).data_start
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, end - 9))
        content[at : at + 8] = data.draw(_patches())(bytes(content[at : at + 8]))
    (tmp_path / "f.gguf").write_bytes(content[: data.draw(st.sampled_from([len(content), end, end + 1000]))])
    message = ""
    tracemalloc.start()
    try:
        read_all(tmp_path / "f.gguf")
    except ModelFileError as error:
        message = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 16 << 20
    assert "\n" not in message


def _patches() -> st.SearchStrategy[Any]:
    """Ways to change eight bytes: one byte, a 64-bit number, a 32-bit number."""
    numbers = st.sampled_from([0, 1, 2, 7, 8, 9, 12, 255, 2**16, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1])
    one_byte = st.integers(0, 255).map(lambda value: lambda old: bytes([value]) + old[1:])
    wide = numbers.map(lambda value: lambda old: struct.pack("<Q", value))
    narrow = numbers.map(lambda value: lambda old: struct.pack("<I", value % 2**32) + old[4:])
    return st.one_of(one_byte, wide, narrow)
