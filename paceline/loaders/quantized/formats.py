"""Which format a model's weights are quantized in, by its config.json, and readers for all of them.

Invariant: what the tensors are decides how each weight is read (lists of layers left alone are only a hint to
those who write files); a format that is not read is refused by name, before any weight is touched.
Activations are not quantized as some configs ask: that would only lose precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from paceline.core.errors import ModelFileError
from paceline.loaders.fields import Fields, Shapes
from paceline.loaders.quantized.fp4 import expert_names, open_fp4, open_mxfp4
from paceline.loaders.quantized.grids import open_grid
from paceline.loaders.quantized.integers import BITS, open_awq, open_gptq, open_packed
from paceline.loaders.quantized.parts import FLOAT8, INT8, Module, Reader, Shape
from paceline.loaders.stored import StoredTensor, read_tensor

KEYS = ("quantization_config", "compression_config")  # the second is an old name
METHODS = ("fp8", "fbgemm_fp8", "modelopt", "compressed-tensors", "awq", "gptq", "mxfp4")
READ = "use the unquantized model, or one in FP8, compressed-tensors, AWQ, GPTQ, NVFP4, MXFP4 or GGUF"
# compressed-tensors': FP8 and int8 as they are, small integers packed into int32 words, FP4
FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mixed-precision", "dense",
)  # fmt: skip
MINUS_ONE = {"gptq": True, "gptq_v2": False}  # formats of GPTQ: how zeros are stored
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
        value, key = keys.get("weight_block_size"), "weight_block_size"
        problem = "is not two positive numbers; fetch the model again"
        blocks = () if value is None else (_block(keys, key, value, problem),)
        size = f", blocks of {blocks[0][0]} x {blocks[0][1]}" if blocks else ""
        return Quantization(f"FP8{size}", partial(open_grid, types=(FLOAT8,), blocks=blocks))
    if method == "compressed-tensors":
        stored = partial(_open_compressed, _compressed_blocks(keys))
        return Quantization(f"compressed-tensors, {keys.text('format', 'mixed-precision')}", stored)
    if method == "awq":
        if keys.text(key := keys.spelling("version", "format"), "gemm").lower() != "gemm":
            raise keys.refuse(key, "is not read; use an AWQ model of version gemm")
        if keys.count(key := keys.spelling("bits", "w_bit"), 4) != 4:
            raise keys.refuse(key, "is not read; use an AWQ model of 4 bits")
        return Quantization("AWQ, 4 bits", open_awq)
    if method == "gptq":
        form = keys.text(key := keys.spelling("checkpoint_format", "format"), "gptq").lower()
        if keys.get("is_marlin_format") or form not in MINUS_ONE:
            raise keys.refuse(key, f"is not read; use a GPTQ model of format {' or '.join(MINUS_ONE)}")
        if (bits := keys.count("bits", 4)) not in BITS:
            raise keys.refuse("bits", f"is not read; use a GPTQ model of {', '.join(map(str, BITS))} bits")
        return Quantization(f"GPTQ, {bits} bits", partial(open_gptq, MINUS_ONE[form]))
    if method == "mxfp4":
        return Quantization("MXFP4", open_mxfp4)
    if method == "bitsandbytes":
        raise keys.refuse("quant_method", f"is not read, its layout belongs to one library; {READ}")
    raise keys.refuse("quant_method", f"is not read (only {', '.join(METHODS)} are); {READ}")


def _compressed_blocks(config: Fields) -> tuple[Shape, ...]:
    """The blocks that scales may be for; what would change the computation is refused by name."""
    groups = [config.section("config_groups").section(key) for key in config.section("config_groups").values]
    for keys in (config, *groups):
        if keys.get("format") is not None and keys.text("format") not in FORMATS:
            raise keys.refuse("format", f"is not read; use a model with one of {', '.join(FORMATS)}")
    sparsity = config.section("sparsity_config")
    if sparsity.text("format", "dense") != "dense":
        raise sparsity.refuse("format", "is not read; use a model without sparsity")
    if config.section("transform_config").section("config_groups").values:
        raise config.refuse("transform_config", "rotates activations, which is not done; use another model")
    stated = [keys.section("weights").get("block_structure") for keys in groups]
    problem = "has the block structure {!r:.40}; use two numbers"
    found = [value for value in stated if value is not None]
    return tuple(_block(config, "config_groups", value, problem.format(value)) for value in found)


def _block(keys: Fields, key: str, value: Any, problem: str) -> Shape:
    """Rows and inputs of a block: a list of two, or a text such as 128x128."""
    sizes = value.split("x") if isinstance(value, str) else value
    texts = [str(size) for size in sizes] if isinstance(sizes, list) else []
    if len(texts) != 2 or not all(text.isdecimal() and len(text) < 7 and int(text) for text in texts):
        raise keys.refuse(key, problem)
    return int(texts[0]), int(texts[1])


def _open_compressed(blocks: tuple[Shape, ...], module: Module) -> Reader | None:
    kind = module.type_of(".weight_packed")
    if kind is None:
        return open_grid(module, (FLOAT8, INT8), blocks)
    return open_fp4(module, ".weight_packed") if kind == "U8" else open_packed(module)


class Opened(NamedTuple):
    readers: dict[str, Reader]  # of the weights that are quantized, by their plain names
    plain: Shapes  # what the files hold, as if no weight were quantized


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
    shapes = {name: tensor.shape for name, tensor in found.items()}
    if quantization is None:
        return Opened(readers, shapes)
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
    left = {name: shape for name, shape in shapes.items() if name not in used}
    return Opened(readers, left | {name: wanted[name] for name in readers})


def _zero_bias(name: str, found: Mapping[str, StoredTensor]) -> str:
    """Some quantizers write a bias for every layer; one that the model has not is zero."""
    if bool(read_tensor(found[name].file, name).any()):
        raise ModelFileError(f"{found[name].file}: tensor {name} is not part of this decoder, and not zero")
    return name
