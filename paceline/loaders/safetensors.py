"""A Hugging Face folder: config.json, one or more .safetensors files, tokenizer.json.

Invariant: only safetensors are read, no pickle or code; shards lie inside the folder; opening checks every
tensor's name, type and shape. gemma's norms are stored as w and multiply as 1 + w: that is folded in here;
phi's projections are stored side by side: they are taken apart here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from paceline.core.errors import ModelFileError
from paceline.loaders import fields
from paceline.loaders.fields import ALL, Fields, check_weights, fingerprint, read_json, unique_ids
from paceline.loaders.hf_config import read_config
from paceline.loaders.tokenizer import TokenizerSource
from paceline.models.config import ModelConfig

PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")
HEADS = ("lm_head.weight", "language_model.lm_head.weight")
TYPES = ("F32", "F16", "BF16", "F64")
HEADER_BYTES = 1 << 20  # of each file that the fingerprint reads
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
FUSED = {
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj",
}  # fmt: skip


class StoredTensor(NamedTuple):
    file: Path
    dtype: str  # as safetensors spells it: "BF16"
    shape: tuple[int, ...]


class SafetensorsCheckpoint:
    """One model folder."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        if not (path / "config.json").is_file():
            remedy = "give a folder with config.json and .safetensors files, or a GGUF file"
            raise ModelFileError(f"{path} has no config.json; {remedy}")
        values = _optional_fields(path / "config.json")
        self.config: ModelConfig = read_config(values.source, values.values)
        files = weight_files(path)
        self._found = tensors_of(files)
        prefix = next((p for p in PREFIXES if p + "embed_tokens.weight" in self._found), "model.")
        head = next((head for head in HEADS if head in self._found), HEADS[0])
        self._names = {
            weight: head if weight == "lm_head.weight" else prefix + stored_name(self.config, weight)
            for weight in self.config.weight_names()
        }
        self._firsts, wanted = fields.place_rows(self.config, self._names)
        self._shapes = self.config.weight_names()
        check_weights(path, self.config, wanted, self._found, layers=prefix + "layers.")
        for tensor in wanted:
            if self._found[tensor].dtype not in TYPES:
                kind, known = self._found[tensor].dtype, ", ".join(TYPES)
                raise ModelFileError(f"{path}: tensor {tensor} has type {kind}; use one of {known}")
        self._tokenizer_config = _optional_fields(path / "tokenizer_config.json").values
        sections = [_optional_fields(path / "generation_config.json"), values, values.section("text_config")]
        self.eos_ids = self._token_ids("eos_token", sections)
        self.bos_id: int | None = next(iter(self._token_ids("bos_token", sections)), None)
        self.fingerprint = fingerprint([path / "config.json", *files], HEADER_BYTES)

    def tensor(self, name: str, rows: slice = ALL) -> torch.Tensor:
        """One weight, or some of its rows, as float32."""
        stored, count = self._names[name], self._shapes[name][0]
        if count < self._found[stored].shape[0]:
            rows = fields.rows_at(self._firsts[name], count, rows)
        weight = read_tensor(self._found[stored].file, stored, rows).to(torch.float32)
        return weight + 1 if self.config.family == "gemma3" and name.endswith("norm.weight") else weight

    def tokenizer_source(self) -> TokenizerSource:
        path, separate = self.path / "tokenizer.json", self.path / "chat_template.jinja"
        config, template = self._tokenizer_config, self._tokenizer_config.get("chat_template")
        if separate.is_file():
            template = separate.read_text(encoding="utf-8", errors="replace")
        elif isinstance(template, list):  # several templates, each with a name
            entries = [entry for entry in template if isinstance(entry, dict)]
            template = {entry.get("name"): entry.get("template") for entry in entries}.get("default")
        template = template if isinstance(template, str) else None
        json_path = path if path.is_file() else None
        return TokenizerSource(json_path, None, config, template, self.bos_id, self.eos_ids)

    def _token_ids(self, name: str, sections: list[Fields]) -> tuple[int, ...]:
        """The ids that the configs give a special token, then that of the text in tokenizer_config.json."""
        ids = [i for section in sections for i in section.token_ids(f"{name}_id")]
        text = _token_text(self._tokenizer_config.get(name))
        added = self._tokenizer_config.get("added_tokens_decoder")
        if text is not None and isinstance(added, dict):
            known = {i: _token_text(token) for i, token in added.items() if i.isdecimal() and len(i) < 10}
            ids += [int(i) for i, its_text in known.items() if its_text == text][:1]
        return unique_ids(ids, self.config.vocab_size)


def stored_name(config: ModelConfig, weight: str) -> str:
    """What transformers calls the tensor in which a weight is, or is a part."""
    parts = weight.split(".")
    if config.family == "phi3" and parts[-2] in FUSED:
        parts[-2] = FUSED[parts[-2]]
    return ".".join(parts)


def _token_text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _optional_fields(path: Path) -> Fields:
    return Fields(str(path), read_json(path) if path.is_file() else {})


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: those of the index where there is one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = Fields(str(index), read_json(index)).section("weight_map").values
        shards = sorted({str(name) for name in weight_map.values()})
        for shard in shards:
            if Path(shard).name != shard:
                raise ModelFileError(f"{index}: shard {shard!r} is not a plain file name; do not use it")
        files = [folder / shard for shard in shards]
    else:
        single = folder / "model.safetensors"  # other files beside it are copies in other layouts
        files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    for file in files:
        if not file.is_file():
            raise ModelFileError(f"{folder}: shard {file.name} is missing; fetch the model again")
    if not files:
        pickled = (f"only {file.name}" for file in sorted(folder.iterdir()) if file.suffix in PICKLED)
        remedy = "only .safetensors and .gguf weights are read, convert the model first"
        raise ModelFileError(f"{folder} has {next(pickled, 'no weights')}; {remedy}")
    return files


def tensors_of(files: list[Path]) -> dict[str, StoredTensor]:
    """Each tensor's file, type and shape, from the headers alone."""
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118  (not a dict: it cannot be iterated)
                    part = opened.get_slice(name)
                    tensors[name] = StoredTensor(file, part.get_dtype(), tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{file} is not a whole safetensors file ({error}); fetch it") from error
    return tensors


def read_tensor(file: Path, name: str, rows: slice = ALL) -> torch.Tensor:
    """One tensor, or some of its rows, in the type it is stored in."""
    try:
        with safe_open(file, framework="pt") as opened:
            return opened.get_tensor(name) if rows == ALL else opened.get_slice(name)[rows]
    except (SafetensorError, OSError) as error:
        raise ModelFileError(f"{file}: tensor {name} cannot be read ({error}); fetch it again") from error
