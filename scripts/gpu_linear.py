"""Time the products of an 8-billion-parameter model on a GPU: torch's against weights of 16, 8 and 4 bits, by
the table and by other tiles.

    python scripts/gpu_linear.py                 the table, and which other tile is quickest for each shape
    python scripts/gpu_linear.py --dry           tiny shapes, no timing: does every launch run and agree with
    the dequantized weights

Each product is replayed from a CUDA graph over as many copies of its weights as make 400 MB, so they come
from memory and not from a cache.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from itertools import product as combinations
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).parent.parent))
if not torch.cuda.is_available():  # the tests' way to run kernels without a device, before triton is imported
    import tests.cuda.conftest  # noqa: F401

from paceline.cuda import linear
from paceline.cuda.linear import Tile
from paceline.cuda.pack import PackedWeight, pack

SHAPES = {
    (6144, 4096): 32,
    (4096, 4096): 32,
    (28672, 4096): 32,
    (4096, 14336): 32,
    (128256, 4096): 1,
}  # [N, K]: times a pass
COPIES_BYTES, REPLAYS = 400_000_000, 5
TILES = {
    16: [
        (16, 128, 4, 3),
        (16, 128, 4, 4),
        (16, 128, 4, 6),
        (16, 128, 8, 4),
        (16, 64, 4, 4),
        (16, 64, 4, 6),
        (16, 256, 8, 3),
        (16, 256, 8, 4),
    ],
    32: [(32, 128, 4, 3), (32, 128, 4, 4)],
    64: [
        (64, 128, 4, 3),
        (64, 128, 4, 4),
        (64, 128, 8, 4),
        (64, 64, 4, 4),
        (64, 256, 8, 2),
        (64, 256, 8, 3),
        (64, 256, 8, 4),
    ],
    256: [(64, 128, 4, 3), (128, 128, 8, 2), (128, 128, 8, 3)],
}  # up to so many rows of x: tiles, to be compared with the table's
BITS = (16, 8, 4)


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


def copies_of(weight: PackedWeight) -> list[PackedWeight]:
    count = max(2, COPIES_BYTES // (weight.packed.nbytes + weight.scales.nbytes))
    return [weight._replace(packed=weight.packed.clone(), scales=weight.scales.clone()) for _ in range(count)]


def candidates(num_rows: int, weight: PackedWeight) -> list[tuple[Tile, int]]:
    """The table's choice first."""
    tile, cut = linear.way_of(num_rows, weight, torch.bfloat16, is_exact=True)
    block = next(size for size in TILES if num_rows <= size)
    others = [Tile(*sizes) for sizes in TILES[block]]
    cuts = [cut, *(size for size in (cut // 2,) if size)]
    return list(dict.fromkeys([(tile, cut), *combinations(others, cuts)]))


def measure(x: torch.Tensor, copies: list[PackedWeight], tile: Tile, splits: int) -> float:
    out = torch.empty((len(x), copies[0].shape[0]), dtype=x.dtype, device=x.device)
    return microseconds([lambda w=w: linear.launch(x, w, None, out, tile, splits) for w in copies])


def time_torch(
    shape: tuple[int, int],
    weight: torch.Tensor,
    inputs: dict[int, torch.Tensor],
    totals: dict[tuple[str, int], float],
) -> None:
    whole = [weight.clone() for _ in range(max(2, COPIES_BYTES // weight.nbytes))]
    for count, x in inputs.items():
        us = microseconds([lambda w=w, x=x: x @ w.T for w in whole])
        totals["torch", count] = totals.get(("torch", count), 0) + SHAPES[shape] * us
        print(f"{shape!s:15} T {count:3} torch   {us:8.1f} us {weight.nbytes * 1e-3 / us:6.0f} GB/s")


def time_tiles(
    shape: tuple[int, int], copies: list[PackedWeight], x: torch.Tensor, totals: dict[tuple[str, int], float]
) -> None:
    bits, count, size = copies[0].bits, len(x), copies[0].packed.nbytes + copies[0].scales.nbytes
    choices = candidates(count, copies[0])
    spent = {}
    for choice in choices:
        with contextlib.suppress(triton.OutOfResources):
            spent[choice] = measure(x, copies, *choice)
    order = sorted(spent, key=lambda choice: spent[choice])
    for name, choice in [
        ("table", choices[0]),
        *(("other", choice) for choice in order[:4] if choice != choices[0]),
    ]:
        figures = f"{spent[choice]:8.1f} us {size * 1e-3 / spent[choice]:6.0f} GB/s"
        print(
            f"{shape!s:15} T {count:3} {bits:2} bits {figures} {name} {tuple(choice[0])} splits {choice[1]}",
            flush=True,
        )
    for name, choice in (("table", choices[0]), ("best", order[0])):
        totals[f"{bits} {name}", count] = (
            totals.get((f"{bits} {name}", count), 0) + SHAPES[shape] * spent[choice]
        )


def time_shape(shape: tuple[int, int], counts: list[int], totals: dict[tuple[str, int], float]) -> None:
    weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16) / 64
    inputs = {count: torch.randn((count, shape[1]), device="cuda", dtype=torch.bfloat16) for count in counts}
    time_torch(shape, weight, inputs, totals)
    for bits in BITS:
        copies = copies_of(pack(weight, bits))
        for x in inputs.values():
            time_tiles(shape, copies, x, totals)


def dry() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for bits, count in combinations(BITS, (1, 40, 70)):
        weight = pack(torch.randn((256, 512), device=device, dtype=torch.bfloat16), bits)
        x = torch.randn((count, 512), device=device).bfloat16()
        wanted = x.float() @ linear.dequantized(weight, x.dtype).float().T
        out = torch.empty((count, 256), dtype=x.dtype, device=device)
        for tile, splits in candidates(count, weight):
            linear.launch(x, weight, None, out, tile, splits)
            print(
                f"{bits} bits T {count} {tuple(tile)} splits {splits}: largest difference {(out.float() - wanted).abs().max():.3f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--bits", default="16,8,4")
    parser.add_argument("--rows", default="1,16,64,256", help="numbers of rows of x, at most 256")
    options = parser.parse_args()
    totals: dict[tuple[str, int], float] = {}
    global BITS
    BITS = tuple(int(bits) for bits in options.bits.split(","))
    if options.dry:
        return dry()
    for shape in SHAPES:
        time_shape(shape, [int(count) for count in options.rows.split(",")], totals)
    for (name, count), us in totals.items():
        print(
            f"whole pass T {count:3} {name:10} {us / 1000:6.2f} ms, {us / totals['torch', count]:.2f} of torch"
        )


if __name__ == "__main__":
    main()
