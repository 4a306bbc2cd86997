"""GGUF files: quantized weights, config and tokenizer in one file.

Invariant: opening checks every tensor's bounds, type and shape, so `tensor` can only fail if the file changes
underneath. llama files store the rows of q and k interleaved for their kind of rotary embedding; that is
undone here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ModelFileError
from paceline.loaders.checkpoint import TokenizerSource, check_shapes, fingerprint, unique_ids
from paceline.loaders.fields import Fields
from paceline.loaders.gguf_config import gguf_name, read_config
from paceline.loaders.gguf_header import GgufHeader, TensorInfo, read_header
from paceline.models.config import ModelConfig

if TYPE_CHECKING:
    import torch

PERMUTED = ("llama", "mistral")  # families whose q and k rows are interleaved in the file
END_KEYS = ("eos", "eot", "eom")
# Chat end tokens that many files fail to list as such; a control token of this text always ends an answer.
END_TEXTS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")
CONTROL = 3  # token type


class GgufCheckpoint:
    """One .gguf file."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self._header = read_header(path)
        _check_bounds(path, self._header)
        self.config: ModelConfig = read_config(path, self._header, self._rope_divisors)
        self._stored = _stored(path, self.config, self._header)
        self._tokenizer = {k: v for k, v in self._header.metadata.items() if k.startswith("tokenizer.")}
        self.eos_ids = unique_ids(_end_ids(path, self._tokenizer), self.config.vocab_size)
        bos = unique_ids(
            Fields(str(path), self._tokenizer).token_ids("tokenizer.ggml.bos_token_id"),
            self.config.vocab_size,
        )
        self.bos_id: int | None = bos[0] if bos else None
        self.fingerprint = fingerprint([path], self._header.data_start)

    def tensor(self, name: str) -> torch.Tensor:
        """One weight as float32."""
        import torch

        assert name in self._stored, f"{name} is not a weight of this config"
        values = self._read(self._stored[name])
        if self.config.family in PERMUTED and (".q_proj." in name or ".k_proj." in name):
            values = _rows_in_halves(values, self.config.head_dim)
        return torch.from_numpy(np.require(values, np.float32, ["C", "W"]))

    def tokenizer_source(self) -> TokenizerSource:
        template = self._tokenizer.get("tokenizer.chat_template")
        return TokenizerSource(
            gguf_metadata=self._tokenizer,
            chat_template=template if isinstance(template, str) else None,
            bos_id=self.bos_id,
            eos_ids=self.eos_ids,
        )

    def _rope_divisors(self) -> tuple[float, ...]:
        info = self._header.tensors["rope_freqs.weight"]
        if not 0 < math.prod(info.shape) <= 1 << 16:
            raise ModelFileError(
                f"{self.path}: rope_freqs.weight has shape {list(info.shape)}, which fits no head; fetch the file again"
            )
        _check_type(self.path, info)
        return tuple(self._read(info).reshape(-1).tolist())

    def _read(self, info: TensorInfo) -> npt.NDArray[np.float32]:
        import gguf

        kind = gguf.GGMLQuantizationType(info.kind)
        start, num_bytes = self._header.data_start + info.offset, _num_bytes(self.path, info)
        raw = np.fromfile(self.path, np.uint8, num_bytes, offset=start)
        if raw.size != num_bytes:
            raise ModelFileError(
                f"{self.path} was cut short while it was being read, at tensor {info.name}; fetch it again"
            )
        rows = raw.reshape(*info.shape[:-1], -1)  # [..., bytes of a row]
        with np.errstate(
            all="ignore"
        ):  # scales of damaged blocks may overflow; the weights are then just as damaged
            values: npt.NDArray[np.float32] = gguf.quants.dequantize(rows, kind)
        return values.reshape(info.shape)


def _rows_in_halves(values: npt.NDArray[np.float32], head_dim: int) -> npt.NDArray[np.float32]:
    """Rows (0, d/2, 1, d/2+1, ...) of each head back to (0, 1, ..., d/2, d/2+1, ...)."""
    pairs = values.reshape(-1, head_dim // 2, 2, *values.shape[1:])  # [heads, d/2, 2, in]
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _stored(path: Path, config: ModelConfig, header: GgufHeader) -> dict[str, TensorInfo]:
    """Where each weight of the config lies; every one is there, of its shape and of a type that can be
    read.
    """
    wanted = config.weight_names()
    names = {name: gguf_name(config, name) for name in wanted}
    check_shapes(
        path,
        {n: t.shape for n, t in header.tensors.items()},
        {names[n]: shape for n, shape in wanted.items()},
    )
    unused = [
        n for n in header.tensors.keys() - set(names.values()) if n.startswith("blk.") and "rot" not in n
    ]
    if unused:
        raise ModelFileError(
            f"{path}: tensor {min(unused)} is not part of a {config.family} decoder; this variant is not supported"
        )
    stored = {name: header.tensors[names[name]] for name in wanted}
    for info in stored.values():
        _check_type(path, info)
    return stored


def _check_bounds(path: Path, header: GgufHeader) -> None:
    parts = header.metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise ModelFileError(f"{path} is one of {parts} parts; merge them into one GGUF file first")
    for info in header.tensors.values():
        end = header.data_start + info.offset + _num_bytes(path, info)
        if end > header.file_size:
            raise ModelFileError(
                f"{path} is truncated: tensor {info.name} ends at byte {end} of {header.file_size}; fetch it again"
            )


def _num_bytes(path: Path, info: TensorInfo) -> int:
    import gguf

    try:
        block, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(info.kind)]
    except (ValueError, KeyError) as error:
        raise ModelFileError(
            f"{path}: tensor {info.name} has the unknown quantization type {info.kind}; use another file"
        ) from error
    row = info.shape[-1] if info.shape else 1
    if row % block:
        raise ModelFileError(
            f"{path}: tensor {info.name} has rows of {row} values, no multiple of its block size {block}; fetch it again"
        )
    return math.prod(info.shape) // block * width


def _check_type(path: Path, info: TensorInfo) -> None:
    """Dequantize one block of zeros: the only way to ask whether gguf can read a type."""
    import gguf

    kind = gguf.GGMLQuantizationType(info.kind)
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError as error:
        raise ModelFileError(
            f"{path}: tensor {info.name} has type {kind.name}, which cannot be read; use another quantization"
        ) from error


def _end_ids(path: Path, metadata: dict[str, Any]) -> Iterator[int]:
    keys = Fields(str(path), metadata)
    for key in END_KEYS:
        yield from keys.token_ids(f"tokenizer.ggml.{key}_token_id")
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, list):
        yield from (
            i
            for i, (text, kind) in enumerate(zip(tokens, types, strict=False))
            if kind == CONTROL and text in END_TEXTS
        )
