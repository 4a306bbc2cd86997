"""Quantized checkpoints: the weights are what the format's definition says, to the last bit; the model is that
of the same weights stored plainly; what is not read or damaged is an error that names it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from paceline.core.errors import ModelFileError
from paceline.cpu.decoder import CpuDecoder
from paceline.loaders.checkpoint import open_checkpoint
from paceline.loaders.fields import Fields
from paceline.loaders.quantized.formats import open_weights, plain_names, quantization_of
from paceline.loaders.safetensors import SafetensorsCheckpoint
from paceline.loaders.stored import StoredTensor, tensors_of
from paceline.models.decoder import Decoder
from tests.make_models import EXPERT_FAMILIES, tiny_hf
from tests.passes import Rows, batch_of, new_kv, shuffled_blocks
from tests.quantized_models import BLOCKS, FORMATS, compressed, set_quantization, write_pair
from tests.test_decoder import whole

ONE_OF_EACH = ["fp8 blocks", "ct fp8 channel", "ct int8", "ct int4 zeros", "awq", "gptq order"]
UP = "model.layers.1.mlp.up_proj"
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
MXFP4_ROWS = {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}


def opened(folder: Path) -> SafetensorsCheckpoint:
    return SafetensorsCheckpoint(folder, folder.name)


def read_one(
    tensors: dict[str, torch.Tensor], values: dict[str, Any], name: str, shape: tuple[int, ...],
    rows: slice | None = None,
) -> torch.Tensor:  # fmt: skip
    """One weight of a file that holds these tensors."""
    quantization = quantization_of(Fields("config.json", {"quantization_config": values}))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        save_file(tensors, file)
        readers = open_weights(Path(folder), quantization, tensors_of([file]), {name: shape}).readers
        return readers[name](rows or slice(0, shape[0]))


@pytest.mark.parametrize("kind", FORMATS)
def test_weights_are_what_the_format_means(kind: str, pairs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.loaders.quantized.parts.STEP", 5_000)  # several steps a weight
    pair = pairs(kind)
    checkpoint, plain = opened(pair.quantized), opened(pair.plain)
    for name in checkpoint.config.weight_names():
        found, wanted = checkpoint.tensor(name), plain.tensor(name)
        assert found.dtype is torch.float32
        assert torch.equal(found, wanted), name
        for rows in (slice(5, 21), slice(0, 1), slice(len(found) - 3, None), slice(8, 16), slice(3, 3)):
            assert torch.equal(checkpoint.tensor(name, rows), wanted[rows]), (name, rows)
    assert torch.equal(plain.tensor("layers.1.mlp.up_proj.weight"), pair.weights[f"{UP}.weight"])


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_logits_are_those_of_the_plain_model(kind: str, dtype: str, pairs: Any) -> None:
    batch = batch_of([Rows(list(range(3, 40)), shuffled_blocks(1)[0])])
    logits = []
    for folder in (pairs(kind).quantized, pairs(kind).plain):
        model = CpuDecoder.load(open_checkpoint(str(folder), progress=False), dtype=dtype, use_cache=False)
        logits.append(model.forward(batch, new_kv(model)).logits)
    assert torch.equal(logits[0], logits[1])
    assert logits[0].std() > 0.1


def test_blocks_of_fp8_are_those_of_transformers() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(256, 384, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=generator)
    theirs = Fp8Dequantize(None).convert({"weight": weight, "weight_scale_inv": scales})["weight"]
    encoded = {"m.weight": weight, "m.weight_scale_inv": scales}
    assert torch.equal(read_one(encoded, BLOCKS, "m.weight", (256, 384)), theirs)


def test_mxfp4_is_that_of_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (3, 10, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 10, 2), generator=generator, dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(
        1, 2
    )  # [experts, rows, in]
    experts = "model.layers.0.mlp.experts"
    stored = {f"{experts}.gate_up_proj_blocks": blocks, f"{experts}.gate_up_proj_scales": scales}
    stored |= {name.replace("gate_up", "down"): tensor.clone() for name, tensor in stored.items()}
    found = {name: StoredTensor(Path(), "U8", tuple(tensor.shape)) for name, tensor in stored.items()}
    named = {f"{experts}.{i}.{part}_proj.weight" for i, part in product(range(3), MXFP4_ROWS)}
    assert plain_names(found) == found.keys() | named
    for i, (part, rows) in product(range(3), MXFP4_ROWS.items()):
        name, wanted = f"{experts}.{i}.{part}_proj.weight", theirs[i, rows]
        shape = (len(wanted), 64)
        assert torch.equal(read_one(stored, MXFP4, name, shape), wanted)
        assert torch.equal(read_one(stored, MXFP4, name, shape, slice(1, 4)), wanted[1:4])


def test_gpt_oss_in_mxfp4_says_what_transformers_does(tmp_path: Path) -> None:
    """A whole tiny gpt-oss in MXFP4, opened by transformers and unpacked there."""
    from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, Mxfp4Config

    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_local_experts": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 40}
    config = GptOssConfig(**sizes, **heads, num_experts_per_tok=1, initializer_range=0.3)
    GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    experts, generator = "model.layers.0.mlp.experts", torch.Generator().manual_seed(5)
    for part, (rows, width) in {"gate_up": (64, 64), "down": (64, 32)}.items():
        del tensors[f"{experts}.{part}_proj"]
        shape = (2, rows, width // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 126, shape, generator=generator, dtype=torch.uint8)
        tensors |= {f"{experts}.{part}_proj_blocks": blocks, f"{experts}.{part}_proj_scales": scales}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    set_quantization(tmp_path, MXFP4)
    mxfp4 = Mxfp4Config(dequantize=True)  # which makes bfloat16 of everything, as the file has it
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=mxfp4).float()
    tokens = list(range(40))
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    assert expected.std() > 0.1
    assert (whole(Decoder.load(opened(tmp_path)), tokens).logits - expected).abs().max() < 1e-4


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        "quant_method = 'bitsandbytes' is not read.*GPTQ",
    ),
    (
        {"quant_method": "aqlm"},
        "quant_method = 'aqlm' is not read .only fp8, .*mxfp4 are.; use the unquantized",
    ),
    ({}, "missing key quant_method"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "quant_algo = 'W4A8' is not read"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size = .128. is not two"),
    ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size = .0, 128. is not two"),
    (
        {"quant_method": "awq", "version": "gemv"},
        "version = 'gemv' is not read; use an AWQ model of version gemm",
    ),
    ({"quant_method": "awq", "bits": 8}, "bits = 8 is not read"),
    ({"quant_method": "gptq", "bits": 3}, "bits = 3 is not read"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
    ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format = 'marlin-24' is not read"),
    (compressed("dense") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    (compressed("dense") | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config.*rotates"),
    (compressed("float-quantized", block_structure="128x"), "block structure '128x'"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_what_is_not_read_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    for config in ({"quantization_config": values}, {"text_config": {"quantization_config": values}}):
        with pytest.raises(ModelFileError, match=message) as caught:
            quantization_of(Fields("config.json", config))
        assert str(caught.value).startswith("config.json: ")


DAMAGE: list[tuple[str, str, torch.Tensor | None, str]] = [
    ("fp8 channel", ".weight_scale", None, "missing tensor {name}"),
    ("fp8 blocks", ".weight_scale_inv", torch.ones(2, 2), r"{name} has shape \[2, 2\] where a weight of"),
    (
        "fp8 blocks",
        ".weight_scale_inv",
        torch.ones(3, 2, dtype=torch.int8),
        "{name} has type I8; use a model",
    ),
    ("fp8 blocks", ".weight", torch.ones(8, 8).to(torch.float8_e4m3fn), r"{name} has shape \[8, 8\]"),
    ("ct int4", ".weight_packed", torch.ones(320, 5, dtype=torch.int32), r"{name} has shape \[320, 5\]"),
    ("ct int4", ".weight_scale", torch.ones(320, 5), r"{name} has shape \[320, 5\]"),
    ("ct int4 zeros", ".weight_zero_point", torch.ones(320, 5, dtype=torch.int8), r"{name} has shape"),
    ("awq", ".qzeros", None, "missing tensor {name}"),
    ("awq", ".scales", torch.ones(5, 320), "{name} has 5 groups"),
    ("awq", ".qweight", torch.ones(40, 192, dtype=torch.int32), r"{name} has shape \[40, 192\]"),
    ("gptq", ".qweight", torch.ones(192, 40, dtype=torch.int32), r"{name} has shape \[192, 40\]"),
    ("gptq", ".qweight", torch.ones(24, 320), "{name} has type F32"),
    ("gptq", ".g_idx", torch.ones(100, dtype=torch.int32), r"{name} has shape \[100\]"),
    ("gptq bias", ".bias", torch.ones(320), "{name} is not part of this decoder, and not zero"),
    ("gptq", ".lora", torch.ones(1), "{name} is not part of a llama decoder"),
]


@pytest.mark.parametrize(("kind", "part", "value", "message"), DAMAGE)
def test_damage_is_named_when_the_model_is_opened(
    kind: str, part: str, value: torch.Tensor | None, message: str, pairs: Any, tmp_path: Path
) -> None:
    folder = shutil.copytree(pairs(kind).quantized, tmp_path / "model")
    tensors = {n: t for n, t in load_file(folder / "model.safetensors").items() if n != UP + part}
    save_file(tensors | ({} if value is None else {UP + part: value}), folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=message.format(name=UP + part)) as caught:
        opened(folder)
    assert str(folder) in str(caught.value)


def test_groups_that_are_not_there_are_an_error(pairs: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(pairs("gptq").quantized, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{UP}.g_idx"][7] = 99
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"up_proj\.g_idx names groups beyond the 3 that have scales"):
        opened(folder).tensor("layers.1.mlp.up_proj.weight")


def test_plain_layers_and_scales_of_activations_are_left_alone(pairs: Any, tmp_path: Path) -> None:
    pair = pairs("fp8 blocks")
    folder = shutil.copytree(pair.quantized, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{UP}.weight"] = torch.full((320, 192), 0.5, dtype=torch.bfloat16)
    del tensors[f"{UP}.weight_scale_inv"]
    tensors["model.layers.0.self_attn.q_proj.input_scale"] = torch.ones(1)
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors")
    weight = opened(folder).tensor("layers.1.mlp.up_proj.weight")
    assert torch.equal(weight, torch.full((320, 192), 0.5))


def test_a_quantized_head_of_a_model_inside_another(pairs: Any, tmp_path: Path) -> None:
    """All names begin otherwise, and the head is quantized, too."""
    pair = pairs("awq")
    folder = shutil.copytree(pair.quantized, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    parts, weight = FORMATS["awq"].encode((384, 192), np.random.default_rng(1))
    tensors |= {f"lm_head{part}": tensor for part, tensor in parts.items()}
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors")
    checkpoint, plain = opened(folder), opened(pair.plain)
    assert torch.equal(checkpoint.tensor("lm_head.weight"), weight)
    for name in plain.config.weight_names().keys() - {"lm_head.weight"}:
        assert torch.equal(checkpoint.tensor(name), plain.tensor(name)), name


def test_biases_of_quantized_layers_are_read(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, "awq", "qwen2")
    checkpoint, plain = opened(pair.quantized), opened(pair.plain)
    for name in checkpoint.config.weight_names():
        assert torch.equal(checkpoint.tensor(name), plain.tensor(name)), name


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel does not say what was held")
@pytest.mark.parametrize("kind", ["fp8 blocks", "gptq order", "awq", "ct int4 zeros"])
def test_packing_holds_little_beside_the_result(kind: str, tmp_path: Path) -> None:
    """Of 230 MB of float32. Packing works on 64 MB at once, with copies; unpacking adds a little to that."""
    sizes = {"hidden_size": 1024, "intermediate_size": 8192}
    pair = write_pair(tmp_path, kind, num_attention_heads=8, num_key_value_heads=8, **sizes)
    assert 4 * sum(weight.numel() for weight in pair.weights.values()) > 200e6
    held, packed = most_held(pair.quantized, tmp_path)
    plain, _ = most_held(pair.plain, tmp_path)
    assert held < plain + 64e6
    assert held < packed + 600e6


def most_held(folder: Path, cache: Path) -> tuple[int, int]:
    """Bytes that a process of its own held at most while packing, less what it held before; of the result."""
    code = (
        "import sys; from paceline.loaders.checkpoint import open_checkpoint; from paceline.loaders.packed import load_packed\n"
        "def most(): return next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "model = open_checkpoint(sys.argv[1], False); before = most(); tensors = load_packed(model, 4)\n"
        "print(1024 * (most() - before), sum(t.numel() * t.element_size() for t in tensors.values()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env={**os.environ, "PACELINE_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )
    held, packed = map(int, done.stdout.split())
    return held, packed


SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 5, 24, 40, 192, 320]), max_size=3)
KINDS = [torch.int32, torch.int8, torch.uint8, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int64]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), kind=st.sampled_from(sorted(FORMATS)))
def test_tensors_of_any_shape_and_type_raise_nothing_else(
    data: st.DataObject, kind: str, pairs: Any, tmp_path: Path
) -> None:
    folder = shutil.copytree(pairs(kind).quantized, tmp_path / "model", dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(name for name in tensors if name.startswith(UP))
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2)):
        shape = data.draw(SHAPES | st.just(list(tensors[name].shape)))
        value = torch.randint(0, 9, shape).to(data.draw(st.sampled_from(KINDS)))
        tensors[name] = value
    save_file(tensors, folder / "model.safetensors")
    message = ""
    try:
        opened(folder).tensor("layers.1.mlp.up_proj.weight")
    except ModelFileError as error:
        message = str(error)
    assert "\n" not in message


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
@pytest.mark.parametrize("kind", ["fp8 blocks", "awq", "gptq order", "ct int4 zeros"])
def test_experts_are_read_as_any_other_weight(family: str, kind: str, tmp_path: Path) -> None:
    """Against the same model with the numbers that the packed ones stand for, whole and some rows."""
    sizes = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6}
    sizes |= {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
    plain, rng = tiny_hf(tmp_path / "plain", family, **sizes), np.random.default_rng(0)
    tensors = load_file(plain / "model.safetensors")
    stored, weights = dict(tensors), dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        fits = tensor.ndim == 2 and tensor.shape[0] % 8 == 0 and tensor.shape[1] % 64 == 0
        if fits and ".layers." in name and not name.endswith(("gate.weight", "layer.weight")):
            parts, weights[name] = FORMATS[kind].encode(tuple(tensor.shape), rng)
            del stored[name]
            stored |= {name.removesuffix(".weight") + part: value for part, value in parts.items()}
    folder = shutil.copytree(plain, tmp_path / "packed")
    save_file(tensors | weights, plain / "model.safetensors")
    save_file(stored, folder / "model.safetensors")
    set_quantization(folder, FORMATS[kind].settings)
    packed, expected = SafetensorsCheckpoint(folder, "packed"), SafetensorsCheckpoint(plain, "plain")
    assert len(weights) > 4
    for name, shape in packed.config.weight_names().items():
        whole, rows = expected.tensor(name), slice(shape[0] // 3, max(shape[0] - 3, 1))
        assert torch.equal(packed.tensor(name), whole)
        assert torch.equal(packed.tensor(name, rows), whole[rows])
