"""Opens a learned head for a target: our own format, or one of another project's (foreign_heads.py).

Invariant: what comes out fits the target, or it is an error that names both; a head in our format says by a
hash for which weights it was trained, one of another project is known by its sizes alone.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from paceline.core.errors import ModelFileError
from paceline.heads.config import HeadConfig, read_head_config
from paceline.heads.modules import tensor_shapes
from paceline.loaders import hub
from paceline.loaders.foreign_heads import read_foreign
from paceline.loaders.head_files import EXPECTED, Head, HeadFiles

if TYPE_CHECKING:
    from paceline.loaders.checkpoint import Checkpoint

log = logging.getLogger("paceline")


def open_head(model: str, target: Checkpoint, kinds: Sequence[str], progress: bool = True) -> Head:
    """The head in a folder (or of a Hugging Face name), of one of these kinds, for this target."""
    folder = hub.resolve(model, progress=progress)
    if not folder.is_dir():
        raise ModelFileError(f"{folder} is a model file where a head is expected; {EXPECTED}")
    files = HeadFiles(folder)
    if "paceline_head" in files.values:
        config = read_head_config(files.values, files.fields.source)
        check_target(config, target, files.where)
        head = Head(config, files.read(tensor_shapes(config)), files.where, "paceline")
    else:
        head = read_foreign(files, target)
    if head.config.kind not in kinds:
        found, wanted = repr(head.config.kind), " or ".join(map(repr, kinds))
        raise ModelFileError(f"{folder} holds a head of kind {found}, not {wanted}; use that method")
    _check(head, target)
    if not head.config.has_lm_head and head.config.kind in ("eagle", "dflash", "draft"):
        weight = target.tensor("embed_tokens.weight" if target.config.tie_embeddings else "lm_head.weight")
        ids = head.tensors.get("draft_ids")
        head.tensors["lm_head.weight"] = weight if ids is None else weight[ids]
    message = "%s: a %s head in the %s format, reading the target's layers %s"
    log.info(message, folder, head.config.kind, head.dialect, head.config.hidden_layers)
    return head


def _check(head: Head, target: Checkpoint) -> None:
    """The head's sizes are the target's, and its draft vocabulary lies inside the target's."""
    config, model, ids = head.config, target.config, head.tensors.get("draft_ids")
    sizes = {"hidden_size": model.hidden_size, "vocab_size": model.vocab_size}
    for name, size in (sizes | {"target_layers": model.num_layers}).items():
        if getattr(config, name) != size:
            made = f"this {config.kind} head was made for {config.target_name} with {name}"
            differs = f"{getattr(config, name)}, and {target.name} has {size}"
            raise ModelFileError(f"{head.where}: {made} {differs}; use a head of this target")
    if ids is None:
        return
    is_inside = int(ids.min()) >= 0 and int(ids.max()) < config.vocab_size
    if not is_inside or not bool((ids[1:] > ids[:-1]).all()):
        raise ModelFileError(f"{head.where}: draft tokens are not an ascending list; the file is damaged")


def target_hash(checkpoint: Checkpoint) -> str:
    """Which weights a head belongs to: sizes, the last norm, and the keys of the first and last layer."""
    config = checkpoint.config
    layers = (config.num_layers, config.num_heads, config.num_kv_heads)
    sizes = (config.family, config.vocab_size, config.hidden_size, *layers)
    digest = hashlib.sha256(repr(sizes).encode())
    for name in ("norm.weight", *(f"layers.{i}.self_attn.k_proj.weight" for i in (0, config.num_layers - 1))):
        digest.update(checkpoint.tensor(name).to(torch.float16).contiguous().numpy().tobytes())
    return digest.hexdigest()


def check_target(config: HeadConfig, checkpoint: Checkpoint, where: str) -> None:
    """A head only runs on the target it was trained for."""
    found = target_hash(checkpoint)
    if found != config.target_hash:
        raise ModelFileError(
            f"{where}: this {config.kind} head was trained for {config.target_name} "
            f"({config.target_hash[:12]}), not for {checkpoint.name} ({found[:12]}); "
            f"use a head of that target, or train one: paceline train {config.kind}"
        )
