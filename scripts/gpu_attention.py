"""Time the attention of an 8-billion-parameter model on a GPU under other plans than the table's: `python
scripts/gpu_attention.py`.

    python scripts/gpu_attention.py --dry        a short context, no timing: does every plan run and agree
    with the table's

A layer is both kernels of `attend`, replayed from a CUDA graph of 32 layers with caches of their own, so keys
come from memory. Each round changes some constants of the best plan so far, the one whose times, as shares of
the table's, have the smallest sum over contexts. Invariant: what is printed was measured in this run, best
first.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
if not torch.cuda.is_available():  # the tests' way to run kernels without a device, before triton is imported
    import tests.cuda.conftest  # noqa: F401

from paceline.core.types import Columns
from paceline.cuda import attention
from paceline.cuda.attention import Attending, Tiling, attend
from paceline.cuda.batch import BLOCK_SIZE, Bucket, Inputs
from scripts.gpu_linear import microseconds

HEADS, KV_HEADS, DIM, LAYERS = 32, 8, 128, 32
ROUNDS = (
    (
        ("near_size", "far_size"),
        ((64, 64), (128, 128), (256, 256), (384, 384), (512, 512), (1024, 1024), (2048, 2048)),
    ),
    (("block_m", "num_warps"), ((16, 4), (32, 4), (64, 4), (64, 8), (128, 4), (128, 8))),
    (("num_stages", "num_loops"), ((2, 1), (3, 1), (4, 1), (5, 1), (3, 2), (5, 2))),
    (
        ("near_size", "far_size"),
        ((64, 64), (128, 128), (192, 192), (256, 256), (384, 384), (512, 512), (1024, 1024)),
    ),
    (("together", "at_once"), ((8, 1), (16, 1), (8, 2), (8, 4), (4, 4))),
)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Case:
    """One request: a tree of `rows` after `context` cached tokens, and a cache for each layer."""

    def __init__(self, rows: int, context: int, layers: int) -> None:
        self.bucket, num_blocks = Bucket(rows, 1, rows, context), -(-(context + rows) // BLOCK_SIZE)
        table = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
        slots = [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(context, context + rows)]
        parents = [(row - 1) // 2 if row else -1 for row in range(rows)]
        positions = [context + (row + 1).bit_length() - 1 for row in range(rows)]
        self.inputs = Inputs(self.bucket, num_blocks * BLOCK_SIZE, DEVICE)
        self.inputs.fill(
            Columns(
                [0] * rows,
                positions,
                slots,
                parents,
                [0] * rows,
                [0, rows],
                table,
                [context],
                list(range(rows)),
            ),
            None,
        )
        shape = ((num_blocks + 1) * BLOCK_SIZE, KV_HEADS, DIM)
        self.caches = [
            tuple(torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
            for _ in range(layers)
        ]
        self.q = torch.randn((rows, HEADS, DIM), dtype=torch.bfloat16, device=DEVICE)
        self.out = torch.empty_like(self.q)

    def run(self, plan: Tiling) -> torch.Tensor:
        attention.TILINGS = ((self.bucket.rows, None, plan),)
        how = Attending(DIM**-0.5, self.bucket.context, self.bucket.max_rows)
        for cache in self.caches:
            attend(self.q, cache, self.inputs.batch, how, self.out)
        return self.out.float()

    def microseconds(self, plan: Tiling) -> float:
        """Of a layer, the best of a few replays."""
        return microseconds([lambda: self.run(plan)]) / len(self.caches)


def plans_of_round(index: int, rows: int, plan: Tiling) -> list[Tiling]:
    names, numbers = ROUNDS[index]
    plans = [plan._replace(**dict(zip(names, each, strict=True))) for each in numbers]
    most = max(64, rows * HEADS // KV_HEADS)
    return [each for each in plans if index != 1 or most // 8 <= each.block_m <= most]


def search(rows: int, contexts: list[int], table: Tiling) -> None:
    cases, started = {context: Case(rows, context, LAYERS) for context in contexts}, time.perf_counter()
    spent = {table: {context: case.microseconds(table) for context, case in cases.items()}}
    loss = {table: float(len(cases))}
    for index in range(len(ROUNDS)):
        for plan in set(plans_of_round(index, rows, min(loss, key=lambda each: loss[each]))) - set(spent):
            try:
                spent[plan] = {context: case.microseconds(plan) for context, case in cases.items()}
                loss[plan] = sum(us / spent[table][context] for context, us in spent[plan].items())
            except attention.triton.OutOfResources as error:
                print(f"rows {rows:3} {tuple(plan)}: {error}")
    for plan in [*sorted(loss, key=lambda each: loss[each])[:10], table]:
        figures = "  ".join(f"{context}: {us:6.2f}" for context, us in spent[plan].items())
        print(f"rows {rows:3} us a layer  {figures}  {'table' if plan == table else 'other'} {tuple(plan)}")
    print(
        f"rows {rows:3} {len(spent)} plans in {time.perf_counter() - started:.0f} s: {Tiling._fields}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--rows", default="1,8,16,64")
    parser.add_argument("--contexts", default="512,2048,8192")
    parser.add_argument("--heads", default="32,8,128", help="query heads, KV heads, width")
    options = parser.parse_args()
    global HEADS, KV_HEADS, DIM
    HEADS, KV_HEADS, DIM = (int(size) for size in options.heads.split(","))
    plans = attention.TILINGS
    for rows, context in product(map(int, options.rows.split(",")), map(int, options.contexts.split(","))):
        attention.TILINGS = plans
        plan = attention.tiling_for(rows, context)
        if not options.dry:
            search(rows, [context], plan)
            continue
        case = Case(rows, 150, 1)
        for other in [
            each for index in range(len(ROUNDS)) for each in plans_of_round(index, rows, plan)[::4]
        ]:
            print(
                f"rows {rows} {tuple(other)}: largest difference {(case.run(other) - case.run(plan)).abs().max():.4f}"
            )


if __name__ == "__main__":
    main()
