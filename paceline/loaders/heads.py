"""Opens a learned head for a target: our own format, and those of other projects, told apart by what their
config says.

Invariant: what comes out fits the target, or it is an error that names both; a head in our format says by a
hash for which weights it was trained, one of another project is known by its sizes alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from paceline.core.errors import ModelFileError
from paceline.heads.config import HeadConfig, check_target, read_head_config
from paceline.heads.modules import tensor_shapes
from paceline.loaders.head_files import EXPECTED, Head, HeadFiles

if TYPE_CHECKING:
    import torch

    from paceline.loaders.checkpoint import Checkpoint

log = logging.getLogger("paceline")


class Dialect(Protocol):
    """One module for each family of formats."""

    def matches(self, files: HeadFiles) -> bool: ...
    def read(self, files: HeadFiles, target: Checkpoint) -> Head: ...


def open_head(model: str, target: Checkpoint, kinds: Sequence[str], progress: bool = True) -> Head:
    """The head in a folder (or of a Hugging Face name), of one of these kinds, for this target."""
    from paceline.loaders import hub

    folder = hub.resolve(model, progress=progress)
    if not folder.is_dir():
        raise ModelFileError(f"{folder} is a model file where a head is expected; {EXPECTED}")
    head = _read(HeadFiles(folder), target)
    if head.config.kind not in kinds:
        found, wanted = repr(head.config.kind), " or ".join(map(repr, kinds))
        raise ModelFileError(f"{folder} holds a head of kind {found}, not {wanted}; use that method")
    _check_sizes(head.config, target, head.where)
    _check_ids(head)
    if not head.config.has_lm_head and head.config.kind in ("eagle", "dflash", "draft"):
        head.tensors["lm_head.weight"] = _output_rows(target, head.tensors.get("draft_ids"))
    message = "%s: a %s head in the %s format, reading the target's layers %s"
    log.info(message, folder, head.config.kind, head.dialect, head.config.hidden_layers)
    return head


def _read(files: HeadFiles, target: Checkpoint) -> Head:
    if "paceline_head" in files.values:
        config = read_head_config(files.values, str(files.folder / "config.json"))
        check_target(config, target, files.where)
        return Head(config, files.read(tensor_shapes(config)), files.where, "paceline")
    for dialect in _dialects():
        if dialect.matches(files):
            return dialect.read(files, target)
    shown = files.values.get("architectures") or files.values.get("model_type")
    raise ModelFileError(
        f"{files.folder} is not a head that is known (architectures {shown!r}); use one of paceline train, "
        "EAGLE, Medusa, DFlash or an MLP speculator"
    )


def _dialects() -> list[Dialect]:
    from paceline.loaders import heads_dflash, heads_eagle, heads_medusa, heads_mlp

    return [heads_dflash, heads_medusa, heads_mlp, heads_eagle]


def _check_sizes(config: HeadConfig, target: Checkpoint, where: str) -> None:
    model = target.config
    sizes = {"hidden_size": model.hidden_size, "vocab_size": model.vocab_size}
    for name, size in (sizes | {"target_layers": model.num_layers}).items():
        if getattr(config, name) != size:
            raise ModelFileError(
                f"{where}: this {config.kind} head was made for {config.target_name} with {name} "
                f"{getattr(config, name)}, and {target.name} has {size}; use a head of this target"
            )


def _check_ids(head: Head) -> None:
    ids = head.tensors.get("draft_ids")
    if ids is None:
        return
    is_inside = int(ids.min()) >= 0 and int(ids.max()) < head.config.vocab_size
    if not is_inside or not bool((ids[1:] > ids[:-1]).all()):
        what = "the draft vocabulary is not an ascending list of the target's tokens"
        raise ModelFileError(f"{head.where}: {what}; the file is damaged")


def _output_rows(target: Checkpoint, ids: torch.Tensor | None) -> torch.Tensor:
    weight = target.tensor("embed_tokens.weight" if target.config.tie_embeddings else "lm_head.weight")
    return weight if ids is None else weight[ids]
