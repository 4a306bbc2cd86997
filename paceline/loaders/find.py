"""What can be learned of a model without its weights: by its path, or by its name on Hugging Face.

Invariant: no weights are fetched. Of a Hugging Face name only config.json and the index of its weights are;
of a model on this machine, headers are read and checked as they are for running it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

from paceline.core.errors import ModelFileError, ModelNotFound
from paceline.loaders import gguf_header, hf_config, hub
from paceline.loaders.checkpoint import CONFIG, Checkpoint, describe, open_checkpoint
from paceline.loaders.fields import Fields, read_fields
from paceline.loaders.gguf_parts import main_type, models_among, part_names, part_paths, read_parts
from paceline.loaders.quantized.formats import quantization_of
from paceline.models.config import ModelConfig

INDEX = "model.safetensors.index.json"
TEXTS = {"tokenizer.json": "tokenizer.ggml.tokens", "chat_template.jinja": "tokenizer.chat_template"}
MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers")


class Found(NamedTuple):
    """What could be learned of a model without its weights."""

    name: str
    kind: str  # gguf, safetensors, or shape
    problems: list[str]
    values: Fields = Fields("", {})  # config.json, or what a GGUF header says in its words
    config: ModelConfig | None = None
    checkpoint: Checkpoint | None = None
    files: frozenset[str] | None = None  # names of its files (of GGUF: of what stands for them) or None
    num_bytes: int | None = None
    quantization: str | None = None


def find(model: str) -> Found:
    known, local = hub.HF_NAME.fullmatch(model), {m.name: m.path for m in hub.local_models() if m.is_here}
    is_default = model.lower() in hub.DEFAULT_ALIASES
    here = hub.existing(model) or local.get(hub.DEFAULT_MODEL if is_default else model)
    if here is not None:
        return _on_disk(hub.weights_at(here) if here.suffix != ".json" else here, hub.display_name(model))
    if known is not None:
        file = known["file"]
        return _on_the_hub(known["repo"]) if file is None else _gguf_on_the_hub(known["repo"], file)
    name, config = describe(model)  # a shape's name, the default before it is fetched; all else is an error
    return Found(name, "shape", [], config=config)


def _on_disk(path: Path, name: str) -> Found:
    """A .gguf file, a folder, or a config.json."""
    if path.is_dir() and not (path / CONFIG).is_file():
        raise ModelFileError(f"{path} has no {CONFIG} and no GGUF file; give a folder with one of them")
    if path.suffix == ".json":
        return _described(Found(name, "safetensors", [], read_fields(path)))
    files = frozenset(file.name for file in path.iterdir()) if path.is_dir() else frozenset([path.name])
    weights = part_paths(path) if path.is_file() else list(path.glob("*.safetensors"))
    found = Found(name, "gguf" if path.is_file() else "safetensors", [], files=files)
    found = found._replace(num_bytes=sum(file.stat().st_size for file in weights if file.is_file()))
    try:
        if path.is_dir():
            found = _described(found._replace(values=read_fields(path / CONFIG)))
        else:
            found = found._replace(values=_header(path), quantization=main_type(path))
        checkpoint = open_checkpoint(str(path), progress=False)
    except ModelFileError as error:
        return found._replace(problems=found.problems or [str(error)])
    return found._replace(config=checkpoint.config, checkpoint=checkpoint)


def _on_the_hub(repo: str) -> Found:
    try:
        values = read_fields(hub.from_hub(repo, CONFIG, progress=False))
    except ModelNotFound as error:
        if hub.is_offline(error):
            raise
        known = models_among(name for name in hub.file_names(repo) or () if name.endswith(".gguf"))
        if len(known) == 1:
            return _gguf_on_the_hub(repo, known[0])
        remedy = f"name one of its GGUF files, such as {repo}:{known[0]}" if known else "choose another model"
        raise ModelNotFound(f"{repo} has no {CONFIG}; {remedy}") from error
    files = hub.file_names(repo)
    found = _described(Found(repo, "safetensors", [], values, files=files))
    if files is not None and not any(name.endswith(".safetensors") for name in files):
        remedy = "no others are read, choose another model"
        found.problems.append(f"{repo} has no .safetensors files; {remedy}")
    if files is None or INDEX not in files:
        return found
    size = read_fields(hub.from_hub(repo, INDEX, progress=False)).section("metadata").get("total_size")
    return found._replace(num_bytes=int(size) if isinstance(size, int | float) else None)


def _gguf_on_the_hub(repo: str, file: str) -> Found:
    """From the headers of its parts alone."""
    found, size = Found(f"{repo}:{file}", "gguf", []), 0
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / Path(part).name for part in part_names(file)]
        for path, part in zip(paths, part_names(file), strict=True):
            size += hub.fetch_header(repo, part, path)
        try:
            header, values = read_parts(paths[0]).header, _header(paths[0])
            files = frozenset(name for name, key in TEXTS.items() if key in header.metadata)
            found = found._replace(num_bytes=size, values=values, files=files)
            found = found._replace(quantization=main_type(paths[0]))
            return found._replace(config=gguf_header.read_config(Path(file), header))
        except ModelFileError as error:
            return found._replace(problems=[str(error).replace(folder, repo)])


def _header(path: Path) -> Fields:
    metadata = read_parts(path).header.metadata
    arch = metadata.get("general.architecture")
    return Fields(str(path), {"model_type": arch, MTP_KEYS[0]: metadata.get(f"{arch}.nextn_predict_layers")})


def _described(found: Found) -> Found:
    """What config.json says, with what in it is not supported."""
    problems, config, kind = list(found.problems), None, None
    try:
        config = hf_config.read_config(found.values.source, found.values.values)
    except ModelFileError as error:
        problems.append(str(error))
    try:
        quantization = quantization_of(found.values)
        kind = quantization.name if quantization is not None else None
    except ModelFileError as error:
        problems.append(str(error))
    return found._replace(problems=problems, config=config, quantization=kind)
