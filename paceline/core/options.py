"""Options are frozen dataclasses, checked on construction; unknown names are refused with the nearest known
one, values may come from text (flags, variables, files).
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeGuard, TypeVar, get_origin, get_type_hints

from paceline.core.errors import ConfigError

T = TypeVar("T")
Option = tuple[Field[Any], Any]  # a field that is an option, and its type
BOOLEANS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    max_num_seqs: int = 16  # requests in one pass
    max_num_batched_tokens: int = 512  # rows in one pass: prompt chunks, roots and drafts together
    max_model_len: int = 2048
    num_speculative_tokens: int = 0  # most draft nodes a request gets in a step
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            value = getattr(self, name)
            require(is_whole(value) and value >= 1, name, value, "use a whole number, 1 or more")
        rows, drafted, length = self.max_num_batched_tokens, self.num_speculative_tokens, self.max_model_len
        remedy = f"use at least max_num_seqs ({self.max_num_seqs}): every running request gets a token"
        require(rows >= self.max_num_seqs, "max_num_batched_tokens", rows, remedy)
        remedy = f"it must be smaller than the context of {length} tokens"
        require(drafted < length, "num_speculative_tokens", drafted, remedy)


def option(default: Any, panel: str, text: str, *flags: str, **more: Any) -> Any:
    """A dataclass field that is an option of the command line and the server: the panel of --help that it
    stands in, what is said of it there, and its short flags. `more`: min, envvar and is_argument."""
    return field(default=default, metadata={"panel": panel, "help": text, "flags": flags, **more})


def options_of(owner: type, *names: str) -> list[Option]:
    """The fields of a dataclass that are options, with their types; of them those named, if any are."""
    hints = get_type_hints(owner)
    made = [(each, hints[each.name]) for each in fields(owner) if each.metadata]
    return [(each, kind) for each, kind in made if not names or each.name in names]


def parsed(where: str, value: Any, kind: Any) -> Any:
    """A value of a field's type, from text or from TOML's own types. `where`: what an error calls it."""
    shown = "***" if "KEY" in where.upper() else repr(value)[:60]
    if kind == tuple[str, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
            raise ConfigError(f"{where} is {shown}; give a list of texts")
        return tuple(part.strip() for part in parts if part.strip())
    kinds = set(getattr(kind, "__args__", (kind,)))
    takes_object = any(get_origin(each) is dict for each in kinds)
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    wrong = ConfigError(f"{where} is {shown}; give {' or '.join(names[k] for k in names if k in kinds)}")
    if not isinstance(value, str):
        is_float = type(value) is int and float in kinds
        if type(value) in kinds or is_float or (isinstance(value, dict) and takes_object):
            return value
        raise wrong
    if bool in kinds:
        if value.lower() not in BOOLEANS:
            raise wrong
        return BOOLEANS[value.lower()]
    if int in kinds and re.fullmatch(r"[+-]?\d{1,18}", value):
        return int(value)
    if float in kinds:
        try:
            return float(value)
        except ValueError:
            raise wrong from None
    if str not in kinds:
        raise wrong
    if takes_object and value.lstrip().startswith("{"):
        return json_object(where, value)
    return value


def json_object(where: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        example = 'write an object such as {"method": "ngram"}'
        raise ConfigError(f"{where} is {text[:40]!r}, not JSON ({reason}); {example}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is {text[:40]!r}; write a JSON object like {{...}}")
    return value


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is an int and not a bool, which Python takes for one."""
    return isinstance(value, int) and not isinstance(value, bool)


def brief(value: object, width: int = 40) -> str:
    """What a message shows of a value: the beginning of its repr."""
    try:
        return repr(value)[:width]
    except ValueError:  # Python prints no number of more than 4,300 digits
        return "a number of thousands of digits"


def require(ok: bool, name: str, value: object, remedy: str) -> None:
    if not ok:
        raise ConfigError(f"{name} is {brief(value, 60)}; {remedy}")


def nearest(word: str, known: list[str]) -> str:
    """`did you mean` for an unknown word, or the list of known ones."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"


def check_names(kind: type, options: Iterable[str], owner: str, others: Iterable[str] = ()) -> None:
    """An option that this kind of config does not have is an error that names the nearest one, also of the
    others that are known."""
    known = [f.name for f in fields(kind)]
    for name in options:
        if name not in known:
            raise ConfigError(f"{owner} has no option {name!r}; {nearest(str(name), [*known, *others])}")


def from_options(kind: type[T], options: Mapping[str, Any], owner: str) -> T:
    check_names(kind, options, owner)
    return kind(**options)


def without(refused: Mapping[str, tuple[str, Any]], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options but for those refused ones that ask for nothing: None, False, or what stands behind the
    remedy, one value or a tuple of them. Others are errors with the remedy."""
    for name in refused.keys() & options.keys():
        remedy, nothing = refused[name]
        value = options[name]
        many = nothing if isinstance(nothing, tuple) else (nothing,)
        is_nothing = value is None or value is False or (value in many and value is not True)
        require(is_nothing, name, value, remedy)
    return {name: value for name, value in options.items() if name not in refused}


def unboxed(value: Any) -> Any:
    """A number of numpy or torch as Python's own; anything else as it is."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value
