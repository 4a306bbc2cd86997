"""Tiny quantized checkpoints, written from the definitions of their formats: random integers (or FP8 numbers),
scales and zeros are drawn, packed, and kept beside the float32 weights that they stand for.

Nothing here is shared with the loaders: a word is put together place by place, a weight is (q - z) * s.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.make_models import tiny_hf

SIZES: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6}
GROUP = 64
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Rng = np.random.Generator
Ints = np.ndarray


class Encoded(NamedTuple):
    parts: dict[str, torch.Tensor]  # by how their names end
    weight: torch.Tensor  # [outputs, inputs] float32


class Format(NamedTuple):
    settings: dict[str, Any]  # quantization_config
    encode: Callable[[tuple[int, int], Rng], Encoded]


def words_of(ints: Ints, bits: int) -> torch.Tensor:
    """[n, k] unsigned -> int32 [n, k * bits / 32]: place by place along the last axis, the lowest bits first."""
    per_word = 32 // bits
    ints = np.pad(ints.astype(np.uint64), ((0, 0), (0, -ints.shape[1] % per_word)))
    words = np.zeros((len(ints), ints.shape[1] // per_word), np.uint64)
    for place in range(per_word):
        words += ints[:, place::per_word] << np.uint64(bits * place)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def some_scales(rng: Rng, shape: tuple[int, ...], size: float, dtype: torch.dtype) -> torch.Tensor:
    values = rng.uniform(0.5, 1.5, shape) * size
    return torch.from_numpy(np.asarray(values, np.float32)).to(dtype)


def weight_of(q: Ints, z: Ints | float, s: torch.Tensor, groups: Ints) -> torch.Tensor:
    """q [n, k], z and s [n, groups], groups [k]."""
    zeros = np.broadcast_to(np.asarray(z, np.float32), s.shape)
    scales = s.to(torch.float32).numpy()
    rows = [(q[i].astype(np.float32) - zeros[i, groups]) * scales[i, groups] for i in range(len(q))]
    return torch.from_numpy(np.stack(rows))


def in_order(width: int, size: int) -> Ints:
    return np.arange(width) // size


def fp8(kind: str, scale_name: str, dtype: torch.dtype = torch.float32) -> Callable[..., Encoded]:
    def encode(shape: tuple[int, int], rng: Rng) -> Encoded:
        (n, k), size = shape, shape[1] ** -0.5
        q = torch.from_numpy(rng.normal(0, 1, shape).astype(np.float32)).to(torch.float8_e4m3fn)
        grid = {
            "scalar": (), "tensor": (1,), "channel": (n, 1), "flat": (n,), "group": (n, k // GROUP),
            "block": (-(-n // 128), -(-k // 128)),
        }[kind]  # fmt: skip
        s = some_scales(rng, grid, size, dtype)
        high, wide = {"block": (128, 128), "group": (1, GROUP), "channel": (1, k), "flat": (1, k)}.get(
            kind, (n, k)
        )
        full = s.to(torch.float32).reshape(-(-n // high), -(-k // wide)).numpy()
        weight = np.empty(shape, np.float32)
        for i in range(n):
            for j in range(0, k, wide):
                weight[i, j : j + wide] = q[i, j : j + wide].float().numpy() * full[i // high, j // wide]
        return Encoded({".weight": q, scale_name: s}, torch.from_numpy(weight))

    return encode


def int8(has_zeros: bool) -> Callable[..., Encoded]:
    def encode(shape: tuple[int, int], rng: Rng) -> Encoded:
        q = rng.integers(-128, 128, shape)
        z = rng.integers(-20, 20, (shape[0], 1)) if has_zeros else np.zeros((shape[0], 1), int)
        s = some_scales(rng, (shape[0], 1), 0.01 * shape[1] ** -0.5, torch.bfloat16)
        parts = {".weight": torch.from_numpy(q.astype(np.int8)), ".weight_scale": s}
        if has_zeros:
            parts[".weight_zero_point"] = torch.from_numpy(z.astype(np.int8))
        return Encoded(parts, weight_of(q, z, s, np.zeros(shape[1], int)))

    return encode


def packed(bits: int, group: int | None, zeros: str = "", order: str = "") -> Callable[..., Encoded]:
    """compressed-tensors, pack-quantized. zeros: packed, bytes or none; order: shuffled, unset or none."""

    def encode(shape: tuple[int, int], rng: Rng) -> Encoded:
        (n, k), half = shape, 2 ** (bits - 1)
        num_groups = 1 if group is None else k // group
        q = rng.integers(-half, half, shape)
        z = rng.integers(-half, half, (n, num_groups)) if zeros else np.zeros((n, num_groups), int)
        s = some_scales(rng, (n, num_groups), k**-0.5 / half, torch.bfloat16)
        groups = in_order(k, k // num_groups)
        parts = {".weight_packed": words_of(q + half, bits), ".weight_scale": s}
        parts[".weight_shape"] = torch.tensor(shape)
        if zeros:
            stored = words_of((z + half).T, bits).T.contiguous()
            parts[".weight_zero_point"] = stored if zeros == "packed" else torch.from_numpy(z.astype(np.int8))
        if order:
            groups = rng.permutation(groups) if order == "shuffled" else groups
            index = groups if order == "shuffled" else np.full(k, -1)
            parts[".weight_g_idx"] = torch.from_numpy(index.astype(np.int32))
        return Encoded(parts, weight_of(q, z, s, groups))

    return encode


def awq(shape: tuple[int, int], rng: Rng) -> Encoded:
    n, k = shape
    q, z = rng.integers(0, 16, (k, n)), rng.integers(0, 16, (k // GROUP, n))
    s = some_scales(rng, (k // GROUP, n), k**-0.5 / 8, torch.float16)

    def ordered(ints: Ints) -> torch.Tensor:
        eights = ints.reshape(len(ints), -1, 8)[:, :, AWQ_ORDER]  # place i of a word holds output ORDER[i]
        return words_of(eights.reshape(ints.shape), 4)

    weight = weight_of(q.T, z.T, s.t(), in_order(k, GROUP))
    return Encoded({".qweight": ordered(q), ".qzeros": ordered(z), ".scales": s}, weight)


def gptq(bits: int, is_v1: bool, order: str = "in order", has_bias: bool = False) -> Callable[..., Encoded]:
    def encode(shape: tuple[int, int], rng: Rng) -> Encoded:
        n, k = shape
        q, z = rng.integers(0, 2**bits, (k, n)), rng.integers(0, 2**bits, (k // GROUP, n))
        s = some_scales(rng, (k // GROUP, n), k**-0.5 / 2 ** (bits - 1), torch.float16)
        qzeros = words_of(z, bits)
        if is_v1:  # whole words are lowered, so that a zero of 0 borrows from its neighbour
            ones = sum(1 << place for place in range(0, 32, bits))
            words = qzeros.numpy().view(np.uint32).astype(np.int64)
            qzeros = torch.from_numpy(((words - ones) % 2**32).astype(np.uint32).view(np.int32).copy())
        groups = in_order(k, GROUP)
        groups = rng.permutation(groups) if order == "shuffled" else groups
        parts = {".qweight": words_of(q.T, bits).t().contiguous(), ".qzeros": qzeros, ".scales": s}
        if order != "absent":
            parts[".g_idx"] = torch.from_numpy(groups.astype(np.int32))
        if has_bias:
            parts[".bias"] = torch.zeros(n, dtype=torch.float16)
        return Encoded(parts, weight_of(q.T, z.T, s.t(), groups))

    return encode


def fp4(kind: str) -> Callable[..., Encoded]:
    """kind: mxfp4, nvfp4 (divided by a scale of the tensor), or modelopt (multiplied with one)."""
    group = 32 if kind == "mxfp4" else 16

    def encode(shape: tuple[int, int], rng: Rng) -> Encoded:
        n, k = shape
        codes = rng.integers(0, 16, shape)
        stored = torch.from_numpy((codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8))
        parts = {".weight" if kind == "modelopt" else ".weight_packed": stored}
        if kind == "mxfp4":
            exponents = rng.integers(120, 124, (n, k // group))
            parts[".weight_scale"] = torch.from_numpy(exponents.astype(np.uint8))
            scales = torch.from_numpy(2.0 ** (exponents - 127)).float()
        else:
            parts[".weight_scale"] = some_scales(rng, (n, k // group), 8.0, torch.float8_e4m3fn)
            whole = some_scales(rng, (1,), 200.0 if kind == "nvfp4" else 0.005, torch.float32)
            parts[".weight_global_scale" if kind == "nvfp4" else ".weight_scale_2"] = whole
            each = parts[".weight_scale"].float()
            scales = each / whole if kind == "nvfp4" else each * whole
        return Encoded(parts, weight_of(np.array(E2M1)[codes], 0.0, scales, in_order(k, group)))

    return encode


def groups_of(**weights: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": form, **groups_of(**weights)}


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
GPTQ = {"quant_method": "gptq", "group_size": GROUP, "desc_act": False, "sym": False}
PACKED = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP)
FLOAT = compressed("float-quantized", num_bits=8, type="float", strategy="channel")
INT = compressed("int-quantized", num_bits=8, type="int", strategy="channel")
FORMATS: dict[str, Format] = {
    "fp8 scalar": Format({"quant_method": "fp8"}, fp8("scalar", ".weight_scale")),
    "fp8 tensor": Format({"quant_method": "fp8"}, fp8("tensor", ".weight_scale_inv")),
    "fp8 channel": Format({"quant_method": "fp8"}, fp8("flat", ".weight_scale", torch.bfloat16)),
    "fp8 blocks": Format(BLOCKS, fp8("block", ".weight_scale_inv")),
    "fp8 blocks bf16": Format(BLOCKS, fp8("block", ".weight_scale_inv", torch.bfloat16)),
    "fp8 blocks e8m0": Format(BLOCKS, fp8("block", ".scale", torch.float8_e8m0fnu)),
    "fbgemm": Format({"quant_method": "fbgemm_fp8"}, fp8("channel", ".weight_scale")),
    "modelopt": Format({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8("scalar", ".weight_scale")),
    "ct fp8 channel": Format(FLOAT, fp8("channel", ".weight_scale", torch.bfloat16)),
    "ct fp8 tensor": Format(FLOAT, fp8("tensor", ".weight_scale", torch.bfloat16)),
    "ct fp8 group": Format(FLOAT, fp8("group", ".weight_scale", torch.bfloat16)),
    "ct fp8 blocks": Format(
        compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
        fp8("block", ".weight_scale", torch.bfloat16),
    ),
    "ct int8": Format(INT, int8(has_zeros=False)),
    "ct int8 zeros": Format(INT, int8(has_zeros=True)),
    "ct int4": Format(PACKED, packed(4, GROUP)),
    "ct int4 rows": Format(PACKED, packed(4, None)),
    "ct int4 zeros": Format(PACKED, packed(4, GROUP, "packed")),
    "ct int4 byte zeros": Format(PACKED, packed(4, GROUP, "bytes")),
    "ct int4 order": Format(PACKED, packed(4, GROUP, "packed", "shuffled")),
    "ct int4 unset order": Format(PACKED, packed(4, GROUP, order="unset")),
    "ct int8 packed": Format(PACKED, packed(8, GROUP, "packed")),
    "ct mxfp4": Format(compressed("mxfp4-pack-quantized", num_bits=4, type="float"), fp4("mxfp4")),
    "ct nvfp4": Format(compressed("nvfp4-pack-quantized", num_bits=4, type="float"), fp4("nvfp4")),
    "modelopt nvfp4": Format({"quant_method": "modelopt", "quant_algo": "NVFP4"}, fp4("modelopt")),
    "awq": Format({"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": GROUP}, awq),
    "gptq": Format({**GPTQ, "bits": 4}, gptq(4, is_v1=True)),
    "gptq 2 bits": Format({**GPTQ, "bits": 2}, gptq(2, is_v1=True)),
    "gptq 8 bits": Format({**GPTQ, "bits": 8}, gptq(8, is_v1=True)),
    "gptq v2": Format({**GPTQ, "bits": 4, "checkpoint_format": "gptq_v2"}, gptq(4, is_v1=False)),
    "gptq order": Format({**GPTQ, "bits": 4, "desc_act": True}, gptq(4, True, "shuffled")),
    "gptq no order": Format({**GPTQ, "bits": 4}, gptq(4, True, "absent")),
    "gptq bias": Format({**GPTQ, "bits": 4}, gptq(4, True, has_bias=True)),
}


class Pair(NamedTuple):
    quantized: Path
    plain: Path  # the same model with float32 weights
    weights: dict[str, torch.Tensor]  # of the layers, as they are stored in the plain one


def write_pair(folder: Path, kind: str, family: str = "llama", **sizes: Any) -> Pair:
    """A model whose layers' linear weights are quantized, and the same one written plainly."""
    settings, encode = FORMATS[kind]
    plain = tiny_hf(folder / "plain", family, **{**SIZES, **sizes})
    tensors, rng = load_file(plain / "model.safetensors"), np.random.default_rng(7)
    weights, stored = {}, dict(tensors)
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and ".layers." in name:
            parts, weights[name] = encode(tuple(tensor.shape), rng)
            del stored[name]
            stored |= {name.removesuffix(".weight") + part: value for part, value in parts.items()}
    quantized = shutil.copytree(plain, folder / "quantized")
    save_file(tensors | weights, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, quantized / "model.safetensors", metadata={"format": "pt"})
    set_quantization(quantized, settings)
    return Pair(quantized, plain, weights)


def set_quantization(folder: Path, settings: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
