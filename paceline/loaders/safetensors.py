"""A Hugging Face folder: config.json, one or more .safetensors files, tokenizer.json.

Invariant: only safetensors are read, no pickle or code; opening checks every tensor's name, type and shape.
gemma's norms are stored as w and multiply as 1 + w: that is folded in here. Where weights lie: places.py;
quantized ones: quantized/.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paceline.core.errors import ModelFileError
from paceline.loaders.fields import ALL, Fields, check_weights, fingerprint, read_fields, unique_ids
from paceline.loaders.hf_config import read_config
from paceline.loaders.places import Part, places_of
from paceline.loaders.quantized.formats import open_weights, plain_names, quantization_of
from paceline.loaders.quantized.parts import KeepingReader
from paceline.loaders.stored import TYPES, StoredTensor, read_part, tensors_of, weight_files
from paceline.loaders.tokenizer import TokenizerSource
from paceline.models.config import ModelConfig
from paceline.models.kept import Kept, stacked

PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")
HEADS = ("lm_head.weight", "language_model.lm_head.weight")
HEADER_BYTES = 1 << 20  # of each file that the fingerprint reads
# families whose norms are stored as w and multiply as 1 + w
OFFSET = ("gemma3", "qwen3_5", "qwen3_5_moe", "qwen3_next")


class SafetensorsCheckpoint:
    """One model folder."""

    stored: dict[str, StoredTensor]  # every tensor of its files, by its name there

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        if not (path / "config.json").is_file():
            remedy = "give a folder with config.json and .safetensors files, or a GGUF file"
            raise ModelFileError(f"{path} has no config.json; {remedy}")
        values = read_fields(path / "config.json")
        self.config: ModelConfig = read_config(values.source, values.values)
        files = weight_files(path)
        self.stored = tensors_of(files)
        there = plain_names(self.stored)
        prefix = next((p for p in PREFIXES if p + "embed_tokens.weight" in there), "model.")
        head = next((head for head in HEADS if head in there), HEADS[0])
        self._places = places_of(self.config, there, prefix, head)
        wanted = {name: place.shape for place in self._places.values() for name in place.tensors}
        self._readers, plain = open_weights(path, quantization_of(values), self.stored, wanted)
        check_weights(path, self.config, wanted, plain, layers=prefix + "layers.")
        for tensor in wanted:
            if tensor not in self._readers and self.stored[tensor].dtype not in TYPES:
                kind, known = self.stored[tensor].dtype, ", ".join(TYPES)
                raise ModelFileError(f"{path}: tensor {tensor} has type {kind}; use one of {known}")
        self._tokenizer_config = read_fields(path / "tokenizer_config.json", is_optional=True).values
        generation = read_fields(path / "generation_config.json", is_optional=True)
        sections = [generation, values, values.section("text_config")]
        self.eos_ids = self._token_ids("eos_token", sections)
        self.bos_id: int | None = next(iter(self._token_ids("bos_token", sections)), None)
        self.fingerprint = fingerprint([path / "config.json", *files], HEADER_BYTES)

    def tensor(self, name: str, rows: slice = ALL) -> torch.Tensor:
        """One weight, or some of its rows, as float32."""
        parts = [self._read(part).to(torch.float32) for part in self._places[name].parts(rows)]
        if not parts:  # no rows are asked for
            return self.tensor(name, slice(1))[:0]
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        if name.endswith("mlp.router_norm.weight"):  # gemma 4
            return weight * self.config.hidden_size**-0.5
        is_offset = self.config.family in OFFSET and name.endswith("norm.weight")
        return weight + 1 if is_offset and not name.endswith("linear_attn.norm.weight") else weight

    def kept(self, name: str, rows: slice = ALL) -> Kept | None:
        """The same as the files have it, where all of it is in FP8 or MXFP4."""
        found = list[Kept]()
        for part in self._places[name].parts(rows):
            reader = self._readers.get(part.tensor)
            span = slice(part.rows.start, part.rows.stop)
            if not isinstance(reader, KeepingReader) or (kept := reader.kept(span)) is None:
                return None
            found.append(kept)
        return stacked(found) if found else None

    def _read(self, part: Part) -> torch.Tensor:
        if (reader := self._readers.get(part.tensor)) is not None:
            return reader(slice(part.rows.start, part.rows.stop))
        return read_part(self.stored[part.tensor], part)

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
        return TokenizerSource(json_path, None, config, template, self.bos_id, self.eos_ids, self.path)

    def _token_ids(self, name: str, sections: list[Fields]) -> tuple[int, ...]:
        """The ids that the configs give a special token, then that of the text in tokenizer_config.json."""
        ids = [i for section in sections for i in section.token_ids(f"{name}_id")]
        text = _token_text(self._tokenizer_config.get(name))
        added = self._tokenizer_config.get("added_tokens_decoder")
        if text is not None and isinstance(added, dict):
            known = {i: _token_text(token) for i, token in added.items() if i.isdecimal() and len(i) < 10}
            ids += [int(i) for i, its_text in known.items() if its_text == text][:1]
        return unique_ids(ids, self.config.vocab_size)


def _token_text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
