"""Renders a model's chat template, with the names of Hugging Face's `apply_chat_template`.

Invariant: templates come with model files and are untrusted: they run in template_sandbox.py, and whatever
they do wrong ends in a one-line error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.parser import Parser

from paceline.core.errors import ModelFileError, PacelineError, RequestError
from paceline.loaders.fields import one_line
from paceline.loaders.template_sandbox import MAX_STRING, BoundedEnvironment, TooCostly

MAX_TEMPLATE = 256 * 2**10  # characters
MAX_NESTING = 100
ENDS = ("bos_token", "eos_token")


def render(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """The chat as text. `variables` are add_generation_prompt (True unless given), tools, bos_token and
    eos_token (undefined where None), and those that only some templates read, such as enable_thinking."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        example = [{"role": "user", "content": "Hello"}]
        raise RequestError(f"messages is {messages!r:.60}; give a list such as {example}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"message {index} is {message!r:.60}; give a dict with 'role' and 'content'")
    known = {"messages": messages, "add_generation_prompt": True, "tools": None, "documents": None}
    given = {name: v for name, v in variables.items() if v is not None or name not in ENDS}
    plain = _plain(known | given)
    try:
        environment, compiled = _compile(template)
        text = environment.render(compiled, plain)
    except PacelineError:
        raise
    except TooCostly as error:
        raise ModelFileError(f"the chat template was stopped: {error}; pass another one") from error
    except Exception as error:  # untrusted code may raise anything
        remedy = "check the messages, or pass another chat template"
        raise ModelFileError(f"the chat template fails: {one_line(error)}; {remedy}") from error
    if len(text) > MAX_STRING:
        raise ModelFileError(f"the chat template wrote {len(text)} characters, over {MAX_STRING}; shorten it")
    return text


@lru_cache(maxsize=16)
def _compile(template: str) -> tuple[BoundedEnvironment, jinja2.Template]:
    if len(template) > MAX_TEMPLATE:
        raise ModelFileError(f"the chat template is over {MAX_TEMPLATE} characters long; pass another one")
    functions = {"raise_exception": _refuse, "strftime_now": _now}
    extensions = ["jinja2.ext.loopcontrols", _Generation]
    environment = BoundedEnvironment(extensions, {"tojson": _to_json}, functions)
    return environment, environment.from_string(template)


class _Generation(Extension):
    """`{% generation %}` marks an assistant's words for training; rendering writes its body."""

    tags: set[str] = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: Any) -> None:
    """A template's own `raise_exception`: about the messages, not the template."""
    raise RequestError(f"the chat template refuses these messages: {one_line(message)}; change the messages")


def _now(pattern: str) -> str:
    if len(pattern) > 100:
        raise ValueError("strftime_now takes at most 100 characters")
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Without jinja2's escapes for HTML: models were trained on plain JSON."""
    if not 0 <= (indent or 0) <= 16 or max(map(len, separators or ("",))) > 16:
        raise ValueError("tojson takes an indent of 0 to 16 and short separators")
    layout: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


def _plain(value: Any, depth: int = 0) -> Any:
    """Only JSON's own types reach a template: no object whose methods it could call."""
    if depth > MAX_NESTING:
        raise RequestError(f"messages are nested deeper than {MAX_NESTING}; flatten them")
    if value is None or type(value) in (int, float, bool):
        return value
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise RequestError(f"messages hold {value!r:.60}, which is no UTF-8 text; decode it") from None
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, depth + 1) for item in value]
    raise RequestError(f"messages hold a {type(value).__name__}; give strings, numbers, lists and dicts only")
