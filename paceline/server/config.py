"""All settings of the server, once: flags, PACELINE_* variables and a TOML file are three spellings of the
same fields. A flag wins over a variable, a variable over the file, the file over the default. Invariant: what
comes out of `resolve` was checked; a name that no setting has and a value of the wrong kind are errors that
say where they stood.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from paceline.api.options import EngineOptions
from paceline.core.errors import ConfigError
from paceline.core.options import nearest, option, options_of, parsed, require
from paceline.server.formats import FORMATS

PREFIX, LOOPBACK = "PACELINE_", ("127.0.0.1", "localhost", "::1")
HTTP, ACCESS, LIMITS, APART, SCALE = "HTTP", "Access", "Limits", "Prefill and decode apart", "Scale"
# The least and the most that settings may be; timeouts in seconds.
BOUNDS: tuple[tuple[float, float | None, tuple[str, ...]], ...] = (
    (0, None, ("max_queue", "max_stored_responses", "max_stored_bytes", "drain_timeout")),
    (1, None, ("max_prompt_tokens", "max_completion_tokens", "engine_timeout", "key_requests", "key_tokens")),
    (0.1, None, ("request_timeout", "body_timeout", "prefill_timeout")),
    (16, None, ("prefill_min_tokens",)),
    (0, 65_535, ("port",)),
    (1, 1024, ("max_choices", "replicas", "replica_cpus")),
    (16, 500_000, ("max_grammar_bytes",)),
    (1024, 2**30, ("max_request_bytes",)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(EngineOptions):
    """The engine's options and those of the HTTP side."""

    served_model_name: str | None = option(None, HTTP, "The name clients ask for; left out: the model's own.")
    host: str = option("127.0.0.1", HTTP, "Where to listen; 0.0.0.0 is every address of the machine.")
    port: int = option(8000, HTTP, "0 takes a free one and says which.")
    playground: bool = option(True, HTTP, "Serve the page at /.")
    generation_config: str = option(
        "auto", HTTP, "Sampling defaults: auto (the model's own), vllm or a folder."
    )
    override_generation_config: dict[str, Any] | str | None = option(None, HTTP, "JSON, put over them.")
    tool_call_parser: str | None = option(None, HTTP, "How calls are written; left out: as in its template.")
    log_level: str = option("info", HTTP, "debug, info, warning or error; one JSON object a line on stderr.")
    api_key: tuple[str, ...] = option((), ACCESS, "A key clients must show; repeatable; safer in a file.")
    api_key_file: str | None = option(None, ACCESS, "A file with one key a line.")
    cors_origin: tuple[str, ...] = option((), ACCESS, "A page's origin that may call; repeatable; * is any.")
    ssl_certfile: str | None = option(None, ACCESS, "The certificate, for https.")
    ssl_keyfile: str | None = option(None, ACCESS, "Its private key.")
    max_queue: int = option(256, LIMITS, "Answers that may wait for their turn; beyond that clients get 429.")
    max_request_bytes: int = option(2**20, LIMITS, "Largest request body.")
    max_prompt_tokens: int | None = option(None, LIMITS, "Longest prompt; left out: what the context holds.")
    max_completion_tokens: int | None = option(None, LIMITS, "Longest answer; left out: the context's rest.")
    max_choices: int = option(64, LIMITS, "Most answers of one request: its prompts times n.")
    max_grammar_bytes: int = option(65_536, LIMITS, "Largest schema, expression, list of choices or grammar.")
    max_stored_responses: int = option(1000, LIMITS, "Responses that are kept to be continued or read again.")
    max_stored_bytes: int = option(2**26, LIMITS, "The most memory that they take.")
    key_requests: int | None = option(None, LIMITS, "Requests of one key at the same time; beyond: 429.")
    key_tokens: int | None = option(
        None, LIMITS, "Tokens a minute of one key, prompts and answers; beyond: 429."
    )
    request_timeout: float = option(600.0, LIMITS, "Seconds after which a request is given up.")
    body_timeout: float = option(30.0, LIMITS, "Seconds a client has for a request's headers, and its body.")
    drain_timeout: float = option(30.0, LIMITS, "Seconds that running requests have after SIGTERM.")
    engine_timeout: float = option(120.0, LIMITS, "Seconds of silence after which the engine is restarted.")

    role: str = option("both", APART, "both; prefill: also reads prompts for others; decode: has them read.")
    prefill: str | None = option(None, APART, "With --role decode: the prefill server's address.")
    prefill_api_key: str | None = option(None, APART, "Its key; safer as a variable.")
    prefill_min_tokens: int = option(256, APART, "Prompts with fewer that are new are read here.")
    prefill_timeout: float = option(30.0, APART, "Seconds after which a prompt is read here after all.")
    replicas: int | None = option(None, SCALE, "This number of servers behind one address, on Ray Serve.")
    autoscale: str | None = option(None, SCALE, "LEAST:MOST, as 1:8: as many of them as the load asks for.")
    replica_cpus: int | None = option(None, SCALE, "Cores of each; left out: an equal part of all.")
    address: str | None = option(None, SCALE, "A Ray cluster to join: auto, or HOST:PORT; else one starts.")
    kv_events: str | None = option(None, SCALE, "Say which blocks are cached, for routers: tcp://*:5557.")

    def __post_init__(self) -> None:
        EngineOptions.__post_init__(self)
        for least, most, names in BOUNDS:
            remedy = f"use {least} or more" if most is None else f"use {least} to {most}"
            for name in names:
                value = getattr(self, name)
                is_within = value is None or (least <= value and (most is None or value <= most))
                require(is_within, name, value, remedy)
        levels = ("debug", "info", "warning", "error")
        require(self.log_level in levels, "log_level", self.log_level, f"use one of {', '.join(levels)}")
        parser = self.tool_call_parser
        remedy = f"use one of {', '.join(FORMATS)}, or leave it out"
        require(parser is None or parser in FORMATS, "tool_call_parser", parser, remedy)
        roles = ("both", "prefill", "decode")
        require(self.role in roles, "role", self.role, f"use one of {', '.join(roles)}")
        is_paired = (self.role == "decode") == (self.prefill is not None)
        require(is_paired, "prefill", self.prefill, "give --role decode and --prefill ADDRESS, or neither")
        if self.prefill is not None:
            check_url(self.prefill)
        is_shut = self.role != "prefill" or self.host in LOOPBACK or self.api_key or self.api_key_file
        require(bool(is_shut), "role", self.role, "give --api-key-file: prompts' K/V would be open to all")
        has_both = (self.ssl_certfile is None) == (self.ssl_keyfile is None)
        require(has_both, "ssl_keyfile", self.ssl_keyfile, "give --ssl-certfile and --ssl-keyfile")
        if any(not key.strip() or not key.isascii() for key in self.api_key):  # the key itself is not shown
            what = "api_key holds an empty key or one that is not ASCII"
            raise ConfigError(f"{what}; give one or more characters")

        self._check_scale()

    def _check_scale(self) -> None:
        least, most = self.spread
        is_usable = self.autoscale is None or 1 <= least <= most <= 1024
        require(is_usable, "autoscale", self.autoscale, "write LEAST:MOST, two numbers from 1 on, as 1:8")
        is_alone = self.replicas is None or self.autoscale is None
        require(is_alone, "autoscale", self.autoscale, "give it without replicas: it chooses their number")
        for name in ("address", "replica_cpus"):
            value, remedy = getattr(self, name), "it is for --replicas or --autoscale; give one of them"
            require(value is None or most > 0, name, value, remedy)
        is_place = self.kv_events is None or re.fullmatch(r"tcp://[^:/]+:\d{1,5}", self.kv_events)
        require(bool(is_place), "kv_events", self.kv_events, "write tcp://ADDRESS:PORT, as tcp://*:5557")

    @property
    def spread(self) -> tuple[int, int]:
        """The fewest and the most replicas; (0, 0): this process serves by itself."""
        if self.autoscale is None:
            return self.replicas or 0, self.replicas or 0
        found = re.fullmatch(r"(\d{1,4}):(\d{1,4})", self.autoscale)
        return (int(found[1]), int(found[2])) if found else (0, 0)

    def engine_setup(self) -> dict[str, Any]:
        """What the engine process is given: its options, and limits that it checks in tokens."""
        own = {each.name for each in fields(EngineOptions)}
        options = {f.name: getattr(self, f.name) for f in fields(self) if f.metadata and f.name in own}
        limits = {name: getattr(self, name) for name in ("max_prompt_tokens", "max_completion_tokens")}
        told = {"log_level": self.log_level, "kv_events": self.kv_events}
        asks: dict[str, Any] | None = None
        if self.prefill is not None:
            asks = {"url": self.prefill, "key": self.prefill_api_key}
            asks |= {"least": self.prefill_min_tokens, "timeout": self.prefill_timeout}
        apart = {"gives": self.role == "prefill", "asks": asks}
        return {"engine": options, "limits": limits, **told, "apart": apart}

    def to_log(self) -> dict[str, Any]:
        """All settings but the keys."""
        hidden = {"api_key": len(self.api_key), "prefill_api_key": int(self.prefill_api_key is not None)}
        return asdict(self) | hidden


def check_url(url: str) -> None:
    parts, is_usable = urlsplit(url), False
    with suppress(ValueError):  # a port that is no number
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    require(is_usable, "prefill", url, "give an address such as http://127.0.0.1:8001")


def resolve(flags: Mapping[str, Any], variables: Mapping[str, str], file: str | None = None) -> ServerConfig:
    """The settings from all three places. flags: those of the command line, None where it has none."""
    file = file or variables.get(PREFIX + "CONFIG")
    kinds, chosen = {setting.name: kind for setting, kind in options_of(ServerConfig)}, dict[str, Any]()
    for name, value in (_from_file(file) if file else {}).items():
        if name not in kinds:
            raise ConfigError(f"{file}: has no setting {name!r}; {nearest(name, list(kinds))}")
        chosen[name] = parsed(f"{file}: {name}", value, kinds[name])
    for name, kind in kinds.items():
        variable, value = PREFIX + name.upper(), flags.get(name)
        if variables.get(variable):
            chosen[name] = parsed(variable, variables[variable], kind)
        if value not in (None, (), []):
            is_many = isinstance(value, list | tuple)
            chosen[name] = tuple(value) if is_many else parsed("--" + name.replace("_", "-"), value, kind)
    return ServerConfig(**chosen)


def _from_file(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        why = f"cannot be read ({error.strerror}); give a TOML file you can read"
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        why = f"is not TOML ({error}); write lines such as port = 8000"
    raise ConfigError(f"{path}: {why}")


def read_keys(config: ServerConfig) -> tuple[str, ...]:
    """Those given one by one and those in the file."""
    if config.api_key_file is None:
        return config.api_key
    try:
        if lines := Path(config.api_key_file).read_text(encoding="ascii").split():
            return (*config.api_key, *lines)
        why = "holds no key; write one a line"
    except OSError as error:
        why = f"cannot be read ({error.strerror}); give a file you can read"
    except UnicodeDecodeError:
        why = "is not ASCII; write one key a line"
    raise ConfigError(f"api_key_file {config.api_key_file}: {why}")
