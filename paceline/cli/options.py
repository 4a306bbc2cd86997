"""Options that several verbs share, under one name and one help text, and what they mean to the engine.

Invariant: an option left out is not passed on, so every default lives in one place, `SamplingParams` and `LLM`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.errors import ConfigError

MODEL_HELP = "The default model, a local folder or .gguf file, or a Hugging Face name."
Model = Annotated[str, typer.Option("--model", "-m", help=MODEL_HELP)]
Temperature = Annotated[
    float | None, typer.Option(help="0 is greedy; higher is more varied. [dim]\\[default: 1.0][/dim]", rich_help_panel="Sampling")
]
TopP = Annotated[
    float | None, typer.Option(help="Keep the smallest set of tokens with this share of probability.", rich_help_panel="Sampling")
]
TopK = Annotated[int | None, typer.Option(help="Keep the k most likely tokens.", rich_help_panel="Sampling")]
MinP = Annotated[float | None, typer.Option(help="Keep tokens at least this likely relative to the best.", rich_help_panel="Sampling")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text, with or without drafts.", rich_help_panel="Sampling")]
MaxTokens = Annotated[int | None, typer.Option(help="Stop after this many tokens. [dim]\\[default: 128][/dim]", rich_help_panel="Sampling")]
Stop = Annotated[list[str] | None, typer.Option(help="Stop before this text; may be repeated.", rich_help_panel="Sampling")]
Method = Annotated[
    str | None, typer.Option(help="Who drafts: ngram, draft_model, early_exit, quantized, or none.", rich_help_panel="Speculation")
]
NumSpeculative = Annotated[
    int | None, typer.Option("--num-speculative-tokens", "-k", help="Draft at most this many tokens a step.", rich_help_panel="Speculation")
]
DraftModel = Annotated[str | None, typer.Option(help="The smaller model of --method draft_model.", rich_help_panel="Speculation")]
SpeculativeConfig = Annotated[
    str | None, typer.Option(help='All of it as JSON: {"method": "ngram", "prompt_lookup_max": 4}.', rich_help_panel="Speculation")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of text.")]


def given(**options: Any) -> dict[str, Any]:
    """Only the options the user wrote."""
    return {name: value for name, value in options.items() if value is not None and value != []}


def speculative_config(
    config: str | None, method: str | None = None, num_speculative_tokens: int | None = None, draft_model: str | None = None
) -> dict[str, Any] | None:
    """The engine's dictionary from either spelling; None for plain decoding. The engine itself checks methods and keys."""
    short = given(method=method, model=draft_model, num_speculative_tokens=num_speculative_tokens)
    if config is not None:
        if short:
            raise ConfigError("--speculative-config and the shorthand --method, --draft-model, -k exclude each other; use one spelling")
        return parse_json_object("--speculative-config", config)
    if draft_model is not None:
        short.setdefault("method", "draft_model")
    if short and "method" not in short:
        raise ConfigError(f"-k is {num_speculative_tokens} but nobody drafts; add --method, for instance --method ngram")
    return None if short.get("method") in (None, "none") else short


def parse_json_object(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{option} is {text[:40]!r}, not JSON ({error.msg}); write an object like {{...}}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{option} is {text[:40]!r}; write a JSON object like {{...}}")
    return value


def file_or_text(value: str) -> str:
    """What the named file holds, or the value itself where there is no such file."""
    try:
        path = Path(value)
        return path.read_text(encoding="utf-8") if path.is_file() else value
    except OSError:  # longer than a file name may be: it is text
        return value
    except UnicodeDecodeError:
        raise ConfigError(f"{value}: is not UTF-8 text; save it as UTF-8") from None
