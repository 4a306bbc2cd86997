"""Paceline: lossless speculative decoding. A drafter rides ahead, the target checks, the text is the target's
own.

Heavy modules load on first use, so `import paceline` is quick. Names of vLLM stand beside ours where a call
means the same (docs/from_vllm.md).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline.core.errors import (
    ConfigError,
    GrammarError,
    ModelError,
    ModelFileError,
    ModelNotFound,
    PacelineError,
    ProcessorError,
    RequestError,
)
from paceline.core.params import RequestOutputKind, SamplingParams, StructuredOutputs

if TYPE_CHECKING:
    from paceline.api.async_llm import AsyncLLM
    from paceline.api.async_llm import AsyncLLM as AsyncLLMEngine
    from paceline.api.llm import LLM
    from paceline.api.options import EngineOptions
    from paceline.api.results import Completion as CompletionOutput
    from paceline.api.results import Logprob
    from paceline.api.results import Result as RequestOutput

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "ConfigError",
    "EngineArgs",
    "EngineOptions",
    "GrammarError",
    "GuidedDecodingParams",
    "Logprob",
    "ModelError",
    "ModelFileError",
    "ModelNotFound",
    "PacelineError",
    "ProcessorError",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputs",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]

StructuredOutputsParams = GuidedDecodingParams = StructuredOutputs
EngineArgs = AsyncEngineArgs = dict  # keywords of LLM and AsyncLLM
TextPrompt = TokensPrompt = dict  # {"prompt": text}, {"prompt_token_ids": [...]}
LAZY = {
    "LLM": "llm:LLM",
    "AsyncLLM": "async_llm:AsyncLLM",
    "AsyncLLMEngine": "async_llm:AsyncLLM",
    "EngineOptions": "options:EngineOptions",
    "RequestOutput": "results:Result",
    "CompletionOutput": "results:Completion",
    "Logprob": "results:Logprob",
}


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    module, _, owned = LAZY[name].partition(":")
    return getattr(import_module(f"paceline.api.{module}"), owned)
