"""The drafters by name (a new one is one file and one line here), and the learned heads that are shipped.

Invariant: a shipped head is opened only for the weights it was trained on, told by their hash; of any other
model nothing is read for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError
from paceline.core.options import from_options, nearest, require
from paceline.drafters.base import Drafter, DrafterConfig, DrafterContext
from paceline.loaders.fields import read_json
from paceline.loaders.heads import target_hash
from paceline.loaders.mtp import dialect_of

if TYPE_CHECKING:
    from paceline.loaders.checkpoint import Checkpoint

DRAFTERS = {
    "ngram": "paceline.drafters.ngram:Ngram",
    "suffix": "paceline.drafters.suffix:Suffix",
    "recycle": "paceline.drafters.recycle:Recycle",
    "draft_model": "paceline.drafters.draft_model:DraftModel",
    "early_exit": "paceline.drafters.draft_model:EarlyExit",
    "eagle": "paceline.drafters.eagle:Eagle",
    "eagle3": "paceline.drafters.eagle:Eagle",  # as vLLM names it
    "mtp": "paceline.drafters.eagle:Mtp",
    "mlp_speculator": "paceline.drafters.eagle:MlpSpeculator",
    "draft": "paceline.drafters.eagle:Distilled",
    "medusa": "paceline.drafters.parallel:Medusa",
    "dflash": "paceline.drafters.parallel:Dflash",
    "quantized": "paceline.drafters.draft_model:Quantized",
    "lookahead": "paceline.drafters.lookahead:Lookahead",
    "staged": "paceline.drafters.staged:Staged",
    "hybrid": "paceline.drafters.hybrid:Hybrid",
}

# Learned for one target: shipped with us, in a folder, or (mtp) in the target's own files.
HEADS = ("eagle", "eagle3", "mtp", "mlp_speculator", "draft", "medusa", "dflash")

FOLDER = Path(__file__).parent.parent / "data" / "heads"
# shipped heads, the fastest first, as measured on a CPU with five tokens each; not yet measured on GPUs
SHIPPED = ("eagle", "dflash", "draft", "medusa")
LENGTH = 5  # tokens of the longest draft of one; the policy and the head's own doubts cut it

# What "auto" drafts with beside a shipped head: no training, no model; the policy chooses from its drafts.
# Token recycling beside it gained nothing and costs host time, see docs/decisions.
AUTO = {"method": "suffix", "num_speculative_tokens": 16, "suffix_decoding_min_token_prob": 0.1}


def parse(options: Mapping[str, Any]) -> tuple[type[Drafter], DrafterConfig]:
    """The drafter's class and its checked config, before any model is loaded."""
    remedy = "give a dict such as {'method': 'ngram', 'num_speculative_tokens': 3}, or None"
    require(isinstance(options, Mapping), "speculative_config", options, remedy)
    method = options.get("method", "draft_model" if "model" in options else None)
    if isinstance(method, (list, tuple)):
        method, options = "hybrid", {**options, "drafters": method}
    if not isinstance(method, str) or method not in DRAFTERS:
        raise ConfigError(f"speculative_config method is {method!r}; {nearest(str(method), list(DRAFTERS))}")
    module, _, name = DRAFTERS[method].partition(":")
    kind: type[Drafter] = getattr(import_module(module), name)
    rest = {k: v for k, v in options.items() if k != "method"}
    return kind, from_options(kind.Config, rest, f"speculative_config of method {method!r}")


def create(kind: type[Drafter], config: DrafterConfig, context: DrafterContext) -> Drafter:
    return kind(config, context)


def shipped_head(target: Checkpoint, wanted: bool | str) -> dict[str, Any] | None:
    """The drafter of the best shipped head for this target, as a speculative_config; None if there is none.
    wanted: False for none, or the kind that it must be."""
    kinds = (wanted,) if isinstance(wanted, str) else SHIPPED if wanted else ()
    found = next((kind for kind in kinds if _belongs(FOLDER / kind, target)), None)
    if found is None and isinstance(wanted, str):
        example = f"{{'method': ['suffix', {{'method': {wanted!r}, 'model': 'FOLDER'}}]}}"
        what = f"speculative_config head is {wanted!r}, and no such head is shipped for {target.name}"
        raise ConfigError(f"{what}; leave it out, or name a folder: {example}")
    if found is None:
        return {"method": "mtp", "num_speculative_tokens": LENGTH} if wanted and dialect_of(target) else None
    return {"method": found, "model": str(FOLDER / found), "num_speculative_tokens": LENGTH}


def shipped_folder(kind: str, target: Checkpoint) -> str:
    """Where the shipped head of this kind lies."""
    if not _belongs(FOLDER / kind, target):
        remedy = "name the folder of a head as 'model', or train one: paceline train"
        if kind in SHIPPED and not (FOLDER / kind).is_dir():  # the wheel has only what "auto" uses
            remedy = f"{remedy}; the default model's is in the package paceline-heads"
        raise ConfigError(f"no {kind} head is shipped for {target.name}; {remedy}")
    return str(FOLDER / kind)


def _belongs(folder: Path, target: Checkpoint) -> bool:
    """Sizes are compared first, since the hash reads weights."""
    if not (folder / "config.json").is_file():
        return False
    values, model = read_json(folder / "config.json"), target.config
    sizes = [values.get(name) for name in ("vocab_size", "hidden_size", "target_layers")]
    is_alike = sizes == [model.vocab_size, model.hidden_size, model.num_layers]
    return is_alike and values.get("target_hash") == target_hash(target)
