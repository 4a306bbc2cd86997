"""Options that several verbs share, under one name and one help text. What they mean to the engine is in
parsing.py.

Invariant: an option left out is not passed on, so its default lives in one place, `SamplingParams` and `LLM`.
The exceptions are the two below: a person at a terminal wants livelier text than greedy and a safer one than
the whole distribution.
"""

from __future__ import annotations

from typing import Annotated

import typer

DEFAULT_TEMPERATURE = 0.7
DEFAULT_TOP_P = 0.95

_SAMPLING, _SPECULATION, _MEMORY = "Sampling", "Speculation", "Memory"

MODEL_HELP = "The default model, a local folder or .gguf file, or a Hugging Face name."
Model = Annotated[str, typer.Option("--model", "-m", help=MODEL_HELP)]
Dtype = Annotated[
    str,
    typer.Option(help="Of the weights: auto (int8 on CPUs, bfloat16 on GPUs), int8, int4, float32, float16."),
]
Device = Annotated[str, typer.Option(help="Where to run: auto (a GPU if there is one), cpu, cuda or cuda:N.")]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact", help="On a GPU, check drafts with the very arithmetic of plain decoding; CPUs always do."
    ),
]
LoadFormat = Annotated[
    str,
    typer.Option(
        help="dummy: random weights of the model's shape, without a download ('llama-8b' is a shape, too)."
    ),
]
System = Annotated[str | None, typer.Option(help="What the model is told before the conversation.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of text.")]

Temperature = Annotated[
    float, typer.Option(help="0 is greedy; higher is more varied.", rich_help_panel=_SAMPLING)
]
TopP = Annotated[
    float,
    typer.Option(
        help="Keep the smallest set of tokens with this share of probability; 1 keeps all.",
        rich_help_panel=_SAMPLING,
    ),
]
TopK = Annotated[int | None, typer.Option(help="Keep the k most likely tokens.", rich_help_panel=_SAMPLING)]
MinP = Annotated[
    float | None,
    typer.Option(help="Keep tokens at least this likely relative to the best.", rich_help_panel=_SAMPLING),
]
Seed = Annotated[
    int | None, typer.Option(help="Same seed, same text, with or without drafts.", rich_help_panel=_SAMPLING)
]
MaxTokens = Annotated[
    int | None,
    typer.Option(help="Stop after this many tokens. [dim]\\[default: 128][/dim]", rich_help_panel=_SAMPLING),
]
MinTokens = Annotated[
    int | None, typer.Option(help="Do not stop before this many tokens.", rich_help_panel=_SAMPLING)
]
Stop = Annotated[
    list[str] | None, typer.Option(help="Stop before this text; may be repeated.", rich_help_panel=_SAMPLING)
]
StopTokenId = Annotated[
    list[int] | None, typer.Option(help="Stop at this token; may be repeated.", rich_help_panel=_SAMPLING)
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on after the model's end token.", rich_help_panel=_SAMPLING)
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        help="Above 1: tokens of the prompt and the answer become less likely.", rich_help_panel=_SAMPLING
    ),
]
PresencePenalty = Annotated[
    float | None, typer.Option(help="Taken off each token already in the answer.", rich_help_panel=_SAMPLING)
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option(help="Taken off a token for each time it is in the answer.", rich_help_panel=_SAMPLING),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(help="ID=VALUE is added to that token's logit; may be repeated.", rich_help_panel=_SAMPLING),
]
BadWord = Annotated[
    list[str] | None, typer.Option(help="Never write this; may be repeated.", rich_help_panel=_SAMPLING)
]

Method = Annotated[
    str | None,
    typer.Option(
        help="Who drafts: auto (whoever pays, each step), suffix, ngram, recycle, lookahead, draft_model, early_exit, quantized, or none.",
        rich_help_panel=_SPECULATION,
    ),
]
NumSpeculative = Annotated[
    int | None,
    typer.Option(
        "--num-speculative-tokens",
        "-k",
        help="Always draft this many tokens; left out: as many as pay.",
        rich_help_panel=_SPECULATION,
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        help="The smaller model of --method draft_model, or a head's folder.", rich_help_panel=_SPECULATION
    ),
]
SpeculativeConfig = Annotated[
    str | None,
    typer.Option(
        help='All of it as JSON: {"method": "ngram", "prompt_lookup_max": 4}.', rich_help_panel=_SPECULATION
    ),
]

MaxModelLen = Annotated[
    int | None, typer.Option(help="Longest prompt and answer together, in tokens.", rich_help_panel=_MEMORY)
]
KvCacheDtype = Annotated[
    str,
    typer.Option(
        help="int8, on a GPU: half the memory for keys and values, rounded.", rich_help_panel=_MEMORY
    ),
]
KvCacheMemory = Annotated[
    str | None,
    typer.Option(
        help="For the KV cache: bytes, or a fraction of the free memory such as 0.2.", rich_help_panel=_MEMORY
    ),
]
