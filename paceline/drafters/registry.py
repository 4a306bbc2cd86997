"""The drafters by name. A new one is one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.options import from_options, nearest
from paceline.drafters.base import Drafter, DrafterConfig, DrafterContext

DRAFTERS = {
    "ngram": "paceline.drafters.ngram:Ngram",
    "suffix": "paceline.drafters.suffix:Suffix",
    "recycle": "paceline.drafters.recycle:Recycle",
    "draft_model": "paceline.drafters.draft_model:DraftModel",
    "early_exit": "paceline.drafters.draft_model:EarlyExit",
    "eagle": "paceline.drafters.eagle:Eagle",
    "eagle3": "paceline.drafters.eagle:Eagle",  # as vLLM names it
    "mlp_speculator": "paceline.drafters.eagle:MlpSpeculator",
    "draft": "paceline.drafters.eagle:Distilled",
    "medusa": "paceline.drafters.medusa:Medusa",
    "dflash": "paceline.drafters.dflash:Dflash",
    "quantized": "paceline.drafters.draft_model:Quantized",
    "lookahead": "paceline.drafters.lookahead:Lookahead",
    "staged": "paceline.drafters.staged:Staged",
    "hybrid": "paceline.drafters.hybrid:Hybrid",
}

# Learned for one target: shipped with us, or in a folder.
HEADS = ("eagle", "eagle3", "mlp_speculator", "draft", "medusa", "dflash")

# What "auto" drafts with beside a shipped head: no training, no model; the policy chooses from its drafts.
# Token recycling beside it gained nothing and costs host time, see docs/decisions.
AUTO = {"method": "suffix", "num_speculative_tokens": 16, "suffix_decoding_min_token_prob": 0.1}


def parse(options: Mapping[str, Any]) -> tuple[type[Drafter], DrafterConfig]:
    """The drafter's class and its checked config, before any model is loaded."""
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"speculative_config is {options!r}; "
            f"give a dict such as {{'method': 'ngram', 'num_speculative_tokens': 3}}, or None"
        )
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
