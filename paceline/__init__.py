"""Paceline: lossless speculative decoding. A drafter rides ahead, the target checks, the text is the target's
own.

Heavy modules load on first use, so `import paceline` is quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.core.errors import (
    ConfigError,
    GrammarError,
    ModelError,
    ModelFileError,
    ModelNotFound,
    PacelineError,
    RequestError,
)
from paceline.core.params import SamplingParams, StructuredOutputs

if TYPE_CHECKING:
    from paceline.api.llm import LLM
    from paceline.api.options import EngineOptions

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "ConfigError",
    "EngineOptions",
    "GrammarError",
    "ModelError",
    "ModelFileError",
    "ModelNotFound",
    "PacelineError",
    "RequestError",
    "SamplingParams",
    "StructuredOutputs",
]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from paceline.api.llm import LLM

        return LLM
    if name == "EngineOptions":
        from paceline.api.options import EngineOptions

        return EngineOptions
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
