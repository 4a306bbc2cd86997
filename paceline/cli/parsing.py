"""What the options mean to the engine. Invariant: what cannot be understood is refused here, before a model
is read.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError

FILE_NAME = re.compile(r"[^\s{}\[\]:\"']*\.[A-Za-z]\w*")  # no grammar and no JSON object looks like this


def given(**options: Any) -> dict[str, Any]:
    """Only the options the user wrote."""
    return {name: value for name, value in options.items() if value is not None and value != []}


def speculative_config(
    config: str | None,
    method: str | None = None,
    num_speculative_tokens: int | None = None,
    draft_model: str | None = None,
) -> dict[str, Any] | str | None:
    """The engine's dictionary from either spelling, "auto" where nothing is said, None for plain decoding.
    The engine itself checks methods and keys."""
    short = given(method=method, model=draft_model, num_speculative_tokens=num_speculative_tokens)
    if config is not None:
        if short:
            raise ConfigError(
                "--speculative-config and the shorthand --method, --draft-model, -k exclude each other; use one spelling"
            )
        return parse_json_object("--speculative-config", config)
    if method in ("none", "off", "auto") and len(short) > 1:
        what = (
            f"-k is {num_speculative_tokens}"
            if num_speculative_tokens is not None
            else f"--draft-model is {draft_model}"
        )
        meaning = "drafters and lengths are chosen each step" if method == "auto" else "nobody drafts"
        raise ConfigError(f"{what} but --method {method} means that {meaning}; leave one of them out")
    if draft_model is not None:
        short.setdefault("method", "draft_model")
    if short and "method" not in short:
        raise ConfigError(
            f"-k is {num_speculative_tokens} but without --method lengths are chosen each step; add --method, e.g. --method suffix"
        )
    if not short or method == "auto":
        return "auto"
    return None if method in ("none", "off") else short


def memory(text: str | None) -> int | float | None:
    """--kv-cache-memory: a whole number is bytes, any other a fraction."""
    if text is None:
        return None
    try:
        return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    except ValueError:
        raise ConfigError(
            f"--kv-cache-memory is {text[:40]!r}; give bytes as a whole number, or a fraction such as 0.2"
        ) from None


def logit_bias(pairs: list[str] | None) -> dict[int, float] | None:
    """--logit-bias ID=VALUE, once for each token."""
    biases: dict[int, float] = {}
    for pair in pairs or ():
        token, _, value = pair.partition("=")
        try:
            biases[int(token)] = float(value)
        except ValueError:
            raise ConfigError(
                f"--logit-bias is {pair[:40]!r}; write ID=VALUE, for instance 42=-5 or 42=-inf"
            ) from None
    return biases or None


def parse_json_object(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise ConfigError(
            f"{option} is {text[:40]!r}, not JSON ({reason}); write an object like {{...}}"
        ) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{option} is {text[:40]!r}; write a JSON object like {{...}}")
    return value


def file_or_text(option: str, value: str) -> str:
    """What the named file holds, or the value itself where it cannot be the name of a file."""
    if not value.strip():
        raise ConfigError(f"{option} is empty; give a file or the text")
    if _is_file(value):
        try:
            return Path(value).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{option} {value}: cannot be read ({error.strerror}); give a file you can read"
            ) from None
        except UnicodeDecodeError:
            raise ConfigError(f"{option} {value}: is not UTF-8 text; save it as UTF-8") from None
    if FILE_NAME.fullmatch(value):
        raise ConfigError(
            f"{option} {value[:80]}: there is no such file; check the name, or give the text itself"
        )
    return value


def _is_file(value: str) -> bool:
    try:
        return Path(value).is_file()
    except OSError:  # longer than a file name may be
        return False


def check_target(option: str, path: Path | None) -> None:
    """Refuse a file that could not be written, before the work whose result it is for."""
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {folder}; make it first")
    if path.is_dir():
        raise ConfigError(f"{option} {path}: is a folder; name a file in it")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{option} {path}: cannot be written; choose a place you can write")
