"""Time the products of an 8-billion-parameter model on a GPU: bfloat16, int8 and int4, by the fixed table and by other tiles.

    python scripts/gpu_linear.py                 the table, and which other tile is quickest for each shape
    python scripts/gpu_linear.py --dry           tiny shapes, no timing: does every launch run and agree with the dequantized weights

Each product is replayed from a CUDA graph over as many copies of its weights as make 400 MB, so they come from memory and not from a cache.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from itertools import product as combinations
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
if not torch.cuda.is_available():  # the tests' way to run kernels without a device, before triton is imported
    import tests.cuda.conftest  # noqa: F401

from paceline.cuda import linear
from paceline.cuda.linear import QuantizedWeight, Tile

SHAPES = {(6144, 4096): 32, (4096, 4096): 32, (28672, 4096): 32, (4096, 14336): 32, (128256, 4096): 1}  # [N, K]: times a pass
COPIES_BYTES, REPLAYS = 400_000_000, 5
TILES = {
    16: [(64, 4, 4), (64, 4, 6), (64, 2, 4), (128, 4, 3), (128, 4, 4), (128, 4, 5), (128, 8, 4), (256, 8, 3), (32, 1, 5)],
    32: [(64, 4, 4), (64, 2, 4), (128, 4, 3), (128, 4, 4), (128, 8, 4), (256, 8, 3)],
    64: [(64, 4, 4), (128, 4, 3), (128, 4, 4), (128, 8, 3), (256, 8, 2), (256, 8, 3), (256, 8, 4)],
}  # rows of x in a tile: rows of W, warps, stages
SPLITS = (1, 2, 4, 8, 16)


def microseconds(calls: list[Callable[[], object]]) -> float:
    """Of one call, replayed in a graph of all of them; the best of a few replays."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return min(times)


def copies_of(weight: QuantizedWeight) -> list[QuantizedWeight]:
    count = max(2, COPIES_BYTES // (weight.packed.nbytes + weight.scales.nbytes))
    return [weight._replace(packed=weight.packed.clone(), scales=weight.scales.clone()) for _ in range(count)]


def candidates(num_rows: int, weight: QuantizedWeight) -> list[tuple[Tile, int]]:
    block = next((size for size in TILES if num_rows <= size), 64)
    groups, rows, _ = weight.packed.shape
    tiles = [Tile(block, *rest) for rest in TILES[block] if rows % rest[0] == 0]
    return [(tile, cut) for tile, cut in combinations(tiles, SPLITS) if cut * 2 <= groups and 100 <= rows // tile.block_n * cut <= 4200]


def measure(x: torch.Tensor, copies: list[QuantizedWeight], tile: Tile, splits: int) -> float:
    out = torch.empty((len(x), copies[0].shape[0]), dtype=x.dtype, device=x.device)
    workspace = torch.empty(splits * out.numel(), device=x.device)
    return microseconds([lambda w=w: linear.launch(x, w, None, out, workspace, tile, splits) for w in copies])


def time_shape(shape: tuple[int, int], rows: list[int], totals: dict[tuple[str, int], float]) -> None:
    weight, times = torch.randn(shape, device="cuda", dtype=torch.bfloat16) / 64, SHAPES[shape]
    whole = [weight.clone() for _ in range(max(2, COPIES_BYTES // (weight.numel() * 2)))]
    inputs = {count: torch.randn((count, shape[1]), device="cuda", dtype=torch.bfloat16) for count in rows}
    base = {count: microseconds([lambda x=x, w=w: x @ w.T for w in whole]) for count, x in inputs.items()}
    for count in rows:
        totals["bf16", count] = totals.get(("bf16", count), 0) + times * base[count]
        print(f"{shape!s:15} T {count:3} bf16 {base[count]:8.1f} us {weight.numel() * 2e-3 / base[count]:6.0f} GB/s")
    for bits, count in combinations((4, 8), rows):
        copies, x = copies_of(linear.pack(weight, bits)), inputs[count]
        table = (linear.tile_of(count, copies[0], x.dtype), linear.splits_of(copies[0]))
        spent = {choice: measure(x, copies, *choice) for choice in {table, *candidates(count, copies[0])}}
        order = sorted(spent, key=lambda choice: spent[choice])
        for name, choice, us in [("table", table, spent[table]), *(("other", choice, spent[choice]) for choice in order[:4])]:
            figures = f"{us:8.1f} us {(copies[0].packed.nbytes + copies[0].scales.nbytes) * 1e-3 / us:6.0f} GB/s {us / base[count]:5.2f}"
            print(f"{shape!s:15} T {count:3} int{bits} {figures} {name} {tuple(choice[0])} splits {choice[1]}", flush=True)
        for name, choice in (("table", table), ("best", order[0])):
            totals[f"int{bits} {name}", count] = totals.get((f"int{bits} {name}", count), 0) + times * spent[choice]


def dry() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for bits, count in combinations((4, 8), (1, 40)):
        weight, x = linear.pack(torch.randn((256, 512), device=device), bits), torch.randn((count, 512), device=device).bfloat16()
        wanted = x.float() @ linear.dequantized(weight, x.dtype).float().T
        out, block = torch.empty((count, 256), dtype=x.dtype, device=device), linear.tile_of(count, weight, x.dtype).block_t
        for tile, splits in combinations([Tile(block, *rest) for rest in TILES[block]], (1, 2)):
            linear.launch(x, weight, None, out, None, tile, splits)
            print(f"int{bits} T {count} {tuple(tile)} splits {splits}: largest difference {(out.float() - wanted).abs().max():.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--rows", default="1,8,16,64", help="numbers of rows of x")
    options = parser.parse_args()
    totals: dict[tuple[str, int], float] = {}
    if options.dry:
        return dry()
    for shape in SHAPES:
        time_shape(shape, [int(count) for count in options.rows.split(",")], totals)
    for (name, count), us in totals.items():
        print(f"whole pass T {count:3} {name:10} {us / 1000:6.2f} ms, {us / totals['bf16', count]:.2f} of bf16")


if __name__ == "__main__":
    main()
