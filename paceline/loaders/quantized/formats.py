"""Which format a model's weights are quantized in, by its config.json, and readers for all of them.

Invariant: what the tensors are decides how each weight is read (lists of layers left alone are only a hint to
those who write files); a format that is not read is refused by name, before any weight is touched.
Activations are not quantized as some configs ask: that would only lose precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from paceline.core.errors import ModelFileError
from paceline.loaders.fields import Fields, Found, Shapes
from paceline.loaders.quantized import awq, compressed, gptq
from paceline.loaders.quantized.fp4 import open_fp4
from paceline.loaders.quantized.grids import FLOAT8, open_grid
from paceline.loaders.quantized.mxfp4 import expert_names, open_mxfp4
from paceline.loaders.quantized.parts import Module, Reader, Shape
from paceline.loaders.stored import StoredTensor, read_tensor

KEYS = ("quantization_config", "compression_config")  # the second is an old name
METHODS = ("fp8", "fbgemm_fp8", "modelopt", "compressed-tensors", "awq", "gptq", "mxfp4")
READ = "use the unquantized model, or one in FP8, compressed-tensors, AWQ, GPTQ, NVFP4, MXFP4 or GGUF"
PACKED = ("qweight", "weight_packed")  # end names of tensors that are a `weight`
# Of activations and the KV cache.
UNUSED = (
    ".input_scale", ".input_scale_ub", ".activation_scale", ".input_zero_point", ".input_global_scale",
    ".output_scale", ".output_zero_point", ".q_scale", ".k_scale", ".v_scale", ".kv_scale",
)  # fmt: skip


class Quantization(NamedTuple):
    name: str  # for people
    open: Callable[[Module], Reader | None]


def quantization_of(config: Fields) -> Quantization | None:
    """Of a parsed config.json; None: the weights are plain."""
    for section in (config, config.section("text_config")):
        for key in KEYS:
            if section.get(key) is not None:
                return _read_settings(section.section(key))
    return None


def _read_settings(keys: Fields) -> Quantization:
    method = keys.text("quant_method", "compressed-tensors" if keys.get("config_groups") else None)
    method = method.lower().replace("_", "-")
    if method == "modelopt" and keys.text("quant_algo", "") == "NVFP4":
        return Quantization("NVFP4", partial(open_fp4, part=".weight"))
    if method in ("fp8", "fbgemm-fp8", "modelopt"):
        if method == "modelopt" and keys.text("quant_algo", "") != "FP8":
            raise keys.refuse("quant_algo", f"is not read; {READ}")
        blocks = _blocks(keys)
        size = f", blocks of {blocks[0][0]} x {blocks[0][1]}" if blocks else ""
        return Quantization(f"FP8{size}", partial(open_grid, types=(FLOAT8,), blocks=blocks))
    if method == "compressed-tensors":
        stored = partial(compressed.open_compressed, compressed.read_settings(keys))
        return Quantization(f"compressed-tensors, {keys.text('format', 'mixed-precision')}", stored)
    if method == "awq":
        awq.check_settings(keys)
        return Quantization("AWQ, 4 bits", awq.open_awq)
    if method == "gptq":
        opener = partial(gptq.open_gptq, gptq.is_minus_one(keys))
        return Quantization(f"GPTQ, {keys.count('bits', 4)} bits", opener)
    if method == "mxfp4":
        return Quantization("MXFP4", open_mxfp4)
    if method == "bitsandbytes":
        raise keys.refuse("quant_method", f"is not read, its layout belongs to one library; {READ}")
    raise keys.refuse("quant_method", f"is not read (only {', '.join(METHODS)} are); {READ}")


def _blocks(keys: Fields) -> tuple[Shape, ...]:
    value = keys.get("weight_block_size")
    if value is None:
        return ()
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(type(each) is int and 0 < each < 1 << 20 for each in value):
        raise keys.refuse("weight_block_size", "is not two positive numbers; fetch the model again")
    return (tuple(value),)


class Dequantized(NamedTuple):
    """A weight that other tensors stand for."""

    shape: Shape


class Opened(NamedTuple):
    readers: dict[str, Reader]  # of the weights that are quantized, by their plain names
    plain: Found  # what the files hold, as if no weight were quantized


def plain_names(found: Mapping[str, StoredTensor]) -> set[str]:
    """Names of the tensors, with those of the weights that quantized ones stand for."""
    names = set(found)
    for name, tensor in found.items():
        stem, _, part = name.rpartition(".")
        if part in PACKED:
            names.add(f"{stem}.weight")
        names.update(expert_names(name, tensor.shape))
    return names


def open_weights(
    where: Path, quantization: Quantization | None, found: Mapping[str, StoredTensor], wanted: Shapes
) -> Opened:
    """wanted: plain names and shapes of all weights."""
    readers: dict[str, Reader] = {}
    if quantization is None:
        return Opened(readers, found)
    used = {name for name in found if name.endswith(UNUSED)}
    for name, shape in wanted.items():
        stem = name.removesuffix(".weight")
        if len(shape) != 2 or stem == name:
            continue
        module = Module(where, found, stem, shape, used)
        reader = quantization.open(module)
        if reader is None:
            continue
        readers[name] = reader
        if f"{stem}.bias" in found and f"{stem}.bias" not in wanted:
            used.add(_zero_bias(f"{stem}.bias", found))
    left = {name: tensor for name, tensor in found.items() if name not in used}
    return Opened(readers, left | {name: Dequantized(wanted[name]) for name in readers})


def _zero_bias(name: str, found: Mapping[str, StoredTensor]) -> str:
    """Some quantizers write a bias for every layer; one that the model has not is zero."""
    if bool(read_tensor(found[name].file, name).any()):
        raise ModelFileError(f"{found[name].file}: tensor {name} is not part of this decoder, and not zero")
    return name
