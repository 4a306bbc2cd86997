"""GGUF files: quantized weights, config and tokenizer in one file, or in several parts.

Invariant: opening checks every tensor's bounds, type and shape, so `tensor` can only fail if the file changes
while it is open. llama files store the rows of q and k interleaved, phi files q, k and v in one tensor: that
is undone here.
"""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch

from paceline.core.errors import ModelFileError
from paceline.loaders.fields import ALL, Fields, check_weights, fingerprint, place_rows, unique_ids
from paceline.loaders.gguf_header import TensorInfo, gguf_name, read_config
from paceline.loaders.gguf_parts import read_parts
from paceline.loaders.tokenizer import TokenizerSource
from paceline.models.config import ModelConfig

# Families whose q and k rows are interleaved in the file: those that are converted as llama is.
PERMUTED = ("llama", "mistral", "mixtral", "smollm3", "ministral3", "granite", "granitemoe")
# Chat end tokens that many files fail to list as such; a control token of this text always ends an answer.
END_TEXTS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")
CONTROL = 3  # token type
MAX_DIVISORS = 1 << 16
KINDS, BLOCKS = gguf.GGMLQuantizationType, gguf.GGML_QUANT_SIZES  # BLOCKS: values and bytes of a block


def _as_matrix(info: TensorInfo) -> TensorInfo:
    """Stacked experts lie one below the other; the gate of a shared one is stored as a vector."""
    if info.name.endswith("_exps.bias"):
        return info._replace(shape=(math.prod(info.shape),))
    if len(info.shape) > 2 or info.name.endswith("ffn_gate_inp_shexp.weight"):
        return info._replace(shape=(math.prod(info.shape[:-1]), info.shape[-1]))
    return info


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
        self._rows, wanted = place_rows(self.config, names)
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
        self.bos_id: int | None = next(iter(bos_ids), None)
        self.fingerprint = fingerprint(paths, header.data_start)

    def tensor(self, name: str, rows: slice = ALL) -> torch.Tensor:
        """One weight, or some of its rows, as float32."""
        if self.config.family not in PERMUTED or not (".q_proj." in name or ".k_proj." in name):
            own = self._rows[name][rows]
            values = self._read(self._stored[name], slice(own.start, own.stop))
        else:
            # rows (0, d/2, 1, d/2+1, ...) of each head back to (0, 1, ..., d/2, d/2+1, ...)
            first, last, _ = rows.indices(self._stored[name].shape[0])
            width, before = self.config.head_dim, first - first % self.config.head_dim
            whole = self._read(self._stored[name], slice(before, -(-last // width) * width))  # whole heads
            pairs = whole.reshape(-1, width // 2, 2, *whole.shape[1:])  # [heads, d/2, 2, in]
            values = pairs.swapaxes(1, 2).reshape(whole.shape)[first - before : max(last, first) - before]
        return torch.from_numpy(np.require(values, np.float32, ["C", "W"]))

    def tokenizer_source(self) -> TokenizerSource:
        stated = self._tokenizer.get("tokenizer.chat_template")
        template = stated if isinstance(stated, str) else None
        return TokenizerSource(
            None, self._tokenizer.values, {}, template, self.bos_id, self.eos_ids, self.path
        )

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
