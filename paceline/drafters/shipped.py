"""The learned heads that come with the package: which of them "auto" uses for a target.

Invariant: a head is opened only for the weights it was trained on, told by their hash; of any other model
nothing is read for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError
from paceline.loaders.fields import read_json

if TYPE_CHECKING:
    from paceline.loaders.checkpoint import Checkpoint

FOLDER = Path(__file__).parent.parent / "data" / "heads"
# the fastest first, as measured on a CPU with five tokens each; not yet measured on GPUs
KINDS = ("eagle", "dflash", "draft", "medusa")
LENGTH = 5  # tokens of its longest draft; the policy and the head's own doubts cut it


def shipped_head(target: Checkpoint, wanted: bool | str) -> dict[str, Any] | None:
    """The drafter of the best shipped head for this target, as a speculative_config; None if there is none.
    wanted: False for none, or the kind that it must be."""
    if wanted is False:
        return None
    kinds = KINDS if wanted is True else (wanted,)
    found = next((kind for kind in kinds if _belongs(FOLDER / kind, target)), None)
    if found is None and wanted is not True:
        raise ConfigError(
            f"speculative_config head is {wanted!r}, and no such head is shipped for {target.name}; "
            f"leave it out, or name a folder: "
            f"{{'method': ['suffix', {{'method': {wanted!r}, 'model': 'FOLDER'}}]}}"
        )
    if found is None:
        return None
    return {"method": found, "model": str(FOLDER / found), "num_speculative_tokens": LENGTH}


def folder_of(kind: str, target: Checkpoint) -> str:
    """Where the shipped head of this kind lies."""
    if not _belongs(FOLDER / kind, target):
        raise ConfigError(
            f"no {kind} head is shipped for {target.name}; name the folder of a head as 'model', "
            f"or train one: paceline train"
        )
    return str(FOLDER / kind)


def _belongs(folder: Path, target: Checkpoint) -> bool:
    """Sizes are compared first, since the hash reads weights."""
    from paceline.heads.config import target_hash

    if not (folder / "config.json").is_file():
        return False
    values, model = read_json(folder / "config.json"), target.config
    sizes = [values.get(name) for name in ("vocab_size", "hidden_size", "target_layers")]
    is_alike = sizes == [model.vocab_size, model.hidden_size, model.num_layers]
    return is_alike and values.get("target_hash") == target_hash(target)
