"""Who may ask what, and what is never told: keys, prompts, answers; and bodies that are not what they should
be.
"""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.measure.faults_wire import HARD
from paceline.server.middleware import Keys, needs_key
from tests.server.conftest import KEYS
from tests.server.harness import WAIT_S, Server, as_stranger, launch

ROUTES = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/resp_1"),
    ("DELETE", "/v1/responses/resp_1"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("GET", "/v1/no/such/route"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
]
SECRET = "the quick brown fox 4711"
BODY = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4}


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "shown", [None, "Bearer wrong", f"Bearer {KEYS[0]}x", f"Basic {KEYS[0]}", "Bearer", KEYS[0]]
)
def test_no_route_answers_without_a_key(
    tiny_server: Server, method: str, path: str, shown: str | None
) -> None:
    headers = {} if shown is None else {"authorization": shown}
    answer = as_stranger(
        method, tiny_server.url + path, headers=headers, json=BODY if method == "POST" else None
    )
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", KEYS)
def test_every_key_opens(tiny_server: Server, key: str) -> None:
    assert (
        as_stranger(
            "GET", f"{tiny_server.url}/v1/models", headers={"authorization": f"Bearer {key}"}
        ).status_code
        == 200
    )


def test_what_tells_nothing_is_open(tiny_server: Server) -> None:
    for path in ("/health", "/ready", "/version", "/metrics", "/openapi.json"):
        assert as_stranger("GET", tiny_server.url + path).status_code == 200
        assert not needs_key(path)
    for path in ("/v1", "/v1/models", "/anything", "/playgroundx", "//v1/models", "/health/../v1/models"):
        assert needs_key(path)


def test_keys_are_compared_whole_and_not_kept() -> None:
    keys = Keys(["alpha", "beta"])
    assert keys.find("Bearer beta") == 1
    assert keys.find("bearer alpha") == 0
    assert not any(
        keys.find(shown) is not None
        for shown in (None, "", "Bearer", "Bearer alph", "Bearer alphabeta", "Token alpha")
    )
    assert "alpha" not in repr(vars(keys))
    assert Keys([]).find(None) == 0


def test_logs_hold_neither_keys_nor_words(tiny_server: Server) -> None:
    name = f"id-from-the-client.{time.monotonic_ns()}"
    answer = tiny_server.http.post("/v1/chat/completions", json=BODY, headers={"x-request-id": name})
    assert answer.headers["x-request-id"] == name
    said = answer.json()["choices"][0]["message"]["content"]
    tiny_server.post("/v1/chat/completions", **BODY, no_such_field=SECRET)
    tiny_server.http.post(
        "/v1/completions",
        content=f'{{"prompt": "{SECRET} \\ud800"}}'.encode(),
        headers={"content-type": "application/json"},
    )
    tiny_server.post("/v1/completions", prompt=SECRET, guided_regex=f"({SECRET}")
    tiny_server.post("/v1/completions", prompt=SECRET, stop=[SECRET], model=SECRET)
    tiny_server.http.get(f"/{SECRET}")
    tiny_server.http.post("/v1/completions", content=f'{{"prompt": "{SECRET}", '.encode())
    last = tiny_server.http.get("/v1/models").headers["x-request-id"]
    tiny_server.wait_until(last)  # lines come in the order of the requests
    text = tiny_server.log.read_text(encoding="utf-8")
    for hidden in (SECRET, *KEYS, SECRET.replace(" ", "%20")):
        assert hidden not in text
    assert len(said) < 2 or said not in text
    lines = [line for line in tiny_server.lines() if line["event"] == "request"]
    (mine,) = [line for line in lines if line["request_id"] == name]
    assert mine["route"] == "/v1/chat/completions"
    assert mine["status"] == 200
    assert mine["completion_tokens"] == answer.json()["usage"]["completion_tokens"]


def test_a_strange_request_id_is_not_taken(tiny_server: Server) -> None:
    given = tiny_server.http.get("/version", headers={"x-request-id": "a b\tc"}).headers["x-request-id"]
    assert given.isalnum()


def test_cors_for_the_named_origin_only(tiny_server: Server) -> None:
    ask = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    ours = as_stranger(
        "OPTIONS", f"{tiny_server.url}/v1/models", headers={"origin": "https://page.example", **ask}
    )
    other = as_stranger(
        "OPTIONS", f"{tiny_server.url}/v1/models", headers={"origin": "https://evil.example", **ask}
    )
    assert ours.status_code == 200
    assert ours.headers["access-control-allow-origin"] == "https://page.example"
    assert "access-control-allow-origin" not in other.headers


BAD_BODIES: dict[str, bytes] = {
    "empty": b"",
    "not json": b"{",
    "text": b"hello",
    "a list": b"[1, 2]",
    "a number": b"7",
    "not utf-8": b'{"prompt": "\xff\xfe"}',
    "deep": b"[" * 100_000,
    "deep object": b'{"a":' * 50_000,
    "deep schema": b'{"prompt": "x", "guided_json": ' + b'{"items":' * 900 + b"{}" + b"}" * 900 + b"}",
    "nan": b'{"prompt": "x", "temperature": NaN}',
    "infinite": b'{"prompt": "x", "top_p": 1e999}',
    "huge number": b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    "large number": b'{"prompt": "x", "max_tokens": -99999999999999999999}',
    "null prompt": b'{"prompt": null}',
    "mixed prompt": b'{"prompt": ["x", 1]}',
    "empty prompt": b'{"prompt": ""}',
    "negative token": b'{"prompt": [-1]}',
    "huge token": b'{"prompt": [99999999999999999999]}',
    "half a character": b'{"prompt": "\\ud800"}',
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_malformed_bodies_are_400(tiny_server: Server, name: str) -> None:
    answer = tiny_server.http.post(
        "/v1/completions", content=BAD_BODIES[name], headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_oversized_bodies_are_413(tiny_server: Server) -> None:
    assert tiny_server.post("/v1/completions", prompt="x" * 2**20).status_code == 413

    def pieces() -> Any:
        for _ in range(2000):
            yield b"x" * 1024

    assert (
        tiny_server.http.post("/v1/completions", content=pieces()).status_code == 413
    )  # no content-length to go by


def test_other_methods_and_kinds(tiny_server: Server) -> None:
    assert tiny_server.http.get("/v1/completions").status_code == 405
    assert tiny_server.http.get("/nowhere").status_code == 404
    plain = tiny_server.http.post(
        "/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": "text/plain"}
    )
    assert plain.status_code == 400
    assert plain.json()["error"]["type"] == "invalid_request_error"


def test_a_body_that_dribbles_is_given_up(limited_server: Server) -> None:
    host, port = limited_server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
        )
        connection.settimeout(WAIT_S)
        assert b" 408 " in connection.recv(4096)


@pytest.mark.parametrize(
    "options",
    [
        {"guided_regex": "(((a{1,99}){1,99}){1,99}){1,99}b"},
        {"guided_regex": "(a|aa|aaa|b?c?d?)*" * 200 + "e"},
        {
            "guided_grammar": "start: a\n"
            + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(40))
            + "\na: a0\na40: /x*/"
        },
        {"guided_json": {"type": "array", "items": {"$ref": "#"}, "minItems": 10**6}},
        {"guided_json": {"enum": [f"word{i}" for i in range(4000)]}},
        {"guided_choice": ["x" * 70_000]},
        HARD[-1],
        {"bad_words": [chr(97 + i % 26) * (i % 50 + 1) for i in range(128)]},
    ],
    ids=[
        "repeats",
        "branches",
        "doubling",
        "many items",
        "long enum",
        "long choice",
        "meeting patterns",
        "many bad words",
    ],
)
def test_hard_grammars_are_refused_or_done_in_time(tiny_server: Server, options: dict[str, Any]) -> None:
    """In seconds, and where others use the machine in a minute; the worst of them would take hours."""
    started = time.monotonic()
    answer = tiny_server.post("/v1/completions", prompt="x", max_tokens=4, temperature=0, **options)
    assert answer.status_code in (200, 400)
    assert time.monotonic() - started < 60
    assert tiny_server.post("/v1/completions", prompt="x", max_tokens=1).status_code == 200


def test_template_options_run_no_code(tiny_server: Server) -> None:
    for value in ({"x": "{{ ''.__class__.__mro__ }}"}, {"loop": "x" * 100_000}, {"raise_exception": "x"}):
        answer = tiny_server.post("/v1/chat/completions", **BODY, chat_template_kwargs=value)
        assert answer.status_code in (200, 400)
    said = tiny_server.post("/tokenize", messages=[{"role": "user", "content": "{{ 7 * 7 }}"}]).json()[
        "tokens"
    ]
    assert "{{ 7 * 7 }}" in tiny_server.post("/detokenize", tokens=said).json()["prompt"]


def test_tokenize_and_detokenize_are_inverse(tiny_server: Server) -> None:
    text = "Naïve riders brake; 你好"
    made = tiny_server.post("/tokenize", prompt=text).json()
    assert made["count"] == len(made["tokens"])
    assert made["max_model_len"] == 4096
    assert tiny_server.post("/detokenize", tokens=made["tokens"]).json() == {"prompt": text}
    assert tiny_server.post("/detokenize", tokens=[10**6]).status_code == 400
    assert tiny_server.post("/tokenize").status_code == 400


def test_curl_reads_a_stream(tiny_server: Server) -> None:
    body = json.dumps(
        {"prompt": "In a paceline,", "max_tokens": 6, "temperature": 0, "stream": True, "ignore_eos": True}
    )
    command = [
        "curl",
        "-sN",
        f"{tiny_server.url}/v1/completions",
        "-H",
        f"Authorization: Bearer {KEYS[0]}",
        "-H",
        "Content-Type: application/json",
        "-d",
        body,
    ]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=WAIT_S).stdout.split(
        "\n\n"
    )
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    whole = tiny_server.post(
        "/v1/completions", prompt="In a paceline,", max_tokens=6, temperature=0, ignore_eos=True
    ).json()
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]


def test_the_page_has_a_strict_policy(tiny_server: Server) -> None:
    page = as_stranger("GET", f"{tiny_server.url}/")
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for name in ("../config.py", "..%2fconfig.py", "%2e%2e/config.py", "nothing.js"):
        assert as_stranger("GET", f"{tiny_server.url}/playground/{name}").status_code in (401, 404)


def test_https_with_a_certificate(wide_folder: Path, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    names = f"-subj /CN=localhost -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {cert}"
    make = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 {names}".split()
    subprocess.run(make, check=True, capture_output=True, timeout=WAIT_S)
    server = launch(str(wide_folder), "--ssl-certfile", str(cert), "--ssl-keyfile", str(key))
    try:
        server.connect(verify=ssl.create_default_context(cafile=str(cert)))
        assert server.url.startswith("https://")
        server.wait_until_ready()
        assert server.post("/v1/completions", prompt="x", max_tokens=2).status_code == 200
    finally:
        server.kill()
