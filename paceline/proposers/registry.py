"""The drafters by name. A new one is one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from paceline.config import from_options, nearest
from paceline.errors import ConfigError
from paceline.proposers.base import DrafterConfig, Surroundings
from paceline.types import Proposer

DRAFTERS = {
    "ngram": "paceline.proposers.ngram:Ngram",
    "suffix": "paceline.proposers.suffix:Suffix",
    "recycle": "paceline.proposers.recycle:Recycle",
    "draft_model": "paceline.proposers.draft_model:DraftModel",
    "early_exit": "paceline.proposers.early_exit:EarlyExit",
    "eagle": "paceline.proposers.eagle:Eagle",
    "eagle3": "paceline.proposers.eagle:Eagle",  # as vLLM names it
    "mlp_speculator": "paceline.proposers.mlp_speculator:MlpSpeculator",
    "draft": "paceline.proposers.distilled:Distilled",
    "medusa": "paceline.proposers.medusa:Medusa",
    "dflash": "paceline.proposers.dflash:Dflash",
    "quantized": "paceline.proposers.quantized:Quantized",
    "lookahead": "paceline.proposers.lookahead:Lookahead",
    "staged": "paceline.proposers.staged:Staged",
    "hybrid": "paceline.proposers.hybrid:Hybrid",
}

# Learned for one target: shipped with us, or in a folder.
HEADS = ("eagle", "eagle3", "mlp_speculator", "draft", "medusa", "dflash")

# Whom "auto" asks: one that needs no training and runs no model. It says what it can; the policy chooses from it.
# Token recycling beside it gained nothing (docs/log.md) and costs host time.
AUTO: tuple[dict[str, Any], ...] = ({"method": "suffix", "num_speculative_tokens": 16, "suffix_decoding_min_token_prob": 0.1},)


def parse(options: Mapping[str, Any]) -> tuple[type[Any], DrafterConfig]:
    """The drafter's class and its checked config, before any model is loaded."""
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"speculative_config is {options!r}; give a dict such as {{'method': 'ngram', 'num_speculative_tokens': 3}}, or None"
        )
    method = options.get("method", "draft_model" if "model" in options else None)
    if isinstance(method, (list, tuple)):
        method, options = "hybrid", {**options, "drafters": method}
    if not isinstance(method, str) or method not in DRAFTERS:
        raise ConfigError(f"speculative_config method is {method!r}; {nearest(str(method), list(DRAFTERS))}")
    module, _, name = DRAFTERS[method].partition(":")
    kind = getattr(import_module(module), name)
    rest = {k: v for k, v in options.items() if k != "method"}
    return kind, from_options(kind.Config, rest, f"speculative_config of method {method!r}")


def create(kind: type[Any], config: DrafterConfig, surroundings: Surroundings) -> Proposer:
    proposer: Proposer = kind(config, surroundings)
    return proposer
