"""Kernels that start while the one before them still runs: programmatic dependent launch (Hopper and later).

A kernel lets the next one start at once, reads what no kernel of the pass writes (weights, tables), and waits
before it touches anything else. Starting and draining, a microsecond or two of each launch, then hide behind
the kernel before. Invariant: every program of every kernel launched with LAUNCH waits before its first load
of a computed number and before its first store, so the order is as without.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED: bool = triton.knobs.runtime.interpret
_CAN_OVERLAP = not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
OVERLAPS = tl.constexpr(_CAN_OVERLAP)
# Up to these numbers of rows products let the next kernel start at their own start (measured on an H200).
PLAIN_ROWS, CHECKED_ROWS = 8, 64
LAUNCH: dict[str, bool] = {"launch_pdl": True} if _CAN_OVERLAP else {}  # options of every launch


@triton.jit
def let_next_start() -> None:
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous() -> None:
    if OVERLAPS:
        gdc_wait()
