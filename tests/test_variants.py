"""Every instruction set gives the same integers: tiles of each variant run here bit for bit alike, and so does a whole model."""

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

from paceline.cpu import dots, features
from paceline.cpu.lanes import INT64, Emitter
from paceline.errors import ConfigError
from paceline.loaders.quantize import GROUP, Quantized, pack_quantized
from tests.odd_models import DTYPES, digest

VNNI = "llvm.x86.avx512.vpdpbusd.256"
# What the instruction does, for processors that lack it: unsigned times signed bytes, four products to a 32-bit sum that wraps around.
EMULATED = """
define <8 x i32> @emulated(<8 x i32> %total, <32 x i8> %a, <32 x i8> %b) {
  %wide_a = zext <32 x i8> %a to <32 x i32>
  %wide_b = sext <32 x i8> %b to <32 x i32>
  %p = mul <32 x i32> %wide_a, %wide_b
  %p0 = shufflevector <32 x i32> %p, <32 x i32> undef, <8 x i32> <i32 0, i32 4, i32 8, i32 12, i32 16, i32 20, i32 24, i32 28>
  %p1 = shufflevector <32 x i32> %p, <32 x i32> undef, <8 x i32> <i32 1, i32 5, i32 9, i32 13, i32 17, i32 21, i32 25, i32 29>
  %p2 = shufflevector <32 x i32> %p, <32 x i32> undef, <8 x i32> <i32 2, i32 6, i32 10, i32 14, i32 18, i32 22, i32 26, i32 30>
  %p3 = shufflevector <32 x i32> %p, <32 x i32> undef, <8 x i32> <i32 3, i32 7, i32 11, i32 15, i32 19, i32 23, i32 27, i32 31>
  %s0 = add <8 x i32> %total, %p0
  %s1 = add <8 x i32> %s0, %p1
  %s2 = add <8 x i32> %s1, %p2
  %s3 = add <8 x i32> %s2, %p3
  ret <8 x i32> %s3
}
"""
RUNNABLE = [*features.available(), *({"vnni"} - set(features.available()))]  # vnni runs everywhere, emulated where it must be


def dots_of(variant: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """dots.py as it is on a processor with these instructions."""
    monkeypatch.setattr(features, "VARIANT", variant)
    spec = importlib.util.spec_from_file_location(f"dots_{variant}", str(dots.__file__))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tile_source(kind: ModuleType, bits: int, tokens: int) -> str:
    """One tile as a function of ten addresses and numbers, in LLVM's language."""
    module = ir.Module("tile")
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [INT64] * 10), "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    kind._tile(Emitter(builder), bits, tokens, kind.Sources(*function.args[:7]), *function.args[7:])
    builder.ret_void()
    return str(module)


class Tile:
    """A tile compiled for this processor."""

    def __init__(self, kind: ModuleType, bits: int, tokens: int) -> None:
        source = tile_source(kind, bits, tokens)
        if kind.VARIANT == "vnni" and "vnni" not in features.available():
            source = re.sub(rf'declare .*@"?{re.escape(VNNI)}"?.*', "", source)
            source = source.replace(f'@"{VNNI}"', "@emulated") + EMULATED
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        target = binding.Target.from_default_triple().create_target_machine(
            cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=2
        )
        module = binding.parse_assembly(source)
        module.verify()
        self._engine = binding.create_mcjit_compiler(module, target)
        self._engine.finalize_object()
        self._run = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 10)(self._engine.get_function_address("tile"))
        self.bits, self.tokens = bits, tokens

    def __call__(self, packed: torch.Tensor, x: np.ndarray, scales: np.ndarray, bias: np.ndarray) -> np.ndarray:
        """packed [1, groups, bytes], x [tokens, k] int8, scales [groups, tokens] float32, bias [8] -> [tokens, 8]."""
        groups = len(scales)
        sums = x.reshape(self.tokens, groups, -1).sum(2, dtype=np.int32).T.copy()  # [groups, tokens]
        y = np.full((self.tokens, 8), np.nan, np.float32)
        at = [array.ctypes.data for array in (packed.numpy(), x, scales, sums, bias)]
        self._run(*at, x.shape[1], self.tokens * 4, groups, y.ctypes.data, 8 * 4)
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
        self.scales = torch.from_numpy(rng.integers(1, 60_000, (8, groups)) / 65536).float().mul(256).half().float() / 256
        self.minima = self.scales.flip(0) if bits == 4 else None
        self.token_scales = rng.random((groups, tokens), dtype=np.float32)
        self.packed = pack_quantized(Quantized(torch.from_numpy(self.weights), self.scales, self.minima), bits)

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
def test_a_tile_is_right_and_every_variant_and_height_gives_the_same_bits(variant: str, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    heights = range(1, dots.MAX_TOKENS + 1)
    tiles = {n: Tile(dots_of(variant, monkeypatch), bits, n) for n in heights}
    plain = {n: Tile(dots_of("plain", monkeypatch), bits, n) for n in heights}
    rebase = np.float32(2.0**dots.SCALE_SHIFT)
    for draw in CASES.values():
        case = Case(bits, dots.MAX_TOKENS, draw)
        rebased = case.token_scales * rebase
        whole = tiles[dots.MAX_TOKENS](case.packed, case.x, rebased, case.bias)
        size = np.abs(case.exact()).max()
        np.testing.assert_allclose(whole, case.exact(), rtol=0, atol=2e-6 * size * len(rebased))
        for n in heights:
            part = (case.packed, case.x[:n].copy(), rebased[:, :n].copy(), case.bias)
            assert tiles[n](*part).tobytes() == whole[:n].tobytes() == plain[n](*part).tobytes()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("extensions", ["+avx2,+fma,+avxvnni", "+avx2,+fma,+avx512vl,+avx512vnni"])
def test_x86_code_uses_the_dot_product_instruction(bits: int, extensions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong argument types would not verify, and an instruction that was lost would be a slow loop."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple("x86_64-unknown-linux-gnu").create_target_machine(features=extensions, opt=3)
    module = binding.parse_assembly(tile_source(dots_of("vnni", monkeypatch), bits, tokens=4))
    module.verify()
    code = target.emit_assembly(module)
    assert code.count("vpdpbusd") == 4 * GROUP[bits] // 4  # one for each token and four values of k, 8 rows at once
    assert "call" not in code


def other_process(*arguments: str, timeout: float = 300, **variables: str) -> list[str]:
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, "-m", "tests.odd_models", *arguments],
        env=environment, cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_processor_without_dot_products_gives_the_same_logits(dtype: str, pytestconfig: pytest.Config) -> None:
    """Kernels of another variant must not replace the ones on disk, so they have a folder of their own."""
    assert pytestconfig.cache is not None
    folder = pytestconfig.cache.mkdir("plain_kernels")
    found = other_process(dtype, "1", PACELINE_CPU="plain", NUMBA_CACHE_DIR=str(folder))
    assert found == ["plain", digest(dtype)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_no_bit(dtype: str) -> None:
    found = other_process(dtype, "2", "1", "3", NUMBA_NUM_THREADS="3", OMP_NUM_THREADS="3")
    assert found == [features.VARIANT, *[digest(dtype)] * 3]


def test_a_limit_on_threads_is_noticed_and_nothing_hangs() -> None:
    found = other_process("int8", "2", NUMBA_NUM_THREADS="2", OMP_NUM_THREADS="2", OMP_THREAD_LIMIT="1", timeout=120)
    assert found == [features.VARIANT, digest("int8")]


def test_roll_call_counts_the_threads_that_really_run() -> None:
    code = "from paceline.cpu import sync; print(sync.roll_call(1), sync.roll_call(2), sync.num_threads())"
    answers = {}
    for limit in ("8", "1"):
        environment = {**os.environ, "NUMBA_NUM_THREADS": "2", "OMP_NUM_THREADS": "2", "OMP_THREAD_LIMIT": limit}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120)
        answers[limit] = done.stdout.split()
    assert answers == {"8": ["True", "True", "2"], "1": ["True", "False", "1"]}


@pytest.mark.parametrize("wanted", ["neon", "SDOT", *(v for v in features.VARIANTS if v not in features.available())])
def test_instructions_that_are_not_there_are_refused(wanted: str) -> None:
    with pytest.raises(ConfigError, match=f"PACELINE_CPU is '{wanted}'; this processor can use .*plain"):
        features.choose(wanted)


def test_a_wrong_choice_is_one_line_for_the_user() -> None:
    environment = {**os.environ, "PACELINE_CPU": "quick"}
    arguments = [sys.executable, "-c", "from paceline.cli.entry import main; raise SystemExit(main())", "generate", "Hello"]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "PACELINE_CPU is 'quick'" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_usable_starts_with_the_best_and_ends_with_plain() -> None:
    usable = features.available()
    assert usable[-1] == "plain"
    assert features.choose(None) == usable[0]
    assert features.choose("plain") == "plain"
    assert set(usable) <= set(features.VARIANTS)
