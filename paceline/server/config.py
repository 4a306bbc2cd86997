"""All settings of the server, once: flags, PACELINE_* variables and a TOML file are three spellings of the
same fields.

A flag wins over a variable, a variable over the file, the file over the default. Invariant: what comes out of
`resolve` was checked; a name that no setting has and a value of the wrong kind are errors that say where they
stood.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from paceline.api.options import EngineOptions
from paceline.core.errors import ConfigError
from paceline.core.options import nearest, option, options_of, parsed, require

PREFIX = "PACELINE_"
MIB = 2**20
HTTP, ACCESS, LIMITS = "HTTP", "Access", "Limits"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(EngineOptions):
    """The engine's options and those of the HTTP side."""

    served_model_name: str | None = option(None, HTTP, "The name clients ask for; left out: the model's own.")
    host: str = option("127.0.0.1", HTTP, "Where to listen; 0.0.0.0 is every address of the machine.")
    port: int = option(8000, HTTP, "0 takes a free one and says which.")
    playground: bool = option(True, HTTP, "Serve the page at /.")
    log_level: str = option("info", HTTP, "debug, info, warning or error; one JSON object a line on stderr.")
    api_key: tuple[str, ...] = option(
        (), ACCESS, "A key clients must show; may be repeated. Safer in a file: others can see a flag."
    )
    api_key_file: str | None = option(None, ACCESS, "A file with one key a line.")
    cors_origin: tuple[str, ...] = option(
        (), ACCESS, "A web page's origin that may call the server; may be repeated; * is any."
    )
    ssl_certfile: str | None = option(None, ACCESS, "The certificate, for https.")
    ssl_keyfile: str | None = option(None, ACCESS, "Its private key.")
    max_queue: int = option(256, LIMITS, "Answers that may wait for their turn; beyond that clients get 429.")
    max_request_bytes: int = option(MIB, LIMITS, "Largest request body.")
    max_prompt_tokens: int | None = option(None, LIMITS, "Longest prompt; left out: what the context holds.")
    max_completion_tokens: int | None = option(
        None, LIMITS, "Longest answer a client may ask for; left out: what the context holds."
    )
    max_choices: int = option(64, LIMITS, "Most answers of one request: its prompts times n.")
    max_grammar_bytes: int = option(
        65_536, LIMITS, "Largest JSON schema, expression, list of choices or grammar."
    )
    request_timeout: float = option(600.0, LIMITS, "Seconds after which a request is given up.")
    body_timeout: float = option(30.0, LIMITS, "Seconds a client has to send a request's body.")
    drain_timeout: float = option(30.0, LIMITS, "Seconds that running requests have after SIGTERM.")
    engine_timeout: float = option(
        120.0, LIMITS, "Seconds without a sign of life after which the engine is started anew."
    )

    def __post_init__(self) -> None:
        EngineOptions.__post_init__(self)
        for name, low, high, remedy in (
            ("port", 0, 65_535, "use 0 to 65535"),
            ("max_queue", 0, None, "use 0 or more"),
            ("max_request_bytes", 1024, 1024 * MIB, "use 1024 bytes to 1 GiB"),
            ("max_choices", 1, 1024, "use 1 to 1024"),
            ("max_grammar_bytes", 16, 500_000, "use 16 to 500000"),
            ("max_prompt_tokens", 1, None, "use 1 or more"),
            ("max_completion_tokens", 1, None, "use 1 or more"),
            ("request_timeout", 0.1, None, "use 0.1 seconds or more"),
            ("body_timeout", 0.1, None, "use 0.1 seconds or more"),
            ("drain_timeout", 0.0, None, "use 0 seconds or more"),
            ("engine_timeout", 1.0, None, "use 1 second or more"),
        ):
            value = getattr(self, name)
            require(value is None or (low <= value and (high is None or value <= high)), name, value, remedy)
        levels = ("debug", "info", "warning", "error")
        require(self.log_level in levels, "log_level", self.log_level, f"use one of {', '.join(levels)}")
        has_both = (self.ssl_certfile is None) == (self.ssl_keyfile is None)
        require(has_both, "ssl_keyfile", self.ssl_keyfile, "give --ssl-certfile and --ssl-keyfile")
        if any(not key.strip() or not key.isascii() for key in self.api_key):  # the key itself is not shown
            raise ConfigError(
                "api_key holds an empty key or one that is not ASCII; give one or more characters"
            )

    def engine_options(self) -> dict[str, Any]:
        """What the engine process is given; the rest is the business of the HTTP side."""
        return {f.name: getattr(self, f.name) for f in fields(EngineOptions) if f.metadata}

    def limits(self) -> dict[str, Any]:
        """What the engine process checks where it knows the tokens."""
        names = ("max_prompt_tokens", "max_completion_tokens")
        return {name: getattr(self, name) for name in names}

    def to_log(self) -> dict[str, Any]:
        """All settings but the keys."""
        return {**asdict(self), "api_key": len(self.api_key)}


def resolve(
    flags: Mapping[str, Any], environment: Mapping[str, str], file: str | None = None
) -> ServerConfig:
    """The settings from all three places. `flags` holds what was written on the command line, None for what
    was not."""
    file = file or environment.get(PREFIX + "CONFIG")
    chosen: dict[str, Any] = _from_file(file) if file else {}
    for setting, kind in options_of(ServerConfig):
        name = PREFIX + setting.name.upper()
        if environment.get(name):
            chosen[setting.name] = parsed(name, environment[name], kind)
        value = flags.get(setting.name)
        if isinstance(value, list | tuple) and value:
            chosen[setting.name] = tuple(value)
        elif value not in (None, (), []):
            chosen[setting.name] = parsed("--" + setting.name.replace("_", "-"), value, kind)
    return ServerConfig(**chosen)


def _from_file(path: str) -> dict[str, Any]:
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
        raise ConfigError(f"{path}: {why}; give a TOML file you can read") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not TOML ({error}); write lines such as port = 8000") from None
    kinds = {setting.name: kind for setting, kind in options_of(ServerConfig)}
    chosen = {}
    for name, value in table.items():
        if name not in kinds:
            raise ConfigError(f"{path}: has no setting {name!r}; {nearest(name, list(kinds))}")
        chosen[name] = parsed(f"{path}: {name}", value, kinds[name])
    return chosen


def read_keys(config: ServerConfig) -> tuple[str, ...]:
    """Those given one by one and those in the file."""
    file = config.api_key_file
    if file is None:
        return config.api_key
    try:
        lines = Path(file).read_text(encoding="ascii").split()
    except OSError as error:
        why = f"cannot be read ({error.strerror}); give a file you can read"
        raise ConfigError(f"api_key_file {file}: {why}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"api_key_file {file}: is not ASCII; write one key a line") from None
    if not lines:
        raise ConfigError(f"api_key_file {file}: holds no key; write one a line")
    return (*config.api_key, *lines)
