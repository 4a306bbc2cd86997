"""MXFP4 checkpoints on a GPU: what files have so stays so, and the model says what it says in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.core.types import Cached, Segment
from paceline.cuda import pack
from paceline.cuda.backend import CudaBackend
from paceline.cuda.decoder import CudaDecoder
from paceline.cuda.experts import Experts
from paceline.cuda.layer import Weights
from paceline.cuda.weights import load_weights
from paceline.loaders.safetensors import SafetensorsCheckpoint
from paceline.models.decoder import Decoder
from paceline.models.kept import FLOAT4_GROUP, Float4, dtypes_kept
from paceline.runtime.backend import TorchBackend, weight_bytes
from paceline.runtime.executor import KvMemory, LocalExecutor
from tests.cuda.recorders import capture_on, executor_of
from tests.make_models import tiny_hf
from tests.quantized_models import set_quantization, write_pair
from tests.test_quantized import MXFP4

CPU = torch.device("cpu")
EXPERTS = "layers.1.mlp.experts."


def opened(folder: Path) -> SafetensorsCheckpoint:
    return SafetensorsCheckpoint(folder, folder.name)


def written(folder: Path, kind: str, **sizes: Any) -> SafetensorsCheckpoint:
    """kind: openai's, whose experts alone are MXFP4 in stacks; or compressed-tensors', all of whose layers'
    matrices are."""
    if kind == "compressed-tensors":
        sizes = {"moe_intermediate_size": 64, **sizes}
        return opened(write_pair(folder, "ct mxfp4", "qwen3_moe", **sizes).quantized)
    tiny_hf(folder, "gpt_oss", dtype="bfloat16", **sizes)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(5)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, width, rows = tensors.pop(name).shape
        shape = (count, rows, width // FLOAT4_GROUP)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator).byte()
        tensors[f"{name}_scales"] = torch.randint(120, 124, shape, generator=generator).byte()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    set_quantization(folder, MXFP4)
    return opened(folder)


KINDS = ["openai", "compressed-tensors"]


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_the_file(kind: str, tmp_path: Path) -> None:
    """And mean the weights that the reader of float32 gives, to the last bit."""
    checkpoint, table = written(tmp_path / "model", kind), torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    assert dtypes_kept(checkpoint) == ["mxfp4"]
    for name in ("gate", "up", "down"):
        for rows in (slice(None), slice(70, 171)):
            found = checkpoint.kept(f"{EXPERTS}{name}_proj.weight", rows)
            assert isinstance(found, Float4)
            codes = torch.stack([found.values & 15, found.values >> 4], -1).flatten(1).int()
            powers = 2.0 ** (found.scales.float() - 127)
            weight = table[codes & 7] * (1 - (codes >> 3) * 2) * powers.repeat_interleave(FLOAT4_GROUP, 1)
            assert torch.equal(weight, checkpoint.tensor(f"{EXPERTS}{name}_proj.weight", rows))
    assert checkpoint.kept("embed_tokens.weight") is None


@pytest.mark.parametrize("kind", ["ct nvfp4", "modelopt nvfp4"])
def test_what_has_other_scales_is_unpacked(kind: str, pairs: Any) -> None:
    assert CudaBackend(CPU).default_dtype(opened(pairs(kind).quantized)) == "bfloat16"


@pytest.mark.parametrize("kind", KINDS)
def test_experts_take_four_bits_and_a_quarter(
    kind: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them is ever unpacked, and the whole takes what `paceline models --check` says."""
    sizes: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 8}
    sizes |= {"intermediate_size": 128} if kind == "openai" else {"moe_intermediate_size": 128}
    checkpoint = written(tmp_path / "model", kind, **sizes)
    assert CudaBackend(device).default_dtype(checkpoint) == "mxfp4"
    monkeypatch.setattr(SafetensorsCheckpoint, "tensor", without_experts(SafetensorsCheckpoint.tensor))
    weights = load_weights(checkpoint, checkpoint.config, "mxfp4", device, False)
    others = 0
    for name, shape in checkpoint.config.weight_names().items():
        others += 2 * torch.Size(shape).numel() * (".mlp.experts." not in name or name.endswith("bias"))
    ours = 0
    for layer in weights.layers:
        assert isinstance(layer.ffn, Experts)
        for matrix in (layer.ffn.gate_up, layer.ffn.down):
            assert matrix.num_bytes == torch.Size(matrix.weight.shape).numel() * 4.25 / 8
            ours += matrix.num_bytes
        assert layer.out.weight.is_whole is (kind == "openai")
        assert layer.ffn.router.weight.is_whole
    assert weights.head.weight.is_whole
    assert weight_bytes(checkpoint.config, "mxfp4") == pytest.approx(others + ours, rel=0.02)


def without_experts(read: Any) -> Any:
    """A reader of float32 that is asked for no expert."""

    def checked(self: SafetensorsCheckpoint, name: str, *rows: slice) -> torch.Tensor:
        assert not (".mlp.experts." in name and name.endswith("weight")), f"{name} is unpacked"
        found: torch.Tensor = read(self, name, *rows)
        return found

    return checked


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_logits_have_the_bits_of_bfloat16(
    kind: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In exact mode, where products of four bits have no small tiles of their own. The interpreter adds up
    one step of K after the other, so its steps are made equal."""
    if device.type == "cpu":
        monkeypatch.setattr(pack, "STEP", FLOAT4_GROUP)
    checkpoint = written(tmp_path / "model", kind)
    decoders = [
        CudaDecoder.load(checkpoint, dtype, device, exact=True, capture=capture_on(device))
        for dtype in ("mxfp4", "bfloat16")
    ]
    assert [first_experts(each.weights).gate_up.weight.is_whole for each in decoders] == [False, True]
    reference = Decoder.load(checkpoint)
    executors = [executor_of(each, 8) for each in decoders]
    executors.append(LocalExecutor(TorchBackend(CPU), reference, KvMemory(reference.config, 8)))
    ours, theirs, oracle = (logits_of(each) for each in executors)
    assert torch.equal(ours, theirs)
    assert (ours - oracle).abs().mean() < 0.03 * oracle.abs().mean()


def first_experts(weights: Weights) -> Experts:
    ffn = weights.layers[0].ffn
    assert isinstance(ffn, Experts)
    return ffn


def logits_of(executor: LocalExecutor) -> torch.Tensor:
    """Of a prompt and of a token after it."""
    cached, logits = Cached(), list[torch.Tensor]()
    assert executor.kv.reserve(cached, 24)
    for tokens in ([3, 40, 5, 61], [4]):
        logits.append(executor.forward([Segment(tokens, cached, None, len(tokens))]).logits.float().cpu())
        cached.num_cached += len(tokens)
    return torch.cat(logits)


def test_other_dtypes_take_what_the_bytes_mean(tmp_path: Path, device: torch.device) -> None:
    checkpoint = written(tmp_path / "model", "openai")
    name = "layers.0.mlp.experts.down_proj.weight"
    whole = first_experts(load_weights(checkpoint, checkpoint.config, "bfloat16", device, False))
    assert torch.equal(whole.down.weight.packed.cpu(), checkpoint.tensor(name).bfloat16())
    rounded = first_experts(load_weights(checkpoint, checkpoint.config, "fp8", device, False))
    assert (rounded.down.weight.bits, rounded.down.weight.scales.dtype) == (8, torch.float32)


def test_a_plain_model_is_bfloat16(tmp_path: Path, device: torch.device) -> None:
    """As a draft model is beside a target in MXFP4."""
    checkpoint = opened(tiny_hf(tmp_path, "qwen3_moe"))
    weights = load_weights(checkpoint, checkpoint.config, "mxfp4", device, False)
    assert first_experts(weights).gate_up.weight.packed.dtype == torch.bfloat16
