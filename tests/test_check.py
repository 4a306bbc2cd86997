"""`paceline models --check`: what it says of models here and on Hugging Face, its exit status, and that it
fetches no weights.

Hugging Face is a small server on this machine that notes what it is asked for.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.loaders.checkpoint import open_checkpoint
from paceline.loaders.packed import pack_model
from tests.make_models import SIZES, tiny_gguf, tiny_hf, tiny_tokenizer
from tests.quantized_models import write_pair


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tiny_hf(tmp_path_factory.mktemp("check") / "tiny", "llama"))


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folder, tmp_path / "copy")


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["models", "--check", *arguments])


def checked(model: Path | str, status: int = 0) -> dict[str, Any]:
    done = invoke(str(model), "--json")
    assert done.exit_code == status, done.output
    report = dict(json.loads(done.stdout))
    assert report["runs"] is (status == 0)
    assert bool(report["problems"]) is (status == 1)
    return report


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_model_that_runs(folder: Path) -> None:
    report = checked(folder)
    assert (report["model"], report["architecture"], report["quantization"]) == ("tiny", "llama", None)
    config = open_checkpoint(str(folder)).config
    numbers = sum(
        tensor.numel() for tensor in (open_checkpoint(str(folder)).tensor(n) for n in config.weight_names())
    )
    assert report["parameters"] == numbers
    assert (report["context"], report["tokenizer"], report["chat_template"]) == (512, True, True)
    assert report["bytes"] == (folder / "model.safetensors").stat().st_size
    needs = {(need["device"], need["dtype"]): need for need in report["memory"]}
    assert list(needs) == [("CPU", "int8"), ("CPU", "int4"), ("CPU", "float32"), ("GPU", "bfloat16")]
    packed = pack_model(open_checkpoint(str(folder)), 8)
    assert needs["CPU", "int8"]["weights"] * 1e9 == pytest.approx(
        sum(t.numel() * t.element_size() for t in packed.values())
    )
    assert needs["GPU", "bfloat16"]["weights"] * 1e9 == pytest.approx(2 * numbers)
    assert needs["CPU", "float32"]["kv_token"] * 1e3 == 2 * 2 * 2 * 16 * 4  # layers, K and V, KV heads, width
    assert needs["CPU", "float32"]["kv"] * 1e9 == pytest.approx(512 * 512)
    assert needs["CPU", "int4"]["longest"] == 512


def test_the_table_says_the_same(folder: Path) -> None:
    done = invoke(str(folder))
    assert done.exit_code == 0
    for said in ("runs here", "yes", "llama", "512 tokens", "bfloat16", "float32", "suffix and ngram"):
        assert said in done.stdout, said
    assert "problems" not in done.stdout


def test_heads_that_ship_are_found_by_the_weights_alone(folder: Path) -> None:
    assert any(draft.startswith("eagle: the head in") for draft in checked("default")["drafts"])
    assert not any("ships" in draft for draft in checked(folder)["drafts"])
    shape = checked("smollm2-135m")
    assert any("if it was trained on these weights" in draft for draft in shape["drafts"])
    assert (shape["tokenizer"], shape["bytes"]) == (None, None)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba"}, "model type 'mamba'"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu'"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method = 'bitsandbytes'"),
        ({"vocab_size": 400}, "embed_tokens.weight has shape [384, 64]"),
    ],
)
def test_what_is_missing_is_named_with_its_field(changes: dict[str, Any], named: str, copied: Path) -> None:
    edit(copied, **changes)
    report = checked(copied, status=1)
    assert any(named in problem for problem in report["problems"])
    done = invoke(str(copied))
    assert done.exit_code == 1
    assert "problems" in done.stdout


def test_every_problem_of_a_config_is_named(copied: Path) -> None:
    edit(copied, model_type="mamba", quantization_config={"quant_method": "aqlm"})
    first, second = checked(copied, status=1)["problems"]
    assert "mamba" in first
    assert "aqlm" in second


def test_a_config_alone_is_enough_and_a_folder_without_weights_is_not(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    assert checked(copied / "config.json")["parameters"] > 0
    assert "no weights" in checked(copied, status=1)["problems"][0]
    (copied / "config.json").unlink()
    assert invoke(str(copied)).exit_code == 2


def test_a_model_without_a_tokenizer_does_not_run(copied: Path) -> None:
    (copied / "tokenizer.json").unlink()
    report = checked(copied, status=1)
    assert report["tokenizer"] is False


def test_a_model_larger_than_the_memory_does_not_run(copied: Path) -> None:
    huge = json.loads((copied / "config.json").read_text()) | {
        "hidden_size": 1 << 17,
        "num_hidden_layers": 1000,
    }
    (copied / "config.json").write_text(json.dumps(huge | {"head_dim": 128}))
    report = checked(copied / "config.json", status=1)
    assert "its smallest form takes" in report["problems"][0]
    assert {need["longest"] for need in report["memory"] if need["device"] == "CPU"} == {0}


def test_quantized_and_gguf_models(folder: Path, tmp_path: Path) -> None:
    pair = write_pair(tmp_path, "fp8 blocks")
    tiny_tokenizer(pair.quantized)
    assert checked(pair.quantized)["quantization"] == "FP8, blocks of 128 x 128"
    pair = write_pair(tmp_path / "mxfp4", "ct mxfp4")
    tiny_tokenizer(pair.quantized)
    needs = {(need["device"], need["dtype"]): need for need in checked(pair.quantized)["memory"]}
    shapes = open_checkpoint(str(pair.quantized)).config.weight_names()
    narrow = sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("layers."))
    whole = sum(map(math.prod, shapes.values())) - narrow
    assert needs["GPU", "mxfp4"]["weights"] * 1e9 == pytest.approx(2 * whole + 0.54 * narrow)
    report = checked(tiny_gguf(tmp_path / "m.gguf", folder, "Q8_0"))
    assert (report["kind"], report["quantization"], report["architecture"]) == ("gguf", "Q8_0", "llama")
    (tmp_path / "m.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:-5000])
    assert "truncated" in checked(tmp_path / "m.gguf", status=1)["problems"][0]


def test_recurrent_states_need_memory(tmp_path: Path) -> None:
    folder = tiny_tokenizer(tiny_hf(tmp_path, "qwen3_5"))
    needs = checked(folder)["memory"]
    # three versions of three layers: four heads' matrices, and three rows of a convolution, in float32
    assert {need["states"] for need in needs} == {3 * 3 * 4 * (4 * 16 * 32 + 3 * 192) / 1e9}


def test_layers_that_draft_are_named(copied: Path) -> None:
    edit(copied, num_nextn_predict_layers=1)
    assert any(draft.startswith("mtp: num_nextn_predict_layers = 1") for draft in checked(copied)["drafts"])


def test_names_that_are_nothing_exit_2() -> None:
    done = invoke("no-such-model")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "no-such-model" in done.stderr


class Hub(BaseHTTPRequestHandler):
    """As much of Hugging Face as listing and fetching need."""

    repos: dict[str, dict[str, bytes]]
    asked: list[str]
    sent: list[int]  # bytes of each answer

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.split("?")[0]
        for repo, files in self.repos.items():
            if path == f"/api/models/{repo}/tree/main":
                listed = [
                    {"type": "file", "path": name, "size": len(b), "oid": "0"} for name, b in files.items()
                ]
                return self._send(200, json.dumps(listed).encode())
            if path.startswith(f"/{repo}/resolve/main/"):
                name = path.rsplit("/", 1)[1]
                self.asked.append(name)
                if name not in files:
                    return self._send(404, b"", ("X-Error-Code", "EntryNotFound"))
                return self._send_file(files[name])
        return self._send(404, b"", ("X-Error-Code", "RepoNotFound"))

    def _send_file(self, content: bytes) -> None:
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last or len(content)) + 1]
        self.sent.append(len(part) if self.command == "GET" else 0)
        where = ("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}")
        etag = ("ETag", f'"{len(content)}"')
        return self._send(206, part, where, etag) if "Range" in self.headers else self._send(200, part, etag)

    def _send(self, status: int, body: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in (("X-Repo-Commit", "a" * 40), ("Content-Length", str(len(body))), *headers):
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def hub(folder: Path) -> Iterator[tuple[type[Hub], str]]:
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    index = {"metadata": {"total_size": 123456}, "weight_map": {"model.norm.weight": "model.safetensors"}}
    files |= {"model.safetensors.index.json": json.dumps(index).encode(), "chat_template.jinja": b"x"}
    folder = tiny_gguf(folder.parent / "q.gguf", folder, "Q8_0").parent
    split = tiny_gguf(folder / "s.gguf", folder / "tiny", "Q8_0", tensors_a_part=9).parent.glob("s-*.gguf")
    files["tiny.gguf"] = (folder / "q.gguf").read_bytes()
    mamba = {"config.json": json.dumps(SIZES | {"model_type": "mamba"}).encode(), "pytorch_model.bin": b""}
    repos = {"org/tiny": files, "org/mamba": mamba, "org/gguf": {"a.gguf": b"", "b.gguf": b""}}
    repos["org/split"] = {path.name: path.read_bytes() for path in split}
    handler = type("Handler", (Hub,), {"repos": repos, "asked": [], "sent": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield handler, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def on_the_hub(model: str, address: str, home: Path, verb: str = "--check", **limits: str) -> Any:
    """In its own process: huggingface_hub reads its settings when it is imported. limits: of the loader."""
    changes = "".join(f"hub.{name} = {value}; " for name, value in limits.items())
    code = f"from paceline.loaders import hub; {changes}from paceline.cli.entry import main; raise SystemExit(main())"
    settings = {"HF_ENDPOINT": address, "HF_HOME": str(home), "NO_PROXY": "*"}
    settings |= {"HF_HUB_ETAG_TIMEOUT": "120", "HF_HUB_DOWNLOAD_TIMEOUT": "120"}
    command = [sys.executable, "-c", code, "models", verb, model, "--json"]
    return subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)


def test_of_a_name_only_the_config_and_the_index_are_fetched(
    hub: tuple[type[Hub], str], tmp_path: Path
) -> None:
    handler, address = hub
    done = on_the_hub("org/tiny", address, tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(handler.asked) == {"config.json", "model.safetensors.index.json"}
    assert (report["model"], report["architecture"], report["bytes"]) == ("org/tiny", "llama", 123456)
    assert (report["tokenizer"], report["chat_template"], report["runs"]) == (True, True, True)


@pytest.mark.parametrize("name", ["org/tiny:tiny.gguf", "org/split", "org/split:s-00002-of-00003.gguf"])
def test_of_a_gguf_file_only_the_header_is_fetched(
    name: str, hub: tuple[type[Hub], str], folder: Path, tmp_path: Path
) -> None:
    handler, address = hub
    done = on_the_hub(name, address, tmp_path, HEADER_BYTES="(1000, 30_000)")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    whole = checked(folder.parent / "q.gguf")
    for key in ("architecture", "parameters", "context", "tokenizer", "kind", "quantization"):
        assert report[key] == whole[key], key
    assert report["bytes"] >= whole["bytes"]
    assert set(handler.sent) <= {0, 1000, 30_000}
    assert not list(tmp_path.rglob("*.gguf"))


def test_of_a_part_all_are_fetched(hub: tuple[type[Hub], str], folder: Path, tmp_path: Path) -> None:
    done = on_the_hub("org/split:s-00002-of-00003.gguf", hub[1], tmp_path, verb="--fetch")
    assert done.returncode == 0, done.stderr
    listed = {model["name"]: model for model in json.loads(done.stdout)}
    first = listed["org/split:s-00001-of-00003.gguf"]
    assert first["bytes"] == sum(path.stat().st_size for path in folder.parent.glob("s-*.gguf"))
    assert len(list(Path(first["path"]).parent.glob("*.gguf"))) == 3
    assert open_checkpoint(first["path"]).config.num_layers == 2


def test_problems_of_names_are_named(hub: tuple[type[Hub], str], tmp_path: Path) -> None:
    done = on_the_hub("org/mamba", hub[1], tmp_path)
    assert done.returncode == 1, done.stderr
    said = " ".join(json.loads(done.stdout)["problems"])
    assert all(word in said for word in ("'mamba'", "no .safetensors", "no tokenizer.json"))
    done = on_the_hub("org/gguf", hub[1], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "org/gguf:a.gguf" in done.stderr
    done = on_the_hub("org/absent", hub[1], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "org/absent" in done.stderr
