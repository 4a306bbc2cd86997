"""GGUF's types of blocks, each against its definition written out number by number; rows of them; and models
in several parts.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from paceline.core.errors import ModelFileError, ModelNotFound
from paceline.cpu.decoder import CpuDecoder
from paceline.loaders import hub
from paceline.loaders.checkpoint import describe, open_checkpoint
from paceline.loaders.gguf import GgufCheckpoint
from paceline.loaders.gguf_parts import models_among, part_names
from paceline.loaders.packed import cache_path
from tests.make_models import tiny_gguf, tiny_hf, tiny_tokenizer
from tests.passes import Rows, batch_of, new_kv, shuffled_blocks

WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
Block = list[int]


def half(block: Block, at: int) -> float:
    return float(np.array(block[at : at + 2], np.uint8).view(np.float16)[0])


def q2_k(block: Block) -> Iterator[float]:
    """Scales and minima of four bits for each 16 values, then the values, two bits each."""
    d, least = half(block, 80), half(block, 82)
    for i in range(256):
        part, inside = divmod(i, 128)
        scale = block[i // 16]
        q = block[16 + 32 * part + inside % 32] >> 2 * (inside // 32) & 3
        yield d * (scale & 15) * q - least * (scale >> 4)


def q3_k(block: Block) -> Iterator[float]:
    """The third bit of each value first, then the lower two, then sixteen scales of six bits."""
    mask, low, packed = block[:32], block[32:96], block[96:108]
    for i in range(256):
        part, inside = divmod(i, 128)
        group = i // 16
        scale = (
            packed[group % 8] >> 4 * (group // 8) & 15 | (packed[8 + group % 4] >> 2 * (group // 4) & 3) << 4
        )
        q = low[32 * part + inside % 32] >> 2 * (inside // 32) & 3
        q -= 0 if mask[i % 32] >> i // 32 & 1 else 4
        yield half(block, 108) * (scale - 32) * q


def six_bits(packed: Block, i: int) -> tuple[int, int]:
    """Scale and minimum of the i-th 32 values of Q4_K and Q5_K."""
    if i < 4:
        return packed[i] & 63, packed[i + 4] & 63
    return packed[i + 4] & 15 | packed[i - 4] >> 6 << 4, packed[i + 4] >> 4 | packed[i] >> 6 << 4


def q4_k(block: Block) -> Iterator[float]:
    for i in range(256):
        scale, least = six_bits(block[4:16], i // 32)
        q = block[16 + 32 * (i // 64) + i % 32] >> 4 * (i // 32 % 2) & 15
        yield half(block, 0) * scale * q - half(block, 2) * least


def q5_k(block: Block) -> Iterator[float]:
    for i in range(256):
        scale, least = six_bits(block[4:16], i // 32)
        q = block[48 + 32 * (i // 64) + i % 32] >> 4 * (i // 32 % 2) & 15
        q |= (block[16 + i % 32] >> i // 32 & 1) << 4
        yield half(block, 0) * scale * q - half(block, 2) * least


def q6_k(block: Block) -> Iterator[float]:
    for i in range(256):
        part, inside = divmod(i, 128)
        low = block[64 * part + inside % 64] >> 4 * (inside // 64) & 15
        high = block[128 + 32 * part + inside % 32] >> 2 * (inside // 32) & 3
        scale = int(np.int8(np.uint8(block[192 + i // 16])))
        yield half(block, 208) * scale * ((low | high << 4) - 32)


def iq4_nl(block: Block) -> Iterator[float]:
    for i in range(32):
        yield half(block, 0) * NONLINEAR[block[2 + i % 16] >> 4 * (i // 16) & 15]


def iq4_xs(block: Block) -> Iterator[float]:
    high = block[2] | block[3] << 8
    for i in range(256):
        part, inside = divmod(i, 32)
        scale = block[4 + part // 2] >> 4 * (part % 2) & 15 | (high >> 2 * part & 3) << 4
        q = block[8 + 16 * part + inside % 16] >> 4 * (inside // 16) & 15
        yield half(block, 0) * (scale - 32) * NONLINEAR[q]


def mxfp4(block: Block) -> Iterator[float]:
    for i in range(32):
        yield FP4[block[1 + i % 16] >> 4 * (i // 16) & 15] * 2.0 ** (block[0] - 127)


DEFINITIONS: dict[str, Callable[[Block], Iterator[float]]] = {
    "Q2_K": q2_k, "Q3_K": q3_k, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k, "IQ4_NL": iq4_nl, "IQ4_XS": iq4_xs,
    "MXFP4": mxfp4,
}  # fmt: skip


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hf(tmp_path_factory.mktemp("wide"), "llama", vocab_size=32, **WIDE)


@pytest.mark.parametrize("quant", DEFINITIONS)
def test_weights_are_what_the_type_means(quant: str, wide: Path, tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", wide, quant)
    found = GgufCheckpoint(path, "m").tensor("layers.0.mlp.down_proj.weight").numpy()
    stored = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.ffn_down.weight")
    assert stored.tensor_type.name == quant
    size = gguf.GGML_QUANT_SIZES[stored.tensor_type][1]
    blocks = np.array(stored.data).reshape(-1, size)[:60].tolist()
    wanted = np.array([list(DEFINITIONS[quant](block)) for block in blocks]).reshape(-1)
    np.testing.assert_allclose(found.reshape(-1)[: len(wanted)], wanted, rtol=1e-5, atol=1e-9)
    assert np.abs(wanted).max() > 0


@pytest.mark.parametrize("quant", ["Q4_K", "Q6_K", "Q8_0", "IQ4_XS", "F16"])
def test_of_rows_only_those_are_unpacked(
    quant: str, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = GgufCheckpoint(tiny_gguf(tmp_path / "m.gguf", wide, quant), "m")
    whole = {name: checkpoint.tensor(name) for name in checkpoint.config.weight_names()}
    unpacked: list[int] = []
    original = gguf.quants.dequantize

    def counted(rows: Any, kind: Any) -> Any:
        unpacked.append(len(rows))
        return original(rows, kind)

    monkeypatch.setattr(gguf.quants, "dequantize", counted)
    for name, weight in whole.items():
        if weight.ndim == 2:
            for rows in (slice(3, 9), slice(20, 31), slice(0, 1), slice(5, 5), slice(30, None)):
                unpacked.clear()
                assert torch.equal(checkpoint.tensor(name, rows), weight[rows]), (name, rows)
                # rows of q and k lie interleaved inside their heads of 64
                heads = 64 if ".q_proj." in name or ".k_proj." in name else 1
                first, last, _ = rows.indices(len(weight))
                assert sum(unpacked) <= -(-last // heads) * heads - first // heads * heads


@pytest.fixture
def split(tmp_path: Path) -> tuple[Path, Path]:
    """A model in one file, and the folder that holds it in parts."""
    folder = tiny_tokenizer(tiny_hf(tmp_path / "hf", "llama3"))
    whole = tiny_gguf(tmp_path / "whole.gguf", folder, "Q8_0")
    (tmp_path / "parts").mkdir()
    tiny_gguf(tmp_path / "parts" / "m.gguf", folder, "Q8_0", tensors_a_part=6)
    return whole, tmp_path / "parts"


def test_any_part_or_the_folder_opens_the_model(split: tuple[Path, Path]) -> None:
    whole, folder = split
    parts, one = sorted(folder.glob("*.gguf")), open_checkpoint(str(whole))
    assert len(parts) == 4
    assert parts[0].name == "m-00001-of-00004.gguf"
    for path in (parts[0], parts[2], folder):
        checkpoint = open_checkpoint(str(path))
        assert (checkpoint.path, checkpoint.config) == (parts[0], one.config)
        assert describe(str(path)).config == describe(str(whole)).config
        assert (checkpoint.eos_ids, checkpoint.bos_id) == (one.eos_ids, one.bos_id)
        assert checkpoint.tokenizer_source() == one.tokenizer_source()
        for name in one.config.weight_names():
            assert torch.equal(checkpoint.tensor(name), one.tensor(name)), name
            assert torch.equal(checkpoint.tensor(name, slice(3, 7)), one.tensor(name, slice(3, 7))), name
    before = cache_path(checkpoint, 8)
    data = bytearray(parts[1].read_bytes())
    data[-200:] = bytes(200)
    parts[1].write_bytes(data)  # what was packed of it is of other weights now
    assert cache_path(open_checkpoint(str(folder)), 8) != before


def test_parts_give_the_same_logits(split: tuple[Path, Path]) -> None:
    batch = batch_of([Rows(list(range(30)), shuffled_blocks(1)[0])])
    logits = []
    for path in split:
        model = CpuDecoder.load(open_checkpoint(str(path)), dtype="int4", use_cache=False)
        logits.append(model.forward(batch, new_kv(model)).logits)
    assert torch.equal(*logits)


def test_a_part_that_is_missing_or_another_is_named(split: tuple[Path, Path]) -> None:
    folder = split[1]
    parts = sorted(folder.glob("*.gguf"))
    shutil.copy(parts[1], parts[2])
    with pytest.raises(
        ModelFileError, match=r"m-00003-of-00004\.gguf says that it is part 1 of 4, counted from 0"
    ):
        open_checkpoint(str(parts[0]))
    parts[2].unlink()
    for path in (parts[0], parts[3], folder):
        with pytest.raises(ModelFileError, match=r"of 4 parts m-00003-of-00004\.gguf is missing; fetch all"):
            open_checkpoint(str(path))
    parts[0].rename(folder / "renamed.gguf")
    with pytest.raises(ModelFileError, match=r"renamed\.gguf says that it is part 0 of 4"):
        open_checkpoint(str(folder / "renamed.gguf"))


def test_a_part_cut_short_is_named(split: tuple[Path, Path]) -> None:
    last = max(split[1].glob("*.gguf"))
    last.write_bytes(last.read_bytes()[:-1000])
    with pytest.raises(ModelFileError, match=rf"{last.name}: tensor .* is truncated"):
        open_checkpoint(str(split[1]))


def test_parts_count_as_one_model_where_models_are_listed(
    split: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, folder = split
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    shutil.copytree(folder, tmp_path / "cache" / "models")
    size = sum(part.stat().st_size for part in folder.glob("*.gguf"))
    found = [(model.name, model.bytes) for model in hub.local_models()[1:] if model.kind == "gguf"]
    assert ("m-00001-of-00004", size) in found
    shutil.copy(whole, folder / "other.gguf")
    with pytest.raises(ModelNotFound, match="2 GGUF files"):
        open_checkpoint(str(folder))


def test_names_of_parts() -> None:
    assert part_names("a.gguf") == ("a.gguf",)
    assert part_names("x/a-00002-of-00002.gguf") == ("x/a-00001-of-00002.gguf", "x/a-00002-of-00002.gguf")
    assert part_names("a-00001-of-99999.gguf") == ("a-00001-of-99999.gguf",)  # no model has that many parts
    assert models_among(["b.gguf", "a-00002-of-00003.gguf", "a-00003-of-00003.gguf"]) == [
        "a-00001-of-00003.gguf",
        "b.gguf",
    ]
