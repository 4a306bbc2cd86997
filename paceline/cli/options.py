"""Options of the verbs: fields of dataclasses. A verb is a function of one such value; its docstring is the
help. Invariant: an option left out is not passed on, so its default lives in one place (LIVELY is the
exception, for a person wants livelier text than greedy); what cannot be understood is refused before a model
is read.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from paceline import SamplingParams, StructuredOutputs
from paceline.api.options import SPECULATION, EngineOptions
from paceline.core.errors import ConfigError
from paceline.core.options import Option, json_object, option, options_of, parsed
from paceline.measure.options import DRAFT_MODEL_HELP
from paceline.measure.prompts import text_of

MAIN, SAMPLING, STRUCTURE = "Options", "Sampling", "Structure"  # panels of --help
Given = dict[str, Any]  # the options that the user wrote, by name
METHOD_HELP = """What drafts: auto (what pays, each step), suffix, ngram, recycle, lookahead, draft_model, \
universal, early_exit, quantized, or none."""
LENGTH_HELP = "Always draft this many tokens; left out: as many as pay."


@dataclass(frozen=True)
class Drafting:
    """The short spelling of speculative_config."""

    method: str | None = option(None, SPECULATION, METHOD_HELP)
    num_speculative_tokens: int | None = option(None, SPECULATION, LENGTH_HELP, "-k")
    draft_model: str | None = option(None, SPECULATION, DRAFT_MODEL_HELP)


@dataclass(frozen=True)
class Sampling:
    temperature: float = option(0.7, SAMPLING, "0 is greedy; higher is more varied.")
    top_p: float = option(0.95, SAMPLING, "Keep the fewest tokens with this share of probability; 1: all.")
    top_k: int | None = option(None, SAMPLING, "Keep the k most likely tokens.")
    min_p: float | None = option(None, SAMPLING, "Keep tokens at least this likely relative to the best.")
    seed: int | None = option(None, SAMPLING, "Same seed, same text, with or without drafts.")
    stop: tuple[str, ...] = option((), SAMPLING, "Stop before this text; may be repeated.")
    max_tokens: int = option(128, SAMPLING, "Stop after this many tokens.")
    min_tokens: int | None = option(None, SAMPLING, "Do not stop before this many tokens.")
    stop_token_id: tuple[int, ...] = option((), SAMPLING, "Stop at this token; may be repeated.")
    ignore_eos: bool = option(False, SAMPLING, "Go on after the model's end token.")
    repetition_penalty: float | None = option(None, SAMPLING, "Above 1: tokens of the text are less likely.")
    presence_penalty: float | None = option(None, SAMPLING, "Taken off each token already in the answer.")
    frequency_penalty: float | None = option(None, SAMPLING, "Taken off for each time it is in the answer.")
    logit_bias: tuple[str, ...] = option((), SAMPLING, "ID=VALUE, added to that logit; may be repeated.")
    bad_word: tuple[str, ...] = option((), SAMPLING, "Never write this; may be repeated.")
    n: int | None = option(None, SAMPLING, "How many answers.", "-n")
    logprobs: int | None = option(None, SAMPLING, "Report this many likely tokens beside each (in --json).")
    json_schema: str | None = option(None, STRUCTURE, "A JSON schema: a file or the text.")
    regex: str | None = option(None, STRUCTURE, "The answer matches this expression.")
    choice: tuple[str, ...] = option((), STRUCTURE, "The answer is one of these; repeat it.")
    grammar: str | None = option(None, STRUCTURE, "A Lark grammar: a file or the text.")


LIVELY: dict[str, Any] = {"temperature": Sampling.temperature, "top_p": Sampling.top_p}
ENGINE = [*options_of(EngineOptions), *options_of(Drafting)]
SIZES = ("tensor_parallel_size", "pipeline_parallel_size")
LOADING = options_of(EngineOptions, "model", "dtype", "device", "exact", *SIZES)
MODEL_HELP, _, DEVICE_HELP, *_ = (each.metadata["help"] for each, _ in LOADING)
PROMPT_HELP = "The prompt, or - to read it from stdin."
SYSTEM_HELP = "What the model is told before the conversation."
RAW_HELP = "Give the prompt to the model as it is, without the chat template."
JSON_HELP = "Print JSON on stdout instead of text."
FILE_NAME = re.compile(r"[^\s{}\[\]:\"']*\.[A-Za-z]\w*")  # no grammar and no JSON object is like this
SHORT = ("method", "num_speculative_tokens", "draft_model")
STRUCTURED = {"json_schema": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}
RENAMED = {"stop_token_id": "stop_token_ids", "bad_word": "bad_words"}


def group(settings: Sequence[Option]) -> Any:
    """A field that holds a dict: what the user wrote of these options, by name."""
    return field(metadata={"group": settings})


def as_command(verb: Callable[[Any], None], owner: type | None = None) -> Callable[..., None]:
    """A command that calls a verb with a value of `owner`, or of its parameter's type: what a user wrote."""
    owner = owner or get_type_hints(verb)["asked"]
    fields = options_of(owner)
    groups = {each.name: each.metadata["group"] for each, _ in fields if "group" in each.metadata}
    settings = [one for each, kind in fields for one in groups.get(each.name, [(each, kind)])]

    def command(ctx: typer.Context, **values: Any) -> None:
        given = {each.name: _value(each.name, kind, values[each.name]) for each, kind in settings}
        written = {name: value for name, value in given.items() if value is not None}
        following = ctx.invoked_subcommand
        if following and written:  # an option before the sub-command would be read by none
            what = f"{_flag(next(iter(written)))} stands before {following}"
            raise ConfigError(f"{what}; write it after the sub-command's name")
        if following:
            return
        for name, members in groups.items():
            names = [each.name for each, _ in members if each.name in written]
            written[name] = {each: written.pop(each) for each in names}
        verb(owner(**written))

    parameters = [inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    parameters += map(_parameter, settings)
    command.__doc__ = owner.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parameter(setting: Option) -> inspect.Parameter:
    """What Typer makes a flag of. Where it is left out the value is None: the default is the field's."""
    each, kind = setting
    default, told, long = each.default, each.metadata, _flag(each.name)
    more: dict[str, Any] = {key: told[key] for key in ("min", "envvar") if key in told}
    shown = str(default).lower() if isinstance(default, bool) else default
    is_said = default not in (None, (), "", MISSING)
    more |= {"help": told["help"] + (f" [dim]\\[default: {shown}][/dim]" if is_said else "")}
    if told.get("is_argument"):
        made = typer.Argument(show_default=False, **more)
    else:
        names = (f"{long}/--no{long[1:]}" if kind is bool else long, *told["flags"])
        made = typer.Option(*names, rich_help_panel=told["panel"], show_default=False, **more)
    plain = next((one for one in (bool, int, float, Path) if kind in (one, one | None)), str)
    read: Any = list[get_args(kind)[0]] if get_origin(kind) is tuple else plain  # type: ignore[misc]
    place, left_out = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty if default is MISSING else None
    return inspect.Parameter(each.name, place, annotation=Annotated[read | None, made], default=left_out)


def _value(name: str, kind: Any, value: Any) -> Any:
    """What was written, as a value of its field's type; None for nothing."""
    if isinstance(value, list):
        return tuple(value) or None
    return value if value is None or isinstance(value, Path) else parsed(_flag(name), value, kind)


def engine_options(given: Given) -> EngineOptions:
    chosen = {name: value for name, value in given.items() if name not in SHORT}
    return EngineOptions(**chosen | {"speculative_config": speculative_config(given)})


def speculative_config(given: Given) -> dict[str, Any] | str | None:
    """From either spelling; "auto" where nothing is said, None for plain decoding. The engine checks it."""
    config, short = given.get("speculative_config"), [name for name in SHORT if name in given]
    method, length, draft = (given.get(name) for name in SHORT)
    if config is not None:
        if short:
            shorthand = "--method, --draft-model, -k"
            raise ConfigError(f"--speculative-config and {shorthand} exclude each other; use one spelling")
        is_word = config in ("auto", "off", "none") or isinstance(config, dict)
        return config if is_word else json_object("--speculative-config", config)
    if method in ("none", "off", "auto") and len(short) > 1:
        what = f"-k is {length}" if length is not None else f"--draft-model is {draft}"
        meaning = "drafters and lengths are chosen each step" if method == "auto" else "nothing is drafted"
        raise ConfigError(f"{what} but --method {method} means that {meaning}; leave one of them out")
    if method is None and draft is None and length is not None:
        remedy = "add --method, e.g. --method suffix"
        raise ConfigError(f"-k is {length} but without --method lengths are chosen each step; {remedy}")
    if not short or method == "auto":
        return "auto"
    made = {"method": method or "draft_model", "model": draft, "num_speculative_tokens": length}
    return None if method in ("none", "off") else {name: v for name, v in made.items() if v is not None}


def sampling_params(given: Given) -> SamplingParams:
    chosen = {RENAMED.get(name, name): v for name, v in given.items() if name not in STRUCTURED}
    for pair in chosen.pop("logit_bias", ()):
        token, _, value = pair.partition("=")
        try:
            chosen.setdefault("logit_bias", {})[int(token)] = float(value)
        except ValueError:
            raise ConfigError(f"--logit-bias is {pair[:40]!r}; write ID=VALUE, as 42=-5 or 42=-inf") from None
    wanted = {STRUCTURED[name]: value for name, value in given.items() if name in STRUCTURED}
    if len(wanted) > 1:
        what = "--json-schema, --regex, --choice and --grammar exclude each other"
        raise ConfigError(f"{what}; use one of them")
    if wanted.get("regex") == "":
        raise ConfigError("--regex is empty, which allows no text; write an expression such as '[a-z]+'")
    if "json" in wanted:
        wanted["json"] = json_object("--json-schema", _file_or_text("--json-schema", wanted["json"]))
    if "grammar" in wanted:
        wanted["grammar"] = _file_or_text("--grammar", wanted["grammar"])
    structured = StructuredOutputs(**wanted) if wanted else None
    return SamplingParams(**LIVELY | chosen | {"structured_outputs": structured})


def _file_or_text(flag: str, value: str) -> str:
    """What the named file holds, or the value itself where it cannot be the name of a file."""
    if not value.strip():
        raise ConfigError(f"{flag} is empty; give a file or the text")
    if os.path.isfile(value):  # where Path raises, of a text longer than a name may be, this is False
        return text_of(Path(value), f"give {flag} a file you can read")
    if FILE_NAME.fullmatch(value):
        remedy = "check the name, or give the text itself"
        raise ConfigError(f"{flag} {value[:80]}: there is no such file; {remedy}")
    return value


def check_target(flag: str, path: Path | None) -> None:
    """Refuse a file that could not be written, before the work whose result it is for."""
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {folder}; make it first")
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: is a folder; name a file in it")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{flag} {path}: cannot be written; choose a place you can write")


def write_result(path: Path, text: str) -> None:
    """All of it, or nothing is left and the error says where: a disk may have become full meanwhile."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        if path.is_file():
            path.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None
