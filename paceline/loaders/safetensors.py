"""A Hugging Face folder: config.json, one or more .safetensors files, tokenizer.json.

Invariant: only safetensors are read, never pickled weights or code; shards lie inside the folder; opening
checks every tensor's name, type and shape against the config. gemma's norm weights are stored as w and
multiply as 1 + w: that is folded in here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ModelFileError
from paceline.loaders.checkpoint import TokenizerSource, check_shapes, fingerprint, unique_ids
from paceline.loaders.fields import Fields, read_json
from paceline.loaders.hf_config import read_config
from paceline.models.config import ModelConfig

if TYPE_CHECKING:
    import torch

PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")
HEADS = ("lm_head.weight", "language_model.lm_head.weight")
TYPES = ("F32", "F16", "BF16", "F64")
HEADER_BYTES = 1 << 20  # of each file that the fingerprint reads
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


class SafetensorsCheckpoint:
    """One model folder."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        if not (path / "config.json").is_file():
            raise ModelFileError(
                f"{path} has no config.json; give a folder with config.json and .safetensors files, or a GGUF file"
            )
        values = read_json(path / "config.json")
        self.config: ModelConfig = read_config(str(path / "config.json"), values)
        files = weight_files(path)
        self._stored = _stored(path, self.config, tensors_of(files))
        self._tokenizer_config = _optional_json(path / "tokenizer_config.json")
        generation = Fields(
            str(path / "generation_config.json"), _optional_json(path / "generation_config.json")
        )
        sections = [generation, Fields(str(path / "config.json"), values)]
        sections += [sections[1].section("text_config")]
        ends = [i for section in sections for i in section.token_ids("eos_token_id")]
        self.eos_ids = unique_ids([*ends, self._named_token("eos_token")], self.config.vocab_size)
        starts = [i for section in sections for i in section.token_ids("bos_token_id")]
        bos = unique_ids([*starts, self._named_token("bos_token")], self.config.vocab_size)
        self.bos_id: int | None = bos[0] if bos else None
        self.fingerprint = fingerprint([path / "config.json", *files], HEADER_BYTES)

    def tensor(self, name: str) -> torch.Tensor:
        """One weight as float32."""
        import torch
        from safetensors import SafetensorError, safe_open

        assert name in self._stored, f"{name} is not a weight of this config"
        file, stored_name = self._stored[name]
        try:
            with safe_open(file, framework="pt") as tensors:
                weight: torch.Tensor = tensors.get_tensor(stored_name).to(torch.float32)
        except (SafetensorError, OSError) as error:
            raise ModelFileError(
                f"{file}: tensor {stored_name} cannot be read ({error}); fetch the file again"
            ) from error
        return weight + 1 if self.config.family == "gemma3" and name.endswith("norm.weight") else weight

    def tokenizer_source(self) -> TokenizerSource:
        json_path = self.path / "tokenizer.json"
        return TokenizerSource(
            json_path=json_path if json_path.is_file() else None,
            config=self._tokenizer_config,
            chat_template=self._chat_template(),
            bos_id=self.bos_id,
            eos_ids=self.eos_ids,
        )

    def _chat_template(self) -> str | None:
        separate = self.path / "chat_template.jinja"
        if separate.is_file():
            return separate.read_text(encoding="utf-8", errors="replace")
        template = self._tokenizer_config.get("chat_template")
        if isinstance(template, list):  # several templates, each with a name
            named = {
                entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)
            }
            template = named.get("default")
        return template if isinstance(template, str) else None

    def _named_token(self, key: str) -> int | None:
        """The id of a token that tokenizer_config.json gives as text."""
        text = _token_text(self._tokenizer_config.get(key))
        added = self._tokenizer_config.get("added_tokens_decoder")
        if text is None or not isinstance(added, dict):
            return None
        return next(
            (
                int(i)
                for i, token in added.items()
                if i.isdecimal() and len(i) < 10 and _token_text(token) == text
            ),
            None,
        )


def _token_text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: those of the index where there is one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(
            {str(name) for name in Fields(str(index), read_json(index)).section("weight_map").values.values()}
        )
        for shard in shards:
            if Path(shard).name != shard:
                raise ModelFileError(
                    f"{index}: shard {shard!r} is not a plain file name in the folder; do not use this model"
                )
        files = [folder / shard for shard in shards]
    else:
        single = folder / "model.safetensors"  # other files beside it are copies in other layouts
        files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        raise ModelFileError(f"{folder}: shard {missing.name} is missing; fetch the model again")
    if not files:
        pickled = next((file.name for file in sorted(folder.iterdir()) if file.suffix in PICKLED), None)
        found = f"only {pickled}" if pickled else "no weights"
        raise ModelFileError(
            f"{folder} has {found}; only .safetensors and .gguf weights are read, convert the model first"
        )
    return files


def tensors_of(files: list[Path]) -> dict[str, tuple[Path, str, tuple[int, ...]]]:
    """Each tensor's file, type and shape, from the headers alone."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, tuple[Path, str, tuple[int, ...]]] = {}
    for file in files:
        try:
            with safe_open(file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118  (not a dict: it cannot be iterated)
                    part = opened.get_slice(name)
                    tensors[name] = file, part.get_dtype(), tuple(part.get_shape())
        except (SafetensorError, OSError) as error:
            raise ModelFileError(
                f"{file} is not a whole safetensors file ({error}); fetch it again"
            ) from error
    return tensors


def _stored(
    path: Path, config: ModelConfig, tensors: dict[str, tuple[Path, str, tuple[int, ...]]]
) -> dict[str, tuple[Path, str]]:
    """Canonical name -> file and stored name of every weight the config asks for."""
    prefix = next((p for p in PREFIXES if p + "embed_tokens.weight" in tensors), "model.")
    head = next((name for name in HEADS if name in tensors), HEADS[0])
    wanted = config.weight_names()
    names = {name: head if name == "lm_head.weight" else prefix + name for name in wanted}
    check_shapes(
        path,
        {n: shape for n, (_, _, shape) in tensors.items()},
        {names[n]: shape for n, shape in wanted.items()},
    )
    unused = [
        n
        for n in tensors.keys() - set(names.values())
        if n.startswith(prefix + "layers.") and "rotary_emb" not in n
    ]
    if unused:
        raise ModelFileError(
            f"{path}: tensor {min(unused)} is not part of a {config.family} decoder; this variant is not supported"
        )
    for name in names.values():
        if tensors[name][1] not in TYPES:
            raise ModelFileError(
                f"{path}: tensor {name} has type {tensors[name][1]}, which is not read; use one of {', '.join(TYPES)}"
            )
    return {name: (tensors[stored][0], stored) for name, stored in names.items()}
