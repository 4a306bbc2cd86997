"""A model's description without its weights, for planning with models that are not here and might not even
fit.

Invariant: at most a config.json or the header of a GGUF file is read, and at most a config.json fetched.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from paceline.core.errors import ModelFileError, ModelNotFound
from paceline.models.config import ModelConfig

CONFIG = "config.json"


class Described(NamedTuple):
    name: str
    config: ModelConfig


def describe(model: str) -> Described:
    """A local folder, config.json or .gguf file, `default`, a shape's name, or a Hugging Face name."""
    from paceline.loaders import hub

    local = _existing(model)
    if local is not None:
        return Described(hub.display_name(model), _local(local))
    default = hub.local_models()[0] if model.lower() in hub.DEFAULT_ALIASES else None
    if default is not None and default.is_here:
        return Described(default.name, _gguf(default.path))
    known = hub.HF_NAME.fullmatch(model)
    if known is not None:
        return Described(model, _from_hub(known["repo"], known["file"]))
    return _shape(model if default is None else "smollm2-135m")


def _existing(model: str) -> Path | None:
    """None also where nothing can lie under such a name: empty, too long, or in the home of nobody."""
    try:
        path = Path(model).expanduser()
        return path if model.strip() and path.exists() else None
    except (OSError, RuntimeError):
        return None


def _local(path: Path) -> ModelConfig:
    if path.is_dir():
        if (path / CONFIG).is_file():
            return _json(path / CONFIG)
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            raise ModelFileError(
                f"{path} has no {CONFIG} and {len(files)} GGUF files; name a {CONFIG} or one GGUF file"
            )
        return _gguf(files[0])
    return _json(path) if path.suffix == ".json" else _gguf(path)


def _json(path: Path) -> ModelConfig:
    from paceline.loaders.fields import read_json
    from paceline.loaders.hf_config import read_config

    return read_config(str(path), read_json(path))


def _gguf(path: Path) -> ModelConfig:
    from paceline.loaders.gguf_config import read_config
    from paceline.loaders.gguf_header import read_header

    header = read_header(path)
    tensors = {
        name: info for name, info in header.tensors.items() if name != "rope_freqs.weight"
    }  # rotary details cost nothing
    return read_config(path, replace(header, tensors=tensors), tuple)


def _from_hub(repo: str, file: str | None) -> ModelConfig:
    import huggingface_hub

    if file is not None:
        here = huggingface_hub.try_to_load_from_cache(repo, file)
        if not isinstance(here, str):
            raise ModelNotFound(
                f"{repo}:{file} is not here, and a GGUF file cannot be described without it; name {repo} or its original"
            )
        return _gguf(Path(here))
    try:
        return _json(Path(huggingface_hub.hf_hub_download(repo, CONFIG)))
    except ModelFileError:
        raise
    except (
        Exception
    ) as error:  # the hub's errors have no common base, and each of them means the same to the user
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelNotFound(
            f"{CONFIG} of {repo} could not be fetched ({reason}); check the name and the connection, or give a local {CONFIG}"
        ) from error


def _shape(name: str) -> Described:
    from paceline.loaders.dummy import SHAPES

    if name not in SHAPES:
        known = ", ".join(SHAPES)
        raise ModelNotFound(
            f"no model {name[:80]!r} here; give a {CONFIG}, its folder, a .gguf file, 'default', a Hugging Face name, or one of {known}"
        )
    return Described(name, SHAPES[name])
