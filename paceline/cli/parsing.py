"""What the options mean to the engine. Invariant: what cannot be understood is refused here, before a model
is read.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from paceline import SamplingParams, StructuredOutputs
from paceline.api.options import EngineOptions
from paceline.cli.options import LIVELY, Given
from paceline.core.errors import ConfigError
from paceline.core.options import json_object

FILE_NAME = re.compile(r"[^\s{}\[\]:\"']*\.[A-Za-z]\w*")  # no grammar and no JSON object is like this
SHORT = ("method", "num_speculative_tokens", "draft_model")
STRUCTURED = {"json_schema": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}
RENAMED = {"stop_token_id": "stop_token_ids", "bad_word": "bad_words"}


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
            remedy = "write ID=VALUE, for instance 42=-5 or 42=-inf"
            raise ConfigError(f"--logit-bias is {pair[:40]!r}; {remedy}") from None
    wanted = {STRUCTURED[name]: value for name, value in given.items() if name in STRUCTURED}
    if len(wanted) > 1:
        flags = "--json-schema, --regex, --choice and --grammar"
        raise ConfigError(f"{flags} exclude each other; use one of them")
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
    try:
        return Path(value).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{flag} {value}: is not UTF-8 text; save it as UTF-8") from None
    except OSError as error:
        if os.path.isfile(value):  # where Path raises, of a text longer than a name may be, this is False
            why = f"cannot be read ({error.strerror}); give a file you can read"
            raise ConfigError(f"{flag} {value}: {why}") from None
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
