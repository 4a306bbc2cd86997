"""A model's weights in the layout of the CPU kernels: packed once, then kept on disk and memory-mapped as a
safetensors file whose data start at a multiple of 64.

Invariant: a file is used only if its name (fingerprint, sizes and dates of the model's files, type, layout)
and its tensors' names, types and shapes are the ones asked for; anything else is packed anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import mmap
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch.nn.functional import pad

from paceline.loaders.checkpoint import Checkpoint
from paceline.loaders.fetch import whole
from paceline.loaders.fields import ALL, Shapes
from paceline.loaders.gguf_parts import part_paths
from paceline.loaders.hub import cache_dir
from paceline.models.config import ModelConfig
from paceline.models.quantize import BITS, BLOCK, DOT_ROWS, FLOAT_ROWS, GROUP, head_bits, pack_linear, padded
from paceline.models.shard import Shard
from paceline.models.stage import SomeLayers

LAYOUT = 2  # raise it when the layout changes
ALIGNMENT = 64
GATE_ROWS = 64
TYPES = {torch.uint8: "U8", torch.float32: "F32"}
ATTENTION = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
}
RECURRENT = {
    "qkv": tuple(f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a")),
    "out": ("linear_attn.out_proj",),
}
DENSE = (*ATTENTION, "gate_up", "down")  # products of a layer without experts
# how the names of what stays as it is end
VECTORS = (
    "norm.weight", "self_attn.sinks", "correction_bias", "conv1d.weight", "dt_bias", "A_log",
    "per_expert_scale", "layer_scalar",
)  # fmt: skip
# products that a rank of several has some tiles of: the others are looked up, or small
SPLIT = tuple(f"{name}.weight" for name in ("qkv", "out", "gate_up", "down", "head"))
CHUNK_BYTES = 2**26  # of a tensor's float32 values in memory at once
Tensors = dict[str, torch.Tensor]
Kinds = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # type and shape of each


def load_packed(source: Checkpoint | SomeLayers, bits: int) -> Tensors:
    """From the cache, or packed and put there. Float weights are too large to keep twice."""
    if bits == 32:
        return pack_model(source, bits)
    if isinstance(source, SomeLayers):  # mapped whole: other stages' weights are never read
        whole = load_packed(source.whole, bits)
        return {name: whole[source.name_in_whole(name)] for name in expected(source.config, bits)}
    path = cache_path(source, bits)
    if (found := read(path, source.config, bits)) is not None:
        return found
    with contextlib.suppress(OSError):  # a full or read-only disk makes starts slower and takes memory
        write(path, expected(source.config, bits), packed_parts(source, bits))
    return read(path, source.config, bits) or pack_model(source, bits)


def load_part(source: Checkpoint | SomeLayers, bits: int, shard: Shard) -> Tensors:
    """The same of a rank: all has its place, and of products the rank's tiles alone are in memory. A file is
    mapped, so other tiles are never read; floats are packed into pages that come when they are written."""
    if bits < 32:
        return load_packed(source, bits)
    tensors = {}
    for name, parts in packed_parts(source, bits):
        tensors[name] = found = torch.cat(list(parts))
        experts = source.config.experts if ".experts." in name else None
        if name.endswith(SPLIT) and (experts is None or shard.is_by_expert):
            pages = torch.frombuffer(mmap.mmap(-1, found.numel() * 4), dtype=torch.float32)
            together = 1 if experts is None else len(found) // experts.count
            own, tensors[name] = shard.of(len(found), together), pages.view(found.shape)
            tensors[name][own] = found[own]
    return tensors


def cache_path(source: Checkpoint, bits: int) -> Path:
    """Its name has that of the model and a hash of its files' sizes and dates: a fingerprint only samples
    them."""
    model, name = source.path, next(name for name, number in BITS.items() if number == bits)
    files = part_paths(model) if model.is_file() else sorted(model.glob("*.safetensors"))
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    version = hashlib.sha256(repr((LAYOUT, stamps)).encode()).hexdigest()[:12]
    stem = re.sub(r"[^\w.-]+", "_", model.stem if model.is_file() else model.name)[:80]
    return cache_dir() / "packed" / f"{stem}-{source.fingerprint[:12]}-{name}-{version}.safetensors"


class Source(Protocol):
    @property
    def config(self) -> ModelConfig: ...
    def tensor(self, name: str, rows: slice = ALL) -> torch.Tensor: ...


class Product(NamedTuple):
    """A product of the model."""

    name: str
    parts: list[str]  # tensors whose rows it stacks
    bits: int
    num_experts: int = 1  # whose matrices follow each other
    num_biases: int = 1  # one for all experts, of zeros, or one for each


def _products(config: ModelConfig, bits: int) -> Iterator[Product]:
    for i in range(config.num_layers):
        before, experts = f"layers.{i}.", config.experts_of(i)
        for name, parts in (RECURRENT if config.is_recurrent(i) else ATTENTION).items():
            yield Product(before + name, [before + part for part in parts], bits)
        if experts is None:
            yield from _ffn(before, before + "mlp.", bits)
            continue
        gates = ["mlp.gate"] + ["mlp.shared_expert_gate"] * experts.has_shared_gate
        yield Product(before + "router", [before + gate for gate in gates], 32)
        counts = experts.count, experts.count if experts.has_bias else 1
        yield from _ffn(before + "experts.", before + "mlp.experts.", bits, *counts)
        if experts.shared_inner:
            yield from _ffn(before + "shared.", before + "mlp.shared_expert.", bits)
    if config.has_embedding:
        yield Product("embedding", ["embed_tokens"], head_bits(bits))
    if config.has_head and not config.tie_embeddings:
        yield Product("head", ["lm_head"], head_bits(bits))


def _ffn(to: str, parts: str, bits: int, *counts: int) -> Iterator[Product]:
    """counts: of experts, and of biases."""
    yield Product(to + "gate_up", [parts + "gate_proj", parts + "up_proj"], bits, *counts)
    yield Product(to + "down", [parts + "down_proj"], bits, *counts)


def gate_up_order(inner: int) -> list[int]:
    """64 rows of the gate, then the 64 that they gate, and so on: a thread needs its own outputs next."""
    blocks = [range(start, min(start + GATE_ROWS, inner)) for start in range(0, inner, GATE_ROWS)]
    return [row + half for block in blocks for half in (0, inner) for row in block]


def gated_order(count: int, num_kv_heads: int, dim: int) -> list[int]:
    """Queries, keys and values, then the gates of queries, which stand behind each query's rows in files.
    count: of query heads."""
    heads = [range(first * dim, (first + 1) * dim) for first in range(2 * count)]
    rest = range(2 * count * dim, (2 * count + 2 * num_kv_heads) * dim)
    return [row for part in (*heads[::2], rest, *heads[1::2]) for row in part]


def pack_model(source: Source, bits: int) -> Tensors:
    """All weights as the kernels read them, in memory."""
    return {name: torch.cat(list(parts)) for name, parts in packed_parts(source, bits)}


def packed_parts(source: Source, bits: int) -> Iterator[tuple[str, Iterable[torch.Tensor]]]:
    """The same one after another, each in parts that follow each other: memory is that of one part."""
    names = source.config.weight_names()
    for name in names:
        if name.endswith(VECTORS):
            yield name, [source.tensor(name).float().contiguous()]
    for product in _products(source.config, bits):
        yield from _packed(source, product, names)


def packed_ffn(source: Source, bits: int) -> Iterator[tuple[str, torch.Tensor]]:
    """What follows attention alone, in memory."""
    names = source.config.weight_names()
    for product in _products(source.config, bits):
        if ".mlp." in product.parts[0]:
            yield from ((name, torch.cat(list(parts))) for name, parts in _packed(source, product, names))


def _packed(source: Source, product: Product, names: Shapes) -> Iterator[tuple[str, Iterable[torch.Tensor]]]:
    to, parts, its_bits, num_experts, num_biases = product
    found = [source.tensor(f"{part}.bias").float() for part in parts if f"{part}.bias" in names]
    zeros = [torch.zeros(names[f"{part}.weight"][0] // num_experts) for part in parts]
    bias = torch.cat([each.view(num_biases, -1) for each in found or zeros], 1)
    if to.endswith("gate_up"):
        bias = bias[:, gate_up_order(bias.shape[1] // 2)]
    bias = bias.flatten()
    yield f"{to}.weight", (pack_linear(rows, None, its_bits)[0] for rows in _rows(source, product, names))
    yield f"{to}.bias", [pad(bias, (0, -len(bias) % (FLOAT_ROWS if its_bits == 32 else DOT_ROWS)))]


def _rows(source: Source, product: Product, names: Shapes) -> Iterator[torch.Tensor]:
    """The rows that a product stacks, in the kernels' order, some at a time where they are many: gate and up
    side by side, expert by expert; q, k and v whole."""
    total, width = names[f"{product.parts[0]}.weight"]
    count, step = total // product.num_experts, max(CHUNK_BYTES // (4 * width * GATE_ROWS), 1) * GATE_ROWS
    if count <= step or product.name.endswith("qkv"):
        step = count
    config = source.config
    is_gated = config.gated_attention and "self_attn.q_proj" in product.parts[0]
    for start in range(0, total, count):
        for first in range(0, count, step):
            rows = slice(start + first, start + min(first + step, count))
            rows = ALL if step == total else rows
            weight = torch.cat([source.tensor(f"{part}.weight", rows) for part in product.parts])
            if is_gated:
                weight = weight[gated_order(config.num_heads, config.num_kv_heads, config.head_dim)]
            yield weight[gate_up_order(len(weight) // 2)] if product.name.endswith("gate_up") else weight


def expected(config: ModelConfig, bits: int) -> Kinds:
    """Name, type and shape of every tensor of a quantized model, in the order they are packed in."""
    shapes = config.weight_names()
    wanted: Kinds = {n: (torch.float32, tuple(shape)) for n, shape in shapes.items() if n.endswith(VECTORS)}
    for to, parts, its_bits, num_experts, num_biases in _products(config, bits):
        rows, width = sum(shapes[f"{part}.weight"][0] for part in parts), shapes[f"{parts[0]}.weight"][1]
        if its_bits == 32:  # a router
            size = padded(rows, FLOAT_ROWS)
            wanted[f"{to}.weight"] = torch.float32, (size // FLOAT_ROWS, width, FLOAT_ROWS)
        else:
            size, groups = padded(rows, DOT_ROWS), padded(width, GROUP[its_bits]) // GROUP[its_bits]
            wanted[f"{to}.weight"] = torch.uint8, (size // DOT_ROWS, groups, BLOCK[its_bits])
        wanted[f"{to}.bias"] = torch.float32, (size // num_experts * num_biases,)
    return wanted


def write(path: Path, kinds: Kinds, tensors: Iterable[tuple[str, Iterable[torch.Tensor]]]) -> None:
    """Whole, so that no process reads half a file."""
    header: dict[str, dict[str, object]] = {}
    end = 0
    for name, (dtype, shape) in kinds.items():
        at, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": TYPES[dtype], "shape": list(shape), "data_offsets": [at, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    with whole(path) as part, part.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, parts in tensors:
            file.writelines(each.view(torch.uint8).numpy().data for each in parts)
    for old in path.parent.glob(f"{path.name.rsplit('-', 1)[0]}-*.safetensors"):
        if old != path:  # packed from earlier files of the same model; a process that maps it keeps it
            old.unlink(missing_ok=True)


def read(path: Path, config: ModelConfig, bits: int) -> Tensors | None:
    """Memory-mapped tensors, or None if there is no such file or it is not what it should be."""
    wanted = expected(config, bits)
    try:
        with safe_open(path, framework="pt") as file:
            if set(file.keys()) != set(wanted):
                return None
            tensors = {name: file.get_tensor(name) for name in wanted}
    except (OSError, SafetensorError):
        return None
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return tensors if found == wanted else None
