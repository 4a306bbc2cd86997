"""Packed weights on disk: read again instead of packed again, and never trusted more than they deserve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.cpu.decoder import CpuDecoder
from paceline.loaders import packed
from paceline.loaders.checkpoint import Checkpoint, open_checkpoint
from paceline.loaders.fields import ALL, NUM_SAMPLES, SAMPLE_BYTES
from paceline.loaders.packed import (
    ALIGNMENT,
    Tensors,
    cache_path,
    expected,
    load_packed,
    pack_model,
    packed_parts,
    read,
    write,
)
from tests.make_models import tiny_gguf, tiny_hf, tiny_tokenizer
from tests.passes import Rows, batch_of, new_kv, shuffled_blocks

BITS = {"int8": 8, "int4": 4}


def test_models_of_random_weights_have_files_of_their_own() -> None:
    shapes = [open_checkpoint(name, load_format="dummy") for name in ("llama-8b", "smollm2-135m")]
    first, second = (cache_path(shape, 8) for shape in shapes)
    assert first.name.startswith("dummy-llama-8b-")
    assert first.name != second.name
    assert shapes[0].fingerprint[:12] != shapes[1].fingerprint[:12]


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("PACELINE_CACHE", str(folder))
    return folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hf(
        tmp_path_factory.mktemp("model"),
        "qwen2",
        hidden_size=80,
        num_attention_heads=5,
        num_key_value_heads=1,
        vocab_size=383,
    )


@pytest.fixture(scope="module")
def opened(model_folder: Path) -> Checkpoint:
    return open_checkpoint(str(model_folder), progress=False)


def same(found: Tensors, wanted: Tensors) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name], tensor) and found[name].dtype is tensor.dtype
        for name, tensor in wanted.items()
    )


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def put(path: Path, tensors: Tensors) -> None:
    kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write(path, kinds, [(name, [tensor]) for name, tensor in tensors.items()])


def stamp(path: Path) -> tuple[int, int]:
    return path.stat().st_ino, path.stat().st_mtime_ns


class Untouchable:
    """A checkpoint whose weights must not be asked for."""

    def __init__(self, opened: Checkpoint) -> None:
        self.config, self.fingerprint, self.path = opened.config, opened.fingerprint, opened.path

    def tensor(self, name: str, rows: slice = ALL) -> torch.Tensor:
        raise AssertionError(f"{name} was read from the model")


@pytest.mark.parametrize("dtype", BITS)
def test_the_second_load_reads_the_file(cache_folder: Path, opened: Checkpoint, dtype: str) -> None:
    first = load_packed(opened, BITS[dtype])
    path = cache_path(opened, BITS[dtype])
    before = stamp(path)
    second = load_packed(Untouchable(opened), BITS[dtype])
    assert same(first, pack_model(opened, BITS[dtype]))
    assert same(second, first)
    assert stamp(path) == before
    assert files_in(cache_folder) == [path.name]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the kernel does not list mappings here")
def test_the_file_is_mapped_and_not_copied(cache_folder: Path, opened: Checkpoint) -> None:
    tensors = load_packed(opened, 8)
    lines = [
        line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(cache_path(opened, 8)))
    ]
    spans = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in lines]
    assert spans
    assert all(any(first <= tensor.data_ptr() < last for first, last in spans) for tensor in tensors.values())


def test_any_reader_of_safetensors_understands_it(cache_folder: Path, opened: Checkpoint) -> None:
    load_packed(opened, 4)
    path = cache_path(opened, 4)
    assert same(load_file(path), pack_model(opened, 4))
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    assert (8 + size) % ALIGNMENT == 0
    kinds = expected(opened.config, 4)
    assert {name: tuple(entry["shape"]) for name, entry in header.items()} == {
        name: shape for name, (_, shape) in kinds.items()
    }


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_what_is_packed_is_what_is_expected(family: str, tied: bool, tmp_path: Path) -> None:
    model = open_checkpoint(
        str(tiny_hf(tmp_path, family, hidden_size=96, vocab_size=390, tie_word_embeddings=tied)),
        progress=False,
    )
    for bits in (8, 4):
        tensors = pack_model(model, bits)
        assert {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()} == expected(
            model.config, bits
        )


@pytest.mark.parametrize("bits", [32, 8, 4])
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_a_few_rows_at_a_time_give_the_same(
    kind: str, bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_hf(tmp_path / "model", "llama", hidden_size=96, vocab_size=390, intermediate_size=150)
    path = folder if kind == "safetensors" else tiny_gguf(tmp_path / "m.gguf", tiny_tokenizer(folder))
    model = open_checkpoint(str(path), progress=False)
    whole = pack_model(model, bits)
    monkeypatch.setattr(packed, "CHUNK_BYTES", 1)
    assert same(pack_model(model, bits), whole)
    parts = {name: len(list(parts)) for name, parts in packed_parts(model, bits)}
    assert parts["embedding.weight"] > 1
    assert parts["layers.0.down.weight"] > 1
    assert parts["layers.0.gate_up.weight"] > 1


def truncated(path: Path, tensors: Tensors) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def cut_in_its_header(path: Path, tensors: Tensors) -> None:
    path.write_bytes(path.read_bytes()[:50])


def emptied(path: Path, tensors: Tensors) -> None:
    path.write_bytes(b"")


def foreign(path: Path, tensors: Tensors) -> None:
    path.write_bytes(os.urandom(5000))


def of_enormous_header(path: Path, tensors: Tensors) -> None:
    path.write_bytes((2**62).to_bytes(8, "little") + b"{}")


def of_other_names(path: Path, tensors: Tensors) -> None:
    put(path, {f"{name}_": tensor for name, tensor in tensors.items()})


def without_a_tensor(path: Path, tensors: Tensors) -> None:
    put(path, {name: tensor for name, tensor in tensors.items() if name != "norm.weight"})


def of_wrong_shape(path: Path, tensors: Tensors) -> None:
    put(path, {**tensors, "layers.0.qkv.weight": tensors["layers.0.qkv.weight"][:-1].contiguous()})


def of_wrong_type(path: Path, tensors: Tensors) -> None:
    put(path, {**tensors, "norm.weight": torch.zeros(tensors["norm.weight"].shape, dtype=torch.uint8)})


DAMAGES: list[Callable[[Path, Tensors], None]] = [
    truncated, cut_in_its_header, emptied, foreign, of_enormous_header, of_other_names, without_a_tensor, of_wrong_shape, of_wrong_type,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_file_that_is_not_what_it_should_be_is_packed_anew(
    cache_folder: Path, opened: Checkpoint, damage: Callable[[Path, Tensors], None]
) -> None:
    good = pack_model(opened, 8)
    path = cache_path(opened, 8)
    put(path, good)
    assert read(path, opened.config, 8) is not None
    damage(path, good)
    assert read(path, opened.config, 8) is None
    assert same(load_packed(opened, 8), good)
    assert same(load_packed(Untouchable(opened), 8), good)  # and is good again
    assert files_in(cache_folder) == [path.name]


def test_a_folder_that_cannot_be_written_costs_time_only(
    tmp_path: Path, opened: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder can be made below a file")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file" / "cache"))
    assert same(load_packed(opened, 8), pack_model(opened, 8))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "blocked"))
    cache_path(opened, 8).mkdir(parents=True)  # a folder where the file should be
    assert same(load_packed(opened, 8), pack_model(opened, 8))
    assert files_in(tmp_path) == ["file"]


def test_a_changed_model_has_another_name(cache_folder: Path, tmp_path: Path) -> None:
    """The same path, sizes and names, other weights: what was packed before is not used."""
    folder = tmp_path / "model"
    before = open_checkpoint(str(tiny_hf(folder, "llama", seed=0)), progress=False)
    load_packed(before, 8)
    after = open_checkpoint(str(tiny_hf(folder, "llama", seed=1)), progress=False)
    assert after.config == before.config
    assert same(load_packed(after, 8), pack_model(after, 8))
    paths = {cache_path(model, bits) for model in (before, after) for bits in (8, 4)}
    assert len(paths) == 4
    assert len(files_in(cache_folder)) == 2


def test_a_few_changed_bytes_are_noticed(cache_folder: Path, tmp_path: Path) -> None:
    """A fingerprint is of samples; this change lies between two of them."""
    path = tiny_gguf(tmp_path / "model.gguf", tiny_tokenizer(tiny_hf(tmp_path / "model", "llama")))
    before = open_checkpoint(str(path), progress=False)
    load_packed(before, 8)
    content = bytearray(path.read_bytes())
    at = len(content) * 40 // NUM_SAMPLES + SAMPLE_BYTES + 256
    content[at : at + 400] = bytes(400)
    path.write_bytes(content)
    after = open_checkpoint(str(path), progress=False)
    assert after.fingerprint == before.fingerprint
    assert same(load_packed(after, 8), pack_model(after, 8))


def test_two_processes_at_once_leave_one_good_file(
    cache_folder: Path, model_folder: Path, opened: Checkpoint
) -> None:
    code = (
        "import sys; from paceline.loaders.checkpoint import open_checkpoint; from paceline.loaders.packed import load_packed;"
        "model = open_checkpoint(sys.argv[1], False); print('ready', flush=True); sys.stdin.readline();"
        "tensors = load_packed(model, 8); print(sum(float(t.double().sum()) for t in tensors.values()))"
    )
    both: list[Any] = [  # with pipes at both ends
        subprocess.Popen(
            [sys.executable, "-c", code, str(model_folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in both:
        assert process.stdout.readline() == "ready\n"
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=300)[0] for process in both]
    good = pack_model(opened, 8)
    assert [float(answer) for answer in answers] == [sum(float(t.double().sum()) for t in good.values())] * 2
    assert same(load_packed(Untouchable(opened), 8), good)
    assert files_in(cache_folder) == [cache_path(opened, 8).name]


@pytest.mark.parametrize("dtype", BITS)
def test_a_decoder_from_the_file_gives_the_same_bits(
    cache_folder: Path, opened: Checkpoint, dtype: str
) -> None:
    batch = batch_of([Rows(list(range(30)), shuffled_blocks(1)[0])])
    models = [CpuDecoder.load(opened, dtype=dtype, use_cache=use_cache) for use_cache in (False, True, True)]
    logits = [model.forward(batch, new_kv(model)).logits for model in models]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_float_weights_are_not_kept_twice(cache_folder: Path, opened: Checkpoint) -> None:
    load_packed(opened, 32)
    assert not cache_folder.exists()
