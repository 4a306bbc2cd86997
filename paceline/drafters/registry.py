"""The drafters by name (a new one is one file and one line here), and the learned heads that are found by
themselves: shipped with us, or trained here and kept in the cache (heads/MODEL/KIND).

Invariant: such a head is opened only for the weights it was trained on, told by their hash; of any other
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
from paceline.loaders.hub import cache_dir
from paceline.loaders.mtp import dialect_of

if TYPE_CHECKING:
    from paceline.loaders.checkpoint import Checkpoint
    from paceline.models.config import ModelConfig

DRAFTERS = {
    "ngram": "paceline.drafters.ngram:Ngram",
    "suffix": "paceline.drafters.suffix:Suffix",
    "recycle": "paceline.drafters.recycle:Recycle",
    "draft_model": "paceline.drafters.draft_model:DraftModel",
    "universal": "paceline.drafters.universal:Universal",
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
FOR_BENCHMARKS = {"synthetic": "paceline.drafters.synthetic:Synthetic"}  # for `bench batch`; no server's

# Learned for one target: shipped with us, in a folder, or (mtp) in the target's own files.
HEADS = ("eagle", "eagle3", "mtp", "mlp_speculator", "draft", "medusa", "dflash")

SMALLER = ("draft_model", "universal")  # that run another model, which must be named

FOLDER = Path(__file__).parent.parent / "data" / "heads"
# shipped heads, the fastest first, as measured on a CPU with five tokens each; not yet measured on GPUs
SHIPPED = ("eagle", "dflash", "draft", "medusa")
LENGTH = 5  # tokens of the longest draft of one; the policy and the head's own doubts cut it
BURST_NODES = (15,)  # of trees that may take the place of such chains in a GPU's bursts (decision 09)

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
    known = {**DRAFTERS, **FOR_BENCHMARKS}
    if not isinstance(method, str) or method not in known:
        raise ConfigError(f"speculative_config method is {method!r}; {nearest(str(method), list(DRAFTERS))}")
    module, _, name = known[method].partition(":")
    kind: type[Drafter] = getattr(import_module(module), name)
    rest = {k: v for k, v in options.items() if k != "method"}
    return kind, from_options(kind.Config, rest, f"speculative_config of method {method!r}")


def create(kind: type[Drafter], config: DrafterConfig, context: DrafterContext) -> Drafter:
    return kind(config, context)


def kind_of(folder: object) -> str:
    """Of the head in a folder."""
    path = Path(folder) / "config.json" if isinstance(folder, str) else None
    kind = read_json(path).get("kind") if path is not None and path.is_file() else None
    remedy = f"use True, False, one of {', '.join(SHIPPED)}, or the folder of a head from paceline train"
    require(kind in SHIPPED, "speculative_config head", folder, remedy)
    return str(kind)


def head_for(target: Checkpoint, wanted: bool | str) -> dict[str, Any] | None:
    """The drafter of the best head for this target, as a speculative_config; None if there is none.
    wanted: False for none, the kind that it must be, or its folder."""
    if isinstance(wanted, str) and wanted not in SHIPPED:
        return _head(kind_of(wanted), model=wanted)
    kinds = (wanted,) if isinstance(wanted, str) else SHIPPED if wanted else ()
    found = next(((kind, at) for kind in kinds if (at := _find(kind, target))), None)
    if found is not None:
        return _head(found[0], model=str(found[1]))
    if isinstance(wanted, str):
        what = f"speculative_config head is {wanted!r}, and there is no such head for {target.name}"
        raise ConfigError(f"{what}; leave it out, name the folder of a head, or train one: paceline train")
    return _head("mtp") if wanted and dialect_of(target) else None


def _head(method: str, **more: str) -> dict[str, Any]:
    options = {"method": method, **more, "num_speculative_tokens": LENGTH}
    return options | {"burst_nodes": BURST_NODES} if method in ("eagle", "mtp") else options


def head_folder(kind: str, target: Checkpoint) -> str:
    """Where this target's head of this kind lies."""
    found = _find(kind, target)
    if found is None:
        remedy = "name the folder of a head as 'model', or train one: paceline train"
        if kind in SHIPPED and not (FOLDER / kind).is_dir():  # the wheel has only what "auto" uses
            remedy = f"{remedy}; the default model's is in the package paceline-heads"
        raise ConfigError(f"no {kind} head is shipped for {target.name}; {remedy}")
    return str(found)


def _find(kind: str, target: Checkpoint) -> Path | None:
    folders = (FOLDER / kind, *sorted((cache_dir() / "heads").glob(f"*/{kind}")))
    return next((folder for folder in folders if _belongs(folder, target)), None)


def is_alike(folder: Path, model: ModelConfig) -> bool:
    """Whether a head there has the model's sizes; that it is for its weights, only they can tell."""
    path = folder / "config.json"
    values = read_json(path) if path.is_file() else {}
    sizes = [values.get(name) for name in ("vocab_size", "hidden_size", "target_layers")]
    return sizes == [model.vocab_size, model.hidden_size, model.num_layers]


def _belongs(folder: Path, target: Checkpoint) -> bool:
    """Sizes are compared first, since the hash reads weights."""
    is_near = is_alike(folder, target.config)
    return is_near and read_json(folder / "config.json").get("target_hash") == target_hash(target)
