"""Tiles of many rows give the bits of the dot products: run here by the processor's own instructions, or by a
program that does what they do.
"""

from __future__ import annotations

import ctypes
import re
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from llvmlite import binding

from paceline.core.errors import ConfigError
from paceline.cpu import amx, compile, matmul
from paceline.models.quantize import BLOCK, GROUP, Quantized, pack_quantized
from tests.test_variants import CASES, Compiled, Tile, dots_of, function_source

NUM_OPERANDS = len(amx.Strip._fields) - 1
HAS_TILES = "amx" in compile.available()


class Registers:
    """What the instructions do, for processors that lack them: eight tiles of bytes in memory."""

    def __init__(self) -> None:
        self.rows, self.widths = [0] * 8, [0] * 8
        self.tiles = np.zeros((8, 16, 64), np.int8)

    def ldtilecfg(self, at: int) -> None:
        given = ctypes.string_at(at, 64)
        assert given[0] == 1
        assert not any(given[1:16])
        self.widths = np.frombuffer(given, np.uint16, 8, 16).tolist()
        self.rows = list(given[48:56])
        assert max(self.rows) <= 16
        assert max(self.widths) <= 64

    def tilerelease(self) -> None:
        self.rows = [0] * 8

    def tilezero(self, tile: int) -> None:
        self.tiles[tile] = 0

    def tileloadd64(self, tile: int, at: int, stride: int) -> None:
        assert self.rows[tile]
        self.tiles[tile] = 0
        for row in range(self.rows[tile]):
            found = ctypes.string_at(at + row * stride, self.widths[tile])
            self.tiles[tile, row, : self.widths[tile]] = np.frombuffer(found, np.int8)

    def tilestored64(self, tile: int, at: int, stride: int) -> None:
        for row in range(self.rows[tile]):
            data = self.tiles[tile, row, : self.widths[tile]].tobytes()
            ctypes.memmove(at + row * stride, data, len(data))

    def tdpbssd(self, total: int, first: int, second: int) -> None:
        assert self.rows[total] == self.rows[first]
        assert self.widths[first] == 4 * self.rows[second]
        assert self.widths[total] == self.widths[second]
        left = self.tiles[first].astype(np.int32)  # [row, k]
        right = self.tiles[second].reshape(16, 16, 4).astype(np.int32)  # [k / 4, column, 4]
        products = left @ right.transpose(0, 2, 1).reshape(64, 16)
        self.tiles[total] = (self.tiles[total].view(np.int32) + products).view(np.int8)


ARGUMENTS = {
    "ldtilecfg": "p", "tilerelease": "", "tilezero": "t", "tileloadd64": "tpi", "tilestored64": "tpi",
    "tdpbssd": "ttt",
}  # fmt: skip
KINDS: dict[str, Any] = {"p": ctypes.c_void_p, "t": ctypes.c_uint8, "i": ctypes.c_int64}
KEPT: list[Any] = []
INPUTS = namedtuple("INPUTS", "values scales sums")


def emulated(source: str) -> str:
    """The same program with calls of Python in place of the instructions."""
    registers = Registers()
    for name, kinds in ARGUMENTS.items():
        other = f"emulated_{name}_{len(KEPT)}"
        call = ctypes.CFUNCTYPE(None, *(KINDS[kind] for kind in kinds))(getattr(registers, name))
        KEPT.append(call)
        address = ctypes.cast(call, ctypes.c_void_p).value
        assert address is not None
        binding.add_symbol(other, address)
        source = re.sub(rf'@"?llvm\.x86\.{name}"?', f'@"{other}"', source)
    # what is there for the order alone, in terms of a register that other processors do not have
    return re.sub(
        r'call (<16 x float>) asm sideeffect "", "[^"]*" *\(<16 x float> ([^)]*)\)', r"freeze \1 \2", source
    )


def pair_source(bits: int) -> str:
    def write(emit: Any, *at: Any) -> None:
        amx.write_configuration(emit, bits, at[-1])
        amx.write_pair(emit, bits, *at)
        amx.write_release(emit)

    return function_source(NUM_OPERANDS, write)


def test_emulated_tiles_multiply() -> None:
    rng, registers = np.random.default_rng(0), Registers()
    registers.rows, registers.widths = [5, 5, 16], [32, 64, 32]
    a = rng.integers(-128, 128, (5, 64)).astype(np.int8)
    b = rng.integers(-128, 128, (64, 8)).astype(np.int8)
    laid = b.reshape(16, 4, 8).transpose(0, 2, 1).copy()
    c = np.zeros((5, 8), np.int32)
    registers.tileloadd64(1, a.ctypes.data, 64)
    registers.tileloadd64(2, laid.ctypes.data, 32)
    registers.tdpbssd(0, 1, 2)
    registers.tilestored64(0, c.ctypes.data, 32)
    assert (c == a.astype(np.int32) @ b.astype(np.int32)).all()


@pytest.mark.parametrize("num_groups", [1, 2, 5])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_pair_of_tiles_has_the_bits_of_dot_products(
    bits: int, num_groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = pair_source(bits)
    pair = Compiled(source if HAS_TILES else emulated(source), NUM_OPERANDS)
    single = Tile(dots_of("plain", monkeypatch), bits, 1)
    rng, k, rows = np.random.default_rng(bits), num_groups * GROUP[bits], 19
    low, high = (-127, 127) if bits == 8 else (0, 15)
    for draw in CASES.values():
        weights = torch.from_numpy(draw(low, high, (16, k)).astype(np.int8))
        x = draw(-127, 127, (rows, k)).astype(np.int8)
        bias = rng.standard_normal(16, dtype=np.float32)
        scales = torch.from_numpy(rng.integers(1, 60_000, (16, num_groups)) / 65536).float()
        scales = scales.mul(256).half().float() / 256
        packed = pack_quantized(Quantized(weights, scales, scales.flip(0) if bits == 4 else None), bits)
        token_scales = rng.random((num_groups, rows), np.float32) * np.float32(2.0**matmul.SCALE_SHIFT)
        sums = x.reshape(rows, num_groups, -1).sum(2, dtype=np.int32).T.copy()
        expected = np.concatenate(
            [
                np.concatenate(
                    [
                        single(packed[t : t + 1], x[r : r + 1].copy(), token_scales[:, r : r + 1].copy(), b)
                        for t, b in enumerate((bias[:8].copy(), bias[8:].copy()))
                    ],
                    1,
                )
                for r in range(rows)
            ]
        )
        for first, height in ((0, 16), (3, 16), (0, 1), (2, 7), (4, 15)):
            y = np.full((rows, 16), np.nan, np.float32)
            at = [packed.data_ptr(), num_groups * BLOCK[bits], x.ctypes.data + first * k]
            at += [each.ctypes.data + 4 * first for each in (token_scales, sums)]
            to = y.ctypes.data + first * 64
            pair.run(*at, bias.ctypes.data, k, rows * 4, num_groups, to, 64, height)
            assert y[first : first + height].tobytes() == expected[first : first + height].tobytes()
            assert np.isnan(y[:first]).all()
            assert np.isnan(y[first + height :]).all()


@pytest.mark.parametrize("rows", [1, 7, 16, 17, 40, 95])
@pytest.mark.parametrize("tiles", [2, 3, 9, 24])
def test_threads_share_out_all_tokens_and_outputs(
    rows: int, tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who computes what: every output of every token, and nothing that is not there."""
    k, found = 128, list[tuple[int, ...]]()
    size, heights = k // GROUP[8] * BLOCK[8], list[int]()
    monkeypatch.setattr(amx, "X_BYTES", 48 * k)  # tokens in several parts
    monkeypatch.setattr(amx, "configure", lambda bits, height: heights.append(height))
    monkeypatch.setattr(amx, "release", lambda: None)
    monkeypatch.setattr(amx, "tile_pair", lambda bits, *at: found.append(at))
    few = list[int]()
    product = amx.tile_product(8, lambda *given: few.append(given[-1])).py_func
    for threads in (1, 2, 3, 16):
        found.clear()
        for part in range(threads):
            product(part, threads, matmul.Matrix(0, 10**6, k, 8 * tiles), INPUTS(0, 10**7, 10**8), 0, rows)
        if rows < amx.FEWEST:
            assert (few[-threads:], found) == ([rows] * threads, [])
            continue
        seen = np.zeros((rows, tiles), int)
        for at, own_size, x, scales, sums, bias, _, _, _, out, stride, height in found:
            tile, row = at // size, x // k
            assert (own_size, at % size, x % k) == (size, 0, 0)
            assert (scales - 10**7, sums - 10**8, bias - 10**6) == (4 * row, 4 * row, 32 * tile)
            assert out == row * stride + 32 * tile
            assert tile + 2 <= tiles
            assert row + height <= rows
            seen[row : row + height, tile : tile + 2] += 1
        assert seen.all()
        assert seen.sum() <= 2 * seen.size + 4 * threads * amx.TOKENS
        assert max(heights) <= amx.TOKENS


@pytest.mark.parametrize(
    ("features", "is_granted", "expected"),
    [
        ({"avx2"}, True, []),
        ({"avx2", "avxvnni"}, True, ["vnni"]),
        ({"avx512vl", "avx512vnni"}, True, ["vnni"]),
        ({"avx512vl", "avx512vnni", "amx-tile", "amx-int8"}, True, ["amx", "vnni"]),
        ({"avx512vl", "avx512vnni", "amx-tile", "amx-int8"}, False, ["vnni"]),
    ],
)
def test_processors_of_every_age_have_their_variants(
    features: set[str], is_granted: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile, "FEATURES", dict.fromkeys(features, True))
    has_tiles = {"amx-tile", "amx-int8"} <= features
    monkeypatch.setattr(compile, "may_use_tiles", lambda: has_tiles and is_granted)
    monkeypatch.setattr(compile.platform, "machine", lambda: "x86_64")
    assert compile.available() == [*expected, "plain"]
    with pytest.raises(ConfigError, match=f"this processor can use {' or '.join([*expected, 'plain'])}"):
        compile.choose("sdot")


@pytest.mark.parametrize("bits", [8, 4])
def test_x86_code_uses_the_tile_instructions(bits: int) -> None:
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple("x86_64-unknown-linux-gnu").create_target_machine(
        cpu="sapphirerapids", opt=3
    )
    module = binding.parse_assembly(pair_source(bits))
    module.verify()
    code = target.emit_assembly(module)
    # twice: the first group, and one in each turn of the loop
    assert code.count("\ttdpbssd") == code.count("\ttilestored") == 4
    assert code.count("\ttileloadd") == 6
    assert code.count("\tldtilecfg") == code.count("\ttilerelease") == 1
    assert "call" not in code
