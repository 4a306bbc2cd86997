"""Every instruction set gives the same integers: tiles of each variant run here bit for bit alike, and so
does a whole model.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from llvmlite import binding, ir

from paceline.core.errors import ConfigError
from paceline.cpu import compile, matmul, tiles, value_tiles
from paceline.cpu.lanes import INT64, Emitter
from paceline.cpu.tiles import AHEAD, PLACE, SCORED, SPAN
from paceline.models.quantize import GROUP, Quantized, pack_quantized
from tests.odd_models import DTYPES, digest

VNNI = {sums: f"llvm.x86.avx512.vpdpbusd.{32 * sums}" for sums in (16, 8, 4)}  # by the sums of a register


def emulation(sums: int) -> str:
    """What the instruction does, for processors that lack it: unsigned times signed bytes, four products to a
    sum that wraps around.
    """
    total, narrow, wide = f"<{sums} x i32>", f"<{4 * sums} x i8>", f"<{4 * sums} x i32>"
    lines = [
        f"%a = zext {narrow} %x to {wide}",
        f"%b = sext {narrow} %y to {wide}",
        f"%p = mul {wide} %a, %b",
        f"%s0 = add {total} %start, zeroinitializer",
    ]
    for lane in range(4):
        mask = ", ".join(f"i32 {4 * row + lane}" for row in range(sums))
        lines.append(f"%p{lane} = shufflevector {wide} %p, {wide} undef, {total} <{mask}>")
        lines.append(f"%s{lane + 1} = add {total} %s{lane}, %p{lane}")
    body = "\n  ".join([*lines, f"ret {total} %s4"])
    return f"define {total} @emulated{sums}({total} %start, {narrow} %x, {narrow} %y) {{\n  {body}\n}}\n"


RUNNABLE = [
    *compile.available(),
    *({"vnni"} - set(compile.available())),
]  # vnni runs everywhere, emulated where it must be


def variant_of(module: ModuleType, variant: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module as it is on a processor with these instructions."""
    monkeypatch.setattr(compile, "VARIANT", variant)
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_{variant}", str(module.__file__))
    assert spec is not None
    assert spec.loader is not None
    other = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(other)
    return other


def dots_of(variant: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return variant_of(matmul, variant, monkeypatch)


def function_source(num_arguments: int, write: Callable[..., None]) -> str:
    """A function of some addresses and numbers, in LLVM's language."""
    module = ir.Module("tile")
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [INT64] * num_arguments), "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    write(Emitter(builder), *function.args)
    builder.ret_void()
    return str(module)


def tile_source(kind: ModuleType, bits: int, tokens: int) -> str:
    return function_source(10, lambda emit, *at: kind._tile(emit, bits, tokens, *at))


class Compiled:
    """A function of addresses and numbers, compiled for this processor."""

    def __init__(self, source: str, num_arguments: int) -> None:
        for sums, name in VNNI.items():
            if name in source and "vnni" not in compile.available():
                source = re.sub(rf'declare .*@"?{re.escape(name)}"?.*', "", source)
                source = source.replace(f'@"{name}"', f"@emulated{sums}") + emulation(sums)
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        target = binding.Target.from_default_triple().create_target_machine(
            cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=2
        )
        module = binding.parse_assembly(source)
        module.verify()
        self._engine = binding.create_mcjit_compiler(module, target)
        self._engine.finalize_object()
        self.run = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * num_arguments)(
            self._engine.get_function_address("tile")
        )


class Tile:
    def __init__(self, kind: ModuleType, bits: int, tokens: int) -> None:
        self._tile = Compiled(tile_source(kind, bits, tokens), 10)
        self.bits, self.tokens = bits, tokens

    def __call__(
        self, packed: torch.Tensor, x: np.ndarray, scales: np.ndarray, bias: np.ndarray
    ) -> np.ndarray:
        """packed [1, groups, bytes], x [tokens, k] int8, scales [groups, tokens] float32, bias [8] ->
        [tokens, 8].
        """
        groups = len(scales)
        sums = x.reshape(self.tokens, groups, -1).sum(2, dtype=np.int32).T.copy()  # [groups, tokens]
        y = np.full((self.tokens, 8), np.nan, np.float32)
        at = [array.ctypes.data for array in (packed.numpy(), x, scales, sums, bias)]
        self._tile.run(*at, x.shape[1], self.tokens * 4, groups, y.ctypes.data, 8 * 4)
        return y


class Case:
    """Random integers, or the largest there are, which would overflow a register that is too narrow."""

    def __init__(self, bits: int, tokens: int, draw: Callable[..., Any]) -> None:
        groups = 3
        k = groups * GROUP[bits]
        low, high = (-127, 127) if bits == 8 else (0, 15)
        rng = np.random.default_rng(bits + tokens)
        self.weights = draw(low, high, (8, k)).astype(np.int8)
        self.x = draw(-127, 127, (tokens, k)).astype(np.int8)
        self.bias = rng.standard_normal(8, dtype=np.float32)
        self.scales = (
            torch.from_numpy(rng.integers(1, 60_000, (8, groups)) / 65536).float().mul(256).half().float()
            / 256
        )
        self.minima = self.scales.flip(0) if bits == 4 else None
        self.token_scales = rng.random((groups, tokens), dtype=np.float32)
        self.packed = pack_quantized(
            Quantized(torch.from_numpy(self.weights), self.scales, self.minima), bits
        )

    def exact(self) -> np.ndarray:
        """[tokens, 8] in double precision."""
        groups = self.scales.shape[1]
        x = self.x.astype(np.int64).reshape(len(self.x), groups, -1)  # [tokens, groups, k]
        whole = np.einsum("tgk,rgk->tgr", x, self.weights.astype(np.int64).reshape(8, groups, -1))
        products = whole * self.scales.numpy().T.astype(np.float64)  # [tokens, groups, 8]
        if self.minima is not None:
            products = products - x.sum(2)[:, :, None] * self.minima.numpy().T
        total: np.ndarray = (products * self.token_scales.T[:, :, None]).sum(1) + self.bias
        return total


def random_integers(low: int, high: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(shape[0]).integers(low, high + 1, shape)


CASES: dict[str, Callable[..., Any]] = {
    "random": random_integers,
    "largest": lambda low, high, shape: np.full(shape, high),
    "smallest": lambda low, high, shape: np.full(shape, low),
    "opposite": lambda low, high, shape: np.full(shape, low if shape[0] == 8 else high),
    "zero": lambda low, high, shape: np.zeros(shape),
}


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("variant", RUNNABLE)
def test_a_tile_is_right_and_every_variant_and_height_gives_the_same_bits(
    variant: str, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    heights = range(1, matmul.MAX_TOKENS + 1)
    tiles = {n: Tile(dots_of(variant, monkeypatch), bits, n) for n in heights}
    plain = {n: Tile(dots_of("plain", monkeypatch), bits, n) for n in heights}
    rebase = np.float32(2.0**matmul.SCALE_SHIFT)
    for draw in CASES.values():
        case = Case(bits, matmul.MAX_TOKENS, draw)
        rebased = case.token_scales * rebase
        whole = tiles[matmul.MAX_TOKENS](case.packed, case.x, rebased, case.bias)
        size = np.abs(case.exact()).max()
        np.testing.assert_allclose(whole, case.exact(), rtol=0, atol=2e-6 * size * len(rebased))
        for n in heights:
            part = (case.packed, case.x[:n].copy(), rebased[:, :n].copy(), case.bias)
            assert tiles[n](*part).tobytes() == whole[:n].tobytes() == plain[n](*part).tobytes()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("extensions", ["+avx2,+fma,+avxvnni", "+avx2,+fma,+avx512vl,+avx512vnni"])
def test_x86_code_uses_the_dot_product_instruction(
    bits: int, extensions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong argument types would not verify, and an instruction that was lost would be a slow loop."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple("x86_64-unknown-linux-gnu").create_target_machine(
        features=extensions, opt=3
    )
    module = binding.parse_assembly(tile_source(dots_of("vnni", monkeypatch), bits, tokens=4))
    module.verify()
    code = target.emit_assembly(module)
    assert (
        code.count("vpdpbusd") == 4 * GROUP[bits] // 4
    )  # one for each token and four values of k, 8 rows at once
    assert "call" not in code


@pytest.mark.parametrize("dim", [16, 48, 64])
@pytest.mark.parametrize("variant", RUNNABLE)
def test_scores_of_every_variant_are_those_of_the_plain_one(
    variant: str, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = [variant_of(tiles, name, monkeypatch) for name in (variant, "plain")]
    rng, width, slots = np.random.default_rng(dim), dim + tiles.TAIL, 2 * AHEAD
    for limits in ((-127, 128), (127, 128), (-127, -126)):
        heads = rng.integers(*limits, (slots + SCORED, width)).astype(np.int8)
        middle = -(-dim // 32) * 16
        heads[:, dim : dim + 8] = rng.random((len(heads), 2), np.float32).view(np.int8)
        halves = (heads[:, :middle], heads[:, middle:dim])
        heads[:, dim + 8 :] = np.stack([half.sum(1, dtype=np.int32) for half in halves], 1).view(np.int8)
        places = np.stack([rng.permutation(slots) * width] * 2, 1)
        found = []
        for kind in kinds:
            tile = Compiled(
                function_source(7, lambda emit, *at, kind=kind: kind._score(emit, SCORED, *at)), 7
            )
            for span in (SPAN, 1):
                out = np.zeros((SCORED, SPAN), np.float32)
                for p in range(0, SPAN, span):
                    at = [
                        heads.ctypes.data + slots * width,
                        heads.ctypes.data,
                        places.ctypes.data + p * PLACE,
                    ]
                    tile.run(*at, span, dim, out.ctypes.data + 4 * p, 4 * SPAN)
                found.append(out.tobytes())
        assert len(set(found)) == 1
        assert any(found[0])


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("variant", RUNNABLE)
def test_sums_of_values_of_every_variant_are_right(
    variant: str, is_wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variant in compile.available() and variant in compile.UNSIGNED_FIRST and is_wide:
        is_wide = bool(compile.FEATURES.get("avx512vnni"))  # only what this processor can run
    monkeypatch.setattr(compile, "FEATURES", {"avx512vnni": is_wide})
    kind, turns, queries = variant_of(value_tiles, variant, monkeypatch), 5, 3
    tile = Compiled(function_source(6, lambda emit, *at: kind._add(emit, queries, *at)), 6)
    rng = np.random.default_rng(turns)
    weights = rng.integers(0, 128, (queries, turns, 2, 2, 4)).astype(np.int8)  # high and low bytes of fours
    values = rng.integers(-127, 128, (turns, 2, 16, 4)).astype(np.int8)
    out = rng.integers(-99, 99, (queries, 2, 16)).astype(np.int32)
    expected = out + np.einsum("qtfhp,tfcp->qhc", weights.astype(np.int32), values.astype(np.int32))
    tile.run(weights.ctypes.data, weights[0].size, values.ctypes.data, turns, out.ctypes.data, 4 * 32)
    assert (out == expected).all()


@pytest.mark.parametrize("extensions", ["+avx2,+fma,+avxvnni", "+avx2,+fma,+avx512vl,+avx512vnni"])
def test_x86_scores_use_the_dot_product_instruction(extensions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple("x86_64-unknown-linux-gnu").create_target_machine(
        features=extensions, opt=3
    )
    kind = variant_of(tiles, "vnni", monkeypatch)
    module = binding.parse_assembly(function_source(7, lambda emit, *at: kind._score(emit, 3, *at)))
    module.verify()
    code = target.emit_assembly(module)
    assert code.count("vpdpbusd") == 2 * 3 * (
        SPAN + 1
    )  # of each half and query, SPAN positions at a time and one
    assert "call" not in code


def other_process(*arguments: str, timeout: float = 1200, **variables: str) -> list[str]:
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, "-m", "tests.odd_models", *arguments],
        env=environment, cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_processor_without_dot_products_gives_the_same_logits(
    dtype: str, pytestconfig: pytest.Config
) -> None:
    """Kernels of another variant must not replace the ones on disk, so they have a folder of their own."""
    assert pytestconfig.cache is not None
    folder = pytestconfig.cache.mkdir("plain_kernels")
    found = other_process(dtype, "1", PACELINE_CPU="plain", NUMBA_CACHE_DIR=str(folder))
    assert found == ["plain", digest(dtype)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_no_bit(dtype: str) -> None:
    found = other_process(dtype, "2", "1", "3", NUMBA_NUM_THREADS="3", OMP_NUM_THREADS="3")
    assert found == [compile.VARIANT, *[digest(dtype)] * 3]


def test_a_limit_on_threads_is_noticed_and_nothing_hangs() -> None:
    found = other_process(
        "int8", "2", NUMBA_NUM_THREADS="2", OMP_NUM_THREADS="2", OMP_THREAD_LIMIT="1", timeout=300
    )
    assert found == [compile.VARIANT, digest("int8")]


@pytest.mark.parametrize(
    "wanted", ["neon", "SDOT", *(v for v in compile.VARIANTS if v not in compile.available())]
)
def test_instructions_that_are_not_there_are_refused(wanted: str) -> None:
    with pytest.raises(ConfigError, match=f"PACELINE_CPU is '{wanted}'; this processor can use .*plain"):
        compile.choose(wanted)


def test_a_wrong_choice_is_one_line_for_the_user() -> None:
    environment = {**os.environ, "PACELINE_CPU": "quick"}
    arguments = [
        sys.executable,
        "-c",
        "from paceline.cli.entry import main; raise SystemExit(main())",
        "generate",
        "Hello",
    ]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "PACELINE_CPU is 'quick'" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_usable_starts_with_the_best_and_ends_with_plain() -> None:
    usable = compile.available()
    assert usable[-1] == "plain"
    assert compile.choose(None) == usable[0]
    assert compile.choose("plain") == "plain"
    assert set(usable) <= set(compile.VARIANTS)
