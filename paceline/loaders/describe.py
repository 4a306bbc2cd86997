"""A model's description without its weights, for planning with models that are not here and might not fit.

Invariant: at most a config.json or the header of a GGUF file is read, and at most a config.json fetched.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from paceline.core.errors import ModelFileError, ModelNotFound
from paceline.loaders import hub
from paceline.loaders.fields import one_line, read_json
from paceline.models.config import ModelConfig

CONFIG = "config.json"


class Described(NamedTuple):
    name: str
    config: ModelConfig


def describe(model: str) -> Described:
    """A local folder, config.json or .gguf file, `default`, a shape's name, or a Hugging Face name."""
    local = hub.existing(model)
    if local is not None:
        return Described(hub.display_name(model), _local(local))
    default = hub.local_models()[0] if model.lower() in hub.DEFAULT_ALIASES else None
    if default is not None and default.is_here:
        return Described(default.name, _local(default.path))
    known = hub.HF_NAME.fullmatch(model)
    if known is not None:
        return Described(model, _local(_from_hub(known["repo"], known["file"])))
    return _shape(model if default is None else "smollm2-135m")


def _local(path: Path) -> ModelConfig:
    from paceline.loaders import gguf_config, hf_config
    from paceline.loaders.gguf_header import read_header

    if path.is_dir() and (path / CONFIG).is_file():
        path = path / CONFIG
    elif path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            found = f"no {CONFIG} and {len(files)} GGUF files"
            raise ModelFileError(f"{path} has {found}; name a {CONFIG} or one GGUF file")
        path = files[0]
    if path.suffix == ".json":
        return hf_config.read_config(str(path), read_json(path))
    return gguf_config.read_config(path, read_header(path))


def _from_hub(repo: str, file: str | None) -> Path:
    """The repository's config.json, fetched if need be, or a GGUF file of it that was fetched before."""
    import huggingface_hub

    if file is not None:
        here = huggingface_hub.try_to_load_from_cache(repo, file)
        if not isinstance(here, str):
            reason = "a GGUF file cannot be described without it"
            raise ModelNotFound(f"{repo}:{file} is not here, and {reason}; name {repo} or its original")
        return Path(here)
    try:
        return Path(huggingface_hub.hf_hub_download(repo, CONFIG))
    except Exception as error:  # the hub's errors have no common base, and all mean the same to the user
        failure = f"{CONFIG} of {repo} could not be fetched ({one_line(error)})"
        raise ModelNotFound(
            f"{failure}; check the name and the connection, or give a local {CONFIG}"
        ) from error


def _shape(name: str) -> Described:
    from paceline.loaders.dummy import SHAPES

    if name not in SHAPES:
        forms = f"a {CONFIG}, its folder, a .gguf file, 'default', a Hugging Face name"
        raise ModelNotFound(f"no model {name[:80]!r} here; give {forms}, or one of {', '.join(SHAPES)}")
    return Described(name, SHAPES[name])
