"""FP8 checkpoints on a GPU: bytes stay what they are, and the model says what its dequantized twin says."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.core.errors import ConfigError
from paceline.core.types import Cached, Segment
from paceline.cpu.backend import CpuBackend
from paceline.cuda.backend import CudaBackend
from paceline.cuda.decoder import CudaDecoder
from paceline.cuda.experts import DenseFfn, Experts
from paceline.cuda.layer import Layer
from paceline.cuda.weights import load_weights
from paceline.loaders.checkpoint import DummyCheckpoint
from paceline.loaders.safetensors import SafetensorsCheckpoint
from paceline.models.decoder import Decoder
from paceline.models.kept import dtypes_kept
from paceline.models.stage import without_layers
from paceline.runtime.backend import TorchBackend
from paceline.runtime.executor import KvMemory, LocalExecutor
from tests.cuda.recorders import capture_on, executor_of
from tests.cuda.test_cuda_decoder import config_of
from tests.make_models import tiny_hf
from tests.quantized_models import FORMATS, set_quantization

KEPT = [
    "fp8 scalar", "fp8 tensor", "fp8 channel", "fp8 blocks", "fp8 blocks bf16", "fp8 blocks e8m0", "fbgemm",
    "modelopt", "ct fp8 channel", "ct fp8 tensor", "ct fp8 blocks",
]  # fmt: skip
CPU = torch.device("cpu")


def opened(folder: Path) -> SafetensorsCheckpoint:
    return SafetensorsCheckpoint(folder, folder.name)


@pytest.mark.parametrize("kind", KEPT)
def test_bytes_and_scales_are_those_of_the_file(kind: str, pairs: Any) -> None:
    """And mean the weights that the reader of float32 gives, to the last bit."""
    checkpoint = opened(pairs(kind).quantized)
    stored = load_file(pairs(kind).quantized / "model.safetensors")
    for rows in (slice(None), slice(150, 171)):
        found = checkpoint.kept("layers.1.mlp.up_proj.weight", rows)
        assert found is not None
        bits = stored["model.layers.1.mlp.up_proj.weight"].view(torch.uint8)
        assert torch.equal(found.values, bits[rows])
        each = found.scales.repeat_interleave(128, 1)[:, :192]
        weight = found.values.view(torch.float8_e4m3fn).float() * each
        assert torch.equal(weight, checkpoint.tensor("layers.1.mlp.up_proj.weight", rows))
    assert checkpoint.kept("norm.weight") is None
    assert checkpoint.kept("embed_tokens.weight") is None


@pytest.mark.parametrize("kind", ["ct fp8 group", "ct int8", "awq"])
def test_what_the_kernels_have_no_groups_for_is_unpacked(kind: str, pairs: Any) -> None:
    """Groups of 64 inputs, and what is no FP8."""
    checkpoint = opened(pairs(kind).quantized)
    assert not dtypes_kept(checkpoint)
    assert CudaBackend(CPU).default_dtype(checkpoint) == "bfloat16"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp8 tensor", "fp8 channel", "fp8 blocks"])
def test_logits_are_those_of_the_dequantized_model(
    kind: str, pairs: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = opened(pairs(kind).quantized)
    assert CudaBackend(device).default_dtype(checkpoint) == "fp8"
    monkeypatch.setattr(SafetensorsCheckpoint, "tensor", plainly(SafetensorsCheckpoint.tensor))
    ours = CudaDecoder.load(checkpoint, "fp8", device, capture=capture_on(device))
    monkeypatch.undo()
    plain = Decoder.load(opened(pairs(kind).plain))
    executors = [executor_of(ours, 8), LocalExecutor(TorchBackend(CPU), plain, KvMemory(plain.config, 8))]
    logits = []
    for executor in executors:
        cached = Cached()
        assert executor.kv.reserve(cached, 4)
        logits.append(executor.forward([Segment([3, 40, 5, 61], cached, None, 4)]).logits.cpu())
    assert (logits[0] - logits[1]).abs().mean() < 0.02 * logits[1].abs().mean()
    layers = [m.weight for each in ours.weights.layers for m in (each.qkv, each.out, *each.ffn.matrices)]
    assert all(weight.scales.dtype == torch.float32 and weight.bits == 8 for weight in layers)
    assert ours.weights.head.weight.is_whole


def plainly(read: Any) -> Any:
    """A reader of float32 that is asked for no matrix of a layer."""

    def checked(self: SafetensorsCheckpoint, name: str, *rows: slice) -> torch.Tensor:
        assert "_proj" not in name, f"{name} is unpacked"
        found: torch.Tensor = read(self, name, *rows)
        return found

    return checked


def test_a_matrix_with_a_plain_part_is_unpacked(pairs: Any, tmp_path: Path, device: torch.device) -> None:
    folder = shutil.copytree(pairs("fp8 blocks").quantized, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    up = "model.layers.1.mlp.up_proj.weight"
    tensors[up] = torch.full((320, 192), 0.5, dtype=torch.bfloat16)
    del tensors[f"{up}_scale_inv"]
    save_file(tensors, folder / "model.safetensors")
    checkpoint = opened(folder)
    layers = load_weights(checkpoint, checkpoint.config, "fp8", device, False).layers
    assert [weight_of(layer).is_whole for layer in layers] == [False, True]


def weight_of(layer: Layer) -> Any:
    """Of gate and up."""
    assert isinstance(layer.ffn, DenseFfn)
    return layer.ffn.gate_up.weight


def test_other_dtypes_take_what_the_bytes_mean(pairs: Any, device: torch.device) -> None:
    checkpoint = opened(pairs("fp8 blocks").quantized)
    layers = load_weights(checkpoint, checkpoint.config, "bfloat16", device, False).layers
    names = [f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")]
    exact = torch.cat([checkpoint.tensor(name) for name in names]).bfloat16()
    assert torch.equal(weight_of(layers[0]).packed.cpu(), exact)


def test_some_layers_of_a_model_stay_fp8(pairs: Any, device: torch.device) -> None:
    whole = opened(pairs("fp8 blocks").quantized)
    last = without_layers(whole, [0])
    found = load_weights(last, last.config, "fp8", device, False).layers[0]
    exact = load_weights(whole, whole.config, "fp8", device, False).layers[1]
    assert torch.equal(weight_of(found).packed, weight_of(exact).packed)


def test_a_plain_model_is_rounded_when_asked_for(device: torch.device) -> None:
    source = DummyCheckpoint(config_of("qwen3"), str(device))
    assert CudaBackend(device).default_dtype(source) == "bfloat16"
    weights = load_weights(source, source.config, "fp8", device, False)
    assert {weight_of(layer).bits for layer in weights.layers} == {weights.head.weight.bits} == {8}
    assert weights.dtype == torch.bfloat16


def test_a_cpu_refuses_it_and_names_the_others() -> None:
    with pytest.raises(ConfigError, match=r"dtype is 'fp8'; choose auto, .*int8"):
        CpuBackend().check_dtype("fp8")
    CudaBackend(CPU).check_dtype("fp8")


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_experts_stay_fp8(family: str, tmp_path: Path, device: torch.device) -> None:
    """glm4_moe turns half of a head, and has an expert that every row wakes."""
    sizes = {
        "hidden_size": 192,
        "intermediate_size": 320,
        "num_attention_heads": 6,
        "moe_intermediate_size": 128,
    }
    sizes |= {"n_shared_experts": 1} if family == "glm4_moe" else {}
    plain, rng = tiny_hf(tmp_path / "plain", family, **sizes), np.random.default_rng(0)
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and "_proj" in name:
            parts, tensors[name] = FORMATS["fp8 blocks"].encode((tensor.shape[0], tensor.shape[1]), rng)
            del stored[name]
            stored |= {name.removesuffix(".weight") + part: value for part, value in parts.items()}
    folder = shutil.copytree(plain, tmp_path / "fp8")
    save_file(tensors, plain / "model.safetensors")
    save_file(stored, folder / "model.safetensors")
    set_quantization(folder, FORMATS["fp8 blocks"].settings)
    source, oracle = opened(folder), Decoder.load(opened(plain))
    layer = load_weights(source, source.config, "fp8", device, False).layers[1]
    assert all(
        m.weight.scales.dtype == torch.float32 for m in (layer.qkv, layer.out, *layer.ffn.matrices[1:])
    )
    assert isinstance(layer.ffn, Experts)
    x = torch.randn((5, 192), generator=torch.Generator().manual_seed(3)).bfloat16()
    with torch.no_grad():
        expected = oracle.layers[1].mlp(x.float())
    found = layer.ffn(x.to(device)).float().sum(0).cpu()
    assert (found - expected).abs().mean() < 0.02 * expected.abs().mean()
    unpacked = load_weights(source, source.config, "float32", device, False).layers[1]
    x = x.float().to(device)
    # but for its bias, which is bfloat16 beside FP8
    torch.testing.assert_close(layer.qkv(x), unpacked.qkv(x), rtol=1e-4, atol=0.004)
