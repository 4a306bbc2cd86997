"""One schema, three spellings: flags over variables over the file over the defaults; what is wrong is
named.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.core.options import options_of
from paceline.server.config import ServerConfig, read_keys, resolve


def test_flags_win_over_variables_and_those_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(
        'port = 1\nhost = "a"\nmax_queue = 7\napi_key = ["k1", "k2"]\nspeculative_config = {method = "ngram"}\n'
    )
    variables = {
        "PACELINE_PORT": "2",
        "PACELINE_HOST": "b",
        "PACELINE_EXACT": "true",
        "PACELINE_CACHE": "/elsewhere",
    }
    chosen = resolve({"port": 3, "host": None, "api_key": []}, variables, str(file))
    assert (chosen.port, chosen.host, chosen.max_queue, chosen.exact) == (3, "b", 7, True)
    assert chosen.api_key == ("k1", "k2")
    assert chosen.speculative_config == {"method": "ngram"}
    assert resolve({}, {"PACELINE_CONFIG": str(file)}).port == 1
    assert resolve({}, {}) == ServerConfig()


def test_every_setting_can_be_a_variable() -> None:
    values: dict[Any, str] = {bool: "true", int: "2048", float: "2.5", tuple[str, ...]: "a, b"}
    for setting, kind in options_of(ServerConfig):
        special = {
            "log_level": "debug",
            "tool_call_parser": "mistral",
            "speculative_config": '{"method": "suffix"}',
            "override_generation_config": '{"top_k": 5}',
            "max_choices": "9",
            "role": "prefill",
            "replicas": "9",
            "autoscale": "1:8",
            "kv_events": "tcp://*:5557",
        }
        text = {**special, "max_num_seqs": "128"}.get(setting.name)  # no more than max_num_batched_tokens
        if setting.name.startswith("ssl_") or setting.name in ("prefill", "address", "replica_cpus"):
            continue  # only together with others
        number = "2048" if "int" in str(kind) else "2.5"
        given = text or values.get(kind) or (number if "int" in str(kind) or "float" in str(kind) else "word")
        chosen = getattr(resolve({}, {f"PACELINE_{setting.name.upper()}": given}), setting.name)
        assert chosen != setting.default or given in (str(setting.default), "true"), setting.name


@pytest.mark.parametrize(
    ("flags", "variables", "words"),
    [
        ({"port": 99_999}, {}, "port is 99999"),
        ({}, {"PACELINE_PORT": "many"}, "PACELINE_PORT is 'many'"),
        ({}, {"PACELINE_EXACT": "perhaps"}, "give true or false"),
        ({"speculative_config": "{"}, {}, "not JSON"),
        ({"log_level": "loud"}, {}, "log_level is 'loud'"),
        ({"ssl_certfile": "x"}, {}, "ssl_keyfile"),
        ({"request_timeout": 0.0}, {}, "request_timeout is 0.0"),
        ({"max_request_bytes": 3}, {}, "max_request_bytes is 3"),
        ({"max_model_len": 1}, {}, "max_model_len is 1"),
        ({"max_num_seqs": 2048}, {}, "max_num_batched_tokens is 512"),
        ({}, {"PACELINE_API_KEY": "gr\u00fcn"}, "not ASCII"),
    ],
)
def test_what_is_wrong_is_named(flags: dict[str, Any], variables: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(flags, variables)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", "did you mean 'port'"),
        ("port = ", "is not TOML"),
        ('port = "x"', "port is 'x'"),
        ("port = 1.5", "port is 1.5"),
        ("exact = 1", "true or false"),
    ],
)
def test_files_that_are_wrong_are_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "server.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        resolve({}, {}, str(file))
    assert str(file) in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve({}, {}, str(tmp_path / "nothing.toml"))


def test_keys_come_from_flags_and_files_and_are_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("k-two\nk-three\n")
    config = resolve({"api_key": ["k-one"], "api_key_file": str(file)}, {})
    assert read_keys(config) == ("k-one", "k-two", "k-three")
    assert "k-one" not in str(config.to_log())
    file.write_text("")
    with pytest.raises(ConfigError, match="holds no key"):
        read_keys(config)
    with pytest.raises(ConfigError) as caught:
        resolve({}, {"PACELINE_API_KEY": "secret,\u00e9"})
    assert "secret" not in str(caught.value)
