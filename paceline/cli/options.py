"""Options of the verbs, made from the fields of dataclasses: EngineOptions, and those declared here. What
they mean to the engine is in parsing.py.

Invariant: an option left out is not passed on, so its default lives in one place. The exceptions are the two
below: a person at a terminal wants livelier text than greedy and a safer one than the whole distribution.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from paceline.api.options import SPECULATION, EngineOptions
from paceline.core.options import Option, option, options_of, parsed

SAMPLING, STRUCTURE = "Sampling", "Structure"
LIVELY: dict[str, Any] = {"temperature": 0.7, "top_p": 0.95}
Given = dict[str, Any]  # the options that the user wrote, by name


@dataclass(frozen=True)
class Drafting:
    """The short spelling of speculative_config."""

    method: str | None = option(
        None,
        SPECULATION,
        "What drafts: auto (what pays, each step), suffix, ngram, recycle, lookahead, draft_model, "
        "early_exit, quantized, or none.",
    )
    num_speculative_tokens: int | None = option(
        None, SPECULATION, "Always draft this many tokens; left out: as many as pay.", "-k"
    )
    draft_model: str | None = option(
        None, SPECULATION, "The smaller model of --method draft_model, or a head's folder."
    )


@dataclass(frozen=True)
class Sampling:
    temperature: float = option(LIVELY["temperature"], SAMPLING, "0 is greedy; higher is more varied.")
    top_p: float = option(
        LIVELY["top_p"],
        SAMPLING,
        "Keep the smallest set of tokens with this share of probability; 1 keeps all.",
    )
    top_k: int | None = option(None, SAMPLING, "Keep the k most likely tokens.")
    min_p: float | None = option(None, SAMPLING, "Keep tokens at least this likely relative to the best.")
    seed: int | None = option(None, SAMPLING, "Same seed, same text, with or without drafts.")
    stop: tuple[str, ...] = option((), SAMPLING, "Stop before this text; may be repeated.")
    max_tokens: int = option(128, SAMPLING, "Stop after this many tokens.")
    min_tokens: int | None = option(None, SAMPLING, "Do not stop before this many tokens.")
    stop_token_id: tuple[int, ...] = option((), SAMPLING, "Stop at this token; may be repeated.")
    ignore_eos: bool = option(False, SAMPLING, "Go on after the model's end token.")
    repetition_penalty: float | None = option(
        None, SAMPLING, "Above 1: tokens of the prompt and the answer become less likely."
    )
    presence_penalty: float | None = option(None, SAMPLING, "Taken off each token already in the answer.")
    frequency_penalty: float | None = option(
        None, SAMPLING, "Taken off a token for each time it is in the answer."
    )
    logit_bias: tuple[str, ...] = option(
        (), SAMPLING, "ID=VALUE is added to that token's logit; may be repeated."
    )
    bad_word: tuple[str, ...] = option((), SAMPLING, "Never write this; may be repeated.")
    n: int | None = option(None, SAMPLING, "How many answers.", "-n")
    logprobs: int | None = option(None, SAMPLING, "Report this many likely tokens beside each (in --json).")
    json_schema: str | None = option(None, STRUCTURE, "A JSON schema: a file or the text.")
    regex: str | None = option(None, STRUCTURE, "The answer matches this expression.")
    choice: tuple[str, ...] = option((), STRUCTURE, "The answer is one of these; repeat it.")
    grammar: str | None = option(None, STRUCTURE, "A Lark grammar: a file or the text.")


def flag(setting: Option) -> Any:
    """An annotation for Typer. Where the flag is left out the value is None: the default is the field's."""
    each, kind = setting
    name, default = each.name.replace("_", "-"), each.default
    shown = str(default).lower() if isinstance(default, bool) else default
    text = each.metadata["help"] + ("" if default in (None, (), "") else f" [dim]\\[default: {shown}][/dim]")
    long = f"--{name}/--no-{name}" if kind is bool else f"--{name}"
    more: dict[str, Any] = {"help": text, "show_default": False}
    more |= {key: each.metadata[key] for key in ("min", "envvar") if key in each.metadata}
    if each.metadata.get("is_argument"):
        made = typer.Argument(**more)
    else:
        panel = each.metadata["panel"]
        made = typer.Option(long, *each.metadata["flags"], rich_help_panel=panel, **more)
    lists = {tuple[str, ...]: list[str], tuple[int, ...]: list[int], tuple[float, ...]: list[float]}
    plain = next((each for each in (bool, int, float, Path) if kind in (each, each | None)), str)
    return Annotated[lists.get(kind, plain) | None, made]


def as_command(owner: type, run: Callable[[Any], None]) -> Callable[..., None]:
    """A command that calls `run` with one value of a dataclass: its fields are the options, its docstring is
    the help."""

    def verb(given: Given) -> None:
        run(owner(**given))

    verb.__annotations__ = {"given": Annotated[Given, options_of(owner)]}
    verb.__doc__ = owner.__doc__
    return with_options(verb)


def with_options(verb: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters annotated `Annotated[Given, options]` become one flag for each option; the
    verb gets a dict of those that were written, as values of their fields' types."""
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, list[Option]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(verb).parameters.items():
        kind, *more = get_args(hints[name]) or (None,)
        keyword: Any = {"kind": inspect.Parameter.KEYWORD_ONLY}
        if kind == Given:
            groups[name] = more[0]
            made = [
                inspect.Parameter(each.name, annotation=flag((each, k)), default=None, **keyword)
                for each, k in more[0]
            ]
            parameters += made
        else:
            parameters.append(parameter.replace(annotation=hints[name], **keyword))

    def command(**values: Any) -> None:
        for group, settings in groups.items():
            values[group] = _written(settings, values)
        verb(**values)

    command.__name__, command.__doc__ = verb.__name__, verb.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _written(settings: Sequence[Option], values: dict[str, Any]) -> Given:
    """Takes out of `values` what the user wrote for these options."""
    written: Given = {}
    for each, kind in settings:
        value = values.pop(each.name)
        if isinstance(value, list) and value:
            written[each.name] = tuple(value)
        elif isinstance(value, Path):
            written[each.name] = value
        elif value not in (None, []):
            written[each.name] = parsed("--" + each.name.replace("_", "-"), value, kind)
    return written


def _help(name: str) -> str:
    return str(options_of(EngineOptions, name)[0][0].metadata["help"])


Engine = Annotated[Given, [*options_of(EngineOptions), *options_of(Drafting)]]
LOADING = options_of(EngineOptions, "model", "dtype", "device", "exact")
Sampled = Annotated[Given, options_of(Sampling)]
MODEL_HELP = _help("model")
Model = Annotated[str, typer.Option("--model", "-m", help=MODEL_HELP)]
Dtype = Annotated[str, typer.Option(help=_help("dtype"))]
Device = Annotated[str, typer.Option(help=_help("device"))]
Exact = Annotated[bool, typer.Option("--exact", help=_help("exact"))]
DraftModel = flag(options_of(Drafting, "draft_model")[0])
System = Annotated[str | None, typer.Option(help="What the model is told before the conversation.")]
Raw = Annotated[
    bool, typer.Option("--raw", help="Give the prompt to the model as it is, without the chat template.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of text.")]
