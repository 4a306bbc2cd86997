"""GGUF files: quantized weights, config and tokenizer in one file, or in several parts.

Invariant: opening checks every tensor's bounds, type and shape, so `tensor` can only fail if the file changes
while it is open. llama files store the rows of q and k interleaved, phi files q, k and v in one tensor: that
is undone here.
"""

from __future__ import annotations

import math
import re
from itertools import chain
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch

from paceline.core.errors import ModelFileError
from paceline.loaders.fields import ALL, Fields, check_weights, fingerprint, place_rows, unique_ids
from paceline.loaders.gguf_header import TensorInfo, gguf_name, read_config
from paceline.loaders.gguf_parts import read_parts
from paceline.loaders.places import Place
from paceline.loaders.tokenizer import TokenizerSource
from paceline.models.config import ModelConfig

# Families whose q and k rows are interleaved in the file: those that are converted as llama is.
PERMUTED = ("llama", "mistral", "mixtral", "smollm3", "ministral3", "granite", "granitemoe")
# Chat end tokens that many files fail to list as such; a control token of this text always ends an answer.
END_TEXTS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")
CONTROL = 3  # token type
MAX_DIVISORS = 1 << 16
FUSED, RATES = re.compile("_(gate|up)_exps"), ("in_proj_b", "in_proj_a")
KINDS, BLOCKS = gguf.GGMLQuantizationType, gguf.GGML_QUANT_SIZES  # BLOCKS: values and bytes of a block


def _as_matrix(info: TensorInfo) -> TensorInfo:
    """Stacked experts lie one below the other; the gate of a shared one is stored as a vector."""
    if info.name.endswith("_exps.bias"):
        return info._replace(shape=(math.prod(info.shape),))
    if info.name.endswith("ssm_conv1d.weight") and len(info.shape) == 2:
        return info._replace(shape=(info.shape[0], 1, info.shape[1]))
    if len(info.shape) > 2 or info.name.endswith("ffn_gate_inp_shexp.weight"):
        return info._replace(shape=(math.prod(info.shape[:-1]), info.shape[-1]))
    return info


def value_rows(config: ModelConfig) -> tuple[range, ...]:
    """Of value heads as a folder has them, by key head; Qwen3.5's files have each key head's first, first."""
    sizes = config.recurrent
    assert sizes is not None
    count, each, width = sizes.key_heads, sizes.value_heads // sizes.key_heads, sizes.value_dim
    order = (key + turn * count for key in range(count) for turn in range(each))
    return tuple(range(head * width, (head + 1) * width) for head in order)


def runs_of(config: ModelConfig, name: str, stored: str, rows: range) -> tuple[range, ...]:
    """Where a tensor has a weight's rows, in their order. rows: if they follow each other."""
    if stored.endswith("_gate_up_exps.weight") and config.experts is not None:
        inner, first = config.experts.inner, config.experts.inner * ("up_proj" in name)
        starts = range(first, 2 * inner * config.experts.count, 2 * inner)
        return tuple(range(start, start + inner) for start in starts)
    sizes, part = config.recurrent, name.partition("linear_attn.")[2].removesuffix(".weight")
    is_next = config.family == "qwen3_next"
    if sizes is None or not part or (is_next and part not in RATES):
        return (rows,)
    if is_next:  # rates of a key head, then its steps
        each = sizes.value_heads // sizes.key_heads
        starts = range(each * (part == "in_proj_a"), 2 * sizes.value_heads, 2 * each)
        return tuple(range(start, start + each) for start in starts)
    values, before = value_rows(config), 2 * sizes.key_heads * sizes.key_dim
    if part in ("in_proj_qkv", "conv1d"):
        return (range(before), *(range(before + own.start, before + own.stop) for own in values))
    if part in (*RATES, "A_log", "dt_bias"):  # of each head one
        return tuple(range(own.start // len(own), own.stop // len(own)) for own in values)
    return values if part == "in_proj_z" else (rows,)


class GgufCheckpoint:
    """One .gguf file, or all parts of one model."""

    def __init__(self, path: Path, name: str) -> None:
        header, self._files, paths = read_parts(path)
        path = self.path = paths[0]
        self.name = name
        for info in header.tensors.values():
            _, data_start, size = self._files[info.name]
            end = data_start + info.offset + self._num_bytes(info)
            if end > size:
                raise self._refuse(info, f"is truncated: byte {end} of {size}; fetch it again")
        self._tensors = {name: _as_matrix(info) for name, info in header.tensors.items()}
        divisors = self._divisors("rope_freqs") or self._divisors("rope_factors_short")
        self.config: ModelConfig = read_config(path, header, divisors, self._divisors("rope_factors_long"))
        names = {weight: gguf_name(self.config, weight) for weight in self.config.weight_names()}
        for weight, stored in names.items():  # of some files gate and up are in one tensor
            fused = FUSED.sub("_gate_up_exps", stored)
            names[weight] = stored if fused not in self._tensors else fused
        rows, wanted = place_rows(self.config, names)
        self._runs = {name: runs_of(self.config, name, names[name], rows[name]) for name in names}
        shapes = {name: info.shape for name, info in self._tensors.items()}
        check_weights(path, self.config, wanted, shapes, layers="blk.")
        self._stored = {weight: self._tensors[stored] for weight, stored in names.items()}
        for info in self._stored.values():  # a block of zeros: the only way to ask whether gguf reads a type
            self._dequantize(info, np.zeros((1, BLOCKS[KINDS(info.kind)][1]), np.uint8))
        about = {k: v for k, v in header.metadata.items() if k.startswith("tokenizer.")}
        keys = self._tokenizer = Fields(str(path), about)
        ends = [i for end in ("eos", "eot", "eom") for i in keys.token_ids(f"tokenizer.ggml.{end}_token_id")]
        tokens, types = keys.get("tokenizer.ggml.tokens"), keys.get("tokenizer.ggml.token_type")
        if isinstance(tokens, list) and isinstance(types, list):
            typed = enumerate(zip(tokens, types, strict=False))
            ends += [i for i, (text, kind) in typed if kind == CONTROL and text in END_TEXTS]
        self.eos_ids = unique_ids(ends, self.config.vocab_size)
        bos_ids = unique_ids(keys.token_ids("tokenizer.ggml.bos_token_id"), self.config.vocab_size)
        self.bos_id = next(iter(bos_ids), None)
        self.fingerprint = fingerprint(paths, header.data_start)

    def kept(self, name: str, rows: slice = ALL) -> None:
        return None

    def tensor(self, name: str, rows: slice = ALL) -> torch.Tensor:
        """One weight, or some of its rows, as float32."""
        if self.config.family not in PERMUTED or not (".q_proj." in name or ".k_proj." in name):
            info = self._stored[name]
            parts = Place([info.name], info.shape, self._runs[name]).parts(rows)
            runs = [part.rows for part in parts] or [range(0)]
            found = [self._read(info, slice(run.start, run.stop)) for run in runs]
            values = found[0] if len(found) == 1 else np.concatenate(found)
            if name.endswith("linear_attn.A_log"):
                values = np.log(-values)
            elif name.endswith("linear_attn.out_proj.weight") and self.config.family != "qwen3_next":
                values = values[:, list(chain(*value_rows(self.config)))]
        else:
            # rows (0, d/2, 1, d/2+1, ...) of each head back to (0, 1, ..., d/2, d/2+1, ...)
            first, last, _ = rows.indices(self._stored[name].shape[0])
            width, before = self.config.head_dim, first - first % self.config.head_dim
            whole = self._read(self._stored[name], slice(before, -(-last // width) * width))  # whole heads
            pairs = whole.reshape(-1, width // 2, 2, *whole.shape[1:])  # [heads, d/2, 2, in]
            values = pairs.swapaxes(1, 2).reshape(whole.shape)[first - before : max(last, first) - before]
        return torch.from_numpy(np.require(values, np.float32, ["C", "W"]))

    def tokenizer_source(self) -> TokenizerSource:
        keys, stated = self._tokenizer, self._tokenizer.get("tokenizer.chat_template")
        template = stated if isinstance(stated, str) else None
        return TokenizerSource(None, keys.values, {}, template, self.bos_id, self.eos_ids, self.path)

    def _divisors(self, name: str) -> tuple[float, ...] | None:
        """Of rotary frequencies, where the file has such a tensor."""
        info = self._tensors.get(f"{name}.weight")
        if info is None:
            return None
        if not 0 < math.prod(info.shape) <= MAX_DIVISORS:
            raise self._refuse(info, f"has shape {list(info.shape)}, which fits no head; fetch it again")
        return tuple(self._read(info).reshape(-1).tolist())

    def _read(self, info: TensorInfo, rows: slice = ALL) -> npt.NDArray[np.float32]:
        first, last, _ = rows.indices(info.shape[0])
        file, last = self._files[info.name], max(first, last)
        per_row, offset = self._num_bytes(info) // info.shape[0], file.data_start + info.offset
        raw = np.fromfile(file.path, np.uint8, (last - first) * per_row, offset=offset + first * per_row)
        if raw.size != (last - first) * per_row:
            raise self._refuse(info, "was cut short while it was being read; fetch the file again")
        shape = (last - first, *info.shape[1:])
        if first == last:
            return np.empty(shape, np.float32)
        return self._dequantize(info, raw.reshape(*shape[:-1], -1)).reshape(shape)

    def _dequantize(self, info: TensorInfo, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        kind = KINDS(info.kind)
        try:
            with np.errstate(all="ignore"):  # scales of damaged blocks may overflow: damaged weights
                return np.asarray(gguf.quants.dequantize(rows, kind))
        except NotImplementedError as error:
            raise self._refuse(info, f"has type {kind.name}, which is not read; use another file") from error

    def _num_bytes(self, info: TensorInfo) -> int:
        try:
            block, width = BLOCKS[KINDS(info.kind)]
        except (ValueError, KeyError) as error:
            raise self._refuse(info, f"has the unknown type {info.kind}; use another file") from error
        row = info.shape[-1] if info.shape else 1
        if row % block:
            raise self._refuse(info, f"has rows of {row} values, no multiple of {block}; fetch it again")
        return math.prod(info.shape) // block * width

    def _refuse(self, info: TensorInfo, remedy: str) -> ModelFileError:
        return ModelFileError(f"{self._files[info.name].path}: tensor {info.name} {remedy}")
